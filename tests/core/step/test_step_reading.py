"""What is said about a step that did not go well, and about a micro-batch that is to blame."""

import pytest
import torch

from hf_nanguard.core.rerun.micro_batch import AccumulationGroup, Finding, MicroBatch
from hf_nanguard.core.rng import RngState
from hf_nanguard.core.step.bad_gradients import Census, judge
from hf_nanguard.core.step.decision import Decision, StepAction
from hf_nanguard.core.step.step_reading import BadMicroBatch, StepOutcome, StepReading
from hf_nanguard.core.vocabulary import Action, Cause, Signal
from hf_nanguard.testing import INF, NAN

NAMES = ["embed", "up", "down", "head"]


def _micro(index, loss=None, rows=None, findings=()):
    loss = None if loss is None else torch.tensor(loss)
    return MicroBatch(index, None, RngState.capture(), findings, rows, loss)


def _incident(losses, norm=NAN, bad=None, signal=Signal.GRAD_NONFINITE, **fields):
    micro_batches = [_micro(i, loss, rows=[10 * i, 10 * i + 1]) for i, loss in enumerate(losses)]
    census = Census() if bad is None else judge(NAMES, bad)
    decision = Decision(StepAction.REDO, signal)
    return StepReading(
        7,
        AccumulationGroup(1.0, micro_batches),
        losses,
        norm,
        torch.tensor(norm),
        decision,
        census=census,
        **fields,
    )


def test_the_first_bad_loss_is_found_with_its_place():
    assert _incident([1.0, INF, NAN]).bad_loss == (1, INF)
    assert _incident([1.0, 2.0]).bad_loss is None
    assert _incident([]).bad_loss is None


def test_only_finite_losses_stand_for_the_group():
    assert [float(loss) for loss in _incident([1.0, NAN, 3.0, -INF]).finite_losses] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("losses", "bad", "said"),
    [
        ([1.0, NAN], {"up": "nan"}, "loss is nan at step 7"),
        ([INF], {"up": "nan"}, "loss is inf at step 7"),
        ([1.0], {"up": "inf"}, "gradient of up became inf (1 of 4) at step 7"),
        ([1.0], {"up": "nan", "down": "nan"}, "gradient of down became NaN (2 of 4 gradients are bad) at step 7"),
        ([1.0], dict.fromkeys(NAMES, "nan"), "all 4 gradients are bad at step 7"),
        ([1.0], {}, "all 4 gradients are finite at step 7"),
    ],
)
def test_one_clause_says_what_is_wrong(losses, bad, said):
    assert _incident(losses, bad=bad).describe() == said


def test_the_event_of_a_bad_gradient_names_the_parameter_and_no_micro_batch():
    event = _incident([1.0, 2.0], INF, {"up": "inf"}).event(Action.SKIPPED, "said", extra=5)
    assert (event.step, event.micro_step) == (7, None)
    assert (event.signal, event.action, event.message) == (Signal.GRAD_NONFINITE, Action.SKIPPED, "said")
    assert (event.culprit.phase, event.culprit.parameter, event.culprit.rows) == ("backward", "up", None)
    assert event.values == {
        "loss": 2.0, "grad_norm": INF, "num_bad_parameters": 1, "num_good_parameters": 3,
        "bad_parameters": {"up": "inf"}, "good_neighbours": ["embed", "down"], "extra": 5,
    }  # fmt: skip


def test_the_event_of_a_bad_loss_names_its_micro_batch_and_rows():
    reading = _incident([1.0, NAN, 2.0], NAN, dict.fromkeys(NAMES, "nan"), Signal.LOSS_NONFINITE)
    event = reading.event(Action.SKIPPED, "said")
    assert (event.micro_step, event.signal) == (1, Signal.LOSS_NONFINITE)
    assert (event.culprit.phase, event.culprit.parameter, event.culprit.rows) == ("loss", None, [10, 11])
    assert event.as_dict()["values"]["loss"] == "nan"


def test_signal_and_cause_can_be_given():
    event = _incident([1.0], INF, {}).event(Action.SKIPPED, "said", Signal.GRAD_NONFINITE, Cause.NORM_OVERFLOW)
    assert (event.signal, event.cause, event.culprit.parameter) == (Signal.GRAD_NONFINITE, Cause.NORM_OVERFLOW, None)


def test_without_any_loss_there_is_none_to_show():
    assert _incident([], NAN, {"up": "nan"}).as_values()["loss"] is None


# ---- a micro-batch that is to blame ----


def _finding(**fields):
    return Finding(Signal.LABEL_OUT_OF_RANGE, "label 99 is outside 0..63", cause=Cause.LABEL_OUT_OF_RANGE, **fields)


def test_a_finding_blames_the_rows_of_its_samples_only():
    micro = _micro(2, rows=[40, 41, 42, 43])
    bad = BadMicroBatch.of_finding(micro, _finding(samples=(1, 3), tokens=((1, 5), (3, 0))), 7)
    event = bad.event(Action.DROPPED, _incident([1.0]))
    assert (event.step, event.micro_step) == (7, 2)
    assert (event.signal, event.cause) == (Signal.LABEL_OUT_OF_RANGE, Cause.LABEL_OUT_OF_RANGE)
    culprit = event.culprit
    assert (culprit.phase, culprit.samples, culprit.rows, culprit.tokens) == (
        "input",
        [1, 3],
        [41, 43],
        [[1, 5], [3, 0]],
    )
    for part in ("label 99 is outside 0..63", "in micro-batch 2 of step 7", "(dataset rows 41, 43)"):
        assert part in event.message


def test_a_finding_without_samples_blames_the_whole_batch():
    culprit = BadMicroBatch.of_finding(_micro(0, rows=[4, 5]), _finding(), 7).culprit
    assert (culprit.samples, culprit.rows, culprit.tokens) == (None, [4, 5], None)


def test_a_finding_about_unknown_rows_says_nothing_of_rows():
    bad = BadMicroBatch.of_finding(_micro(0), _finding(samples=(1,)), 7)
    assert bad.culprit.rows is None
    assert bad.message == "label 99 is outside 0..63 in micro-batch 0 of step 7"


def test_a_sample_beyond_the_known_rows_is_left_out():
    assert BadMicroBatch.of_finding(_micro(0, rows=[4, 5]), _finding(samples=(1, 2)), 7).culprit.rows == [5]


@pytest.mark.parametrize(
    ("loss", "bad", "signal", "phase", "parameter", "said"),
    [
        (NAN, dict.fromkeys(NAMES, "nan"), "loss_nonfinite", "loss", None, "loss is nan"),
        (2.5, {"down": "inf"}, "grad_nonfinite", "backward", "down", "gradient of down became inf (1 of 4)"),
        (2.5, dict.fromkeys(NAMES, "nan"), "grad_nonfinite", "backward", None, "all 4 gradients are bad"),
    ],
)
def test_a_run_blames_loss_or_gradient(loss, bad, signal, phase, parameter, said):
    bad_one = BadMicroBatch.of_run(_micro(1, rows=[8, 9]), loss, judge(NAMES, bad), 7)
    event = bad_one.event(Action.DROPPED, _incident([1.0], INF, learning_rate=5e-5), note="; noted")
    assert (event.signal, event.micro_step) == (signal, 1)
    assert (event.culprit.phase, event.culprit.parameter, event.culprit.rows) == (phase, parameter, [8, 9])
    assert event.message.startswith(said)
    assert "in micro-batch 1 of step 7" in event.message
    assert event.message.endswith("; noted")
    assert event.values["bad_parameters"] == bad
    assert (event.values["loss"], event.values["grad_norm"], event.values["learning_rate"]) == (
        pytest.approx(loss, nan_ok=True), INF, 5e-5,
    )  # fmt: skip


def test_rows_that_travel_as_a_tensor_are_read_when_told():
    micro = _micro(0, rows=torch.tensor([3, 1]))
    assert BadMicroBatch.of_run(micro, NAN, judge(NAMES, {}), 7).culprit.rows == [3, 1]


def test_an_outcome_lets_a_healthy_step_pass_as_it_is():
    assert vars(StepOutcome()) == {
        "stepped": True, "norm": None, "redone": None, "fresh": False, "num_dropped": 0, "clip_to": None, "halt": None,
        "scaler_skips": False, "failure": None, "rewound": False, "moves_schedule": False,
    }  # fmt: skip
