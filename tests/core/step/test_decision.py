"""The table of decisions, and the count of bad steps in a row."""

import pytest

from hf_nanguard.core.monitors.spike_detector import SpikeDetector
from hf_nanguard.core.settings import Policy
from hf_nanguard.core.step.decision import HEALTHY, Decision, Escalation, StepAction, decide
from hf_nanguard.core.vocabulary import Signal
from hf_nanguard.testing import INF, NAN


def seen(value=1.0, count=60):
    window = SpikeDetector()
    for _ in range(count):
        window.add(0, value)
    return window


STEP, REDO, SKIP, CLIP = StepAction.STEP, StepAction.REDO, StepAction.SKIP, StepAction.CLIP
GRAD, LOSS, SPIKE = Signal.GRAD_NONFINITE, Signal.LOSS_NONFINITE, Signal.GRAD_SPIKE


@pytest.mark.parametrize(
    ("losses", "norm", "settings", "action", "signal"),
    [
        ([1.0], 1.0, {}, STEP, None),
        ([], 1.0, {}, STEP, None),
        ([0.0], 0.0, {}, STEP, None),
        ([1.0], NAN, {}, REDO, GRAD),
        ([1.0], INF, {}, REDO, GRAD),
        ([], NAN, {}, REDO, GRAD),
        ([NAN], NAN, {}, REDO, LOSS),
        ([1.0, INF], INF, {}, REDO, LOSS),
        ([NAN], NAN, {"on_nonfinite": "floor"}, REDO, LOSS),
        ([NAN], NAN, {"on_nonfinite": "skip"}, SKIP, LOSS),
        ([1.0], NAN, {"on_nonfinite": "repair"}, StepAction.REPAIR, GRAD),
        ([1.0], NAN, {"on_nonfinite": "halt"}, StepAction.HALT, GRAD),
        ([NAN], NAN, {"mode": "observe"}, STEP, LOSS),
        ([1.0], NAN, {"mode": "observe", "on_nonfinite": "halt"}, STEP, GRAD),
        # a loss that is not finite never reaches the optimizer, whatever its gradients are
        ([NAN], 1.0, {}, REDO, LOSS),
        ([1.0, -INF], 1.0, {}, REDO, LOSS),
        ([NAN], 1.0, {"on_nonfinite": "halt"}, StepAction.HALT, LOSS),
        ([NAN], 1.0, {"mode": "observe"}, STEP, LOSS),
        ([NAN], 1e6, {"skip_grad_norm": 2.0}, REDO, LOSS),
        ([NAN], 99.0, {"on_spike": "clip"}, REDO, LOSS),
        ([1.0], 2.0, {"skip_grad_norm": 2.0}, STEP, None),
        ([1.0], 2.1, {"skip_grad_norm": 2.0}, SKIP, SPIKE),
        ([1.0], NAN, {"skip_grad_norm": 2.0}, REDO, GRAD),
        ([1.0], 99.0, {}, STEP, SPIKE),
        ([1.0], 99.0, {"on_spike": "clip"}, CLIP, SPIKE),
        ([1.0], 99.0, {"on_spike": "skip"}, SKIP, SPIKE),
        ([1.0], 99.0, {"on_spike": "skip", "mode": "observe"}, STEP, SPIKE),
        ([1.0], 99.0, {"on_spike": "clip", "skip_grad_norm": 50.0}, SKIP, SPIKE),
        ([1.0], 4.0, {"on_spike": "skip"}, STEP, None),
    ],
)  # fmt: skip
def test_the_decision_table(losses, norm, settings, action, signal):
    assert decide(losses, norm, Policy(**settings), seen()) == Decision(action, signal)


def test_healthy_is_step_without_a_signal():
    assert Decision(StepAction.STEP, None) == HEALTHY


@pytest.mark.parametrize(
    ("norm", "settings", "action", "signal"),
    [
        (1.0, {}, STEP, LOSS),
        (1.0, {"on_nonfinite": "halt"}, STEP, LOSS),
        (1e6, {"skip_grad_norm": 2.0}, SKIP, SPIKE),
        (99.0, {"on_spike": "clip"}, CLIP, SPIKE),
        (99.0, {"on_spike": "skip"}, SKIP, SPIKE),
    ],
)
def test_a_bad_loss_that_the_norm_does_not_show_is_observed_among_ranks(norm, settings, action, signal):
    assert decide([NAN], norm, Policy(**settings), seen(), alone=False) == Decision(action, signal)


def test_nothing_but_step_depends_on_this_rank_s_losses():
    """Ranks see different losses and the same norm: they must take the same action."""
    for norm in (0.0, 1.0, 99.0, NAN, INF):
        for settings in ({}, {"on_nonfinite": "skip"}, {"on_spike": "skip"}, {"skip_grad_norm": 0.5}):
            seen_here = ([1.0], [NAN], [INF, 1.0])
            actions = {decide(losses, norm, Policy(**settings), seen(), alone=False).action for losses in seen_here}
            assert len(actions) == 1, (norm, settings, actions)


def test_the_ladder_counts_only_bad_steps_in_a_row():
    escalation = Escalation(3)
    assert [escalation.count_bad(0), escalation.count_bad(1)] == [False, False]
    escalation.reset()
    assert [escalation.count_bad(step) for step in (3, 4, 5)] == [False, False, True]
    assert escalation.first_bad_step == 0


def test_a_period_of_bad_steps_ends_after_as_many_good_ones():
    escalation = Escalation(3)
    escalation.count_bad(7)
    for _ in range(2):
        escalation.reset()
    escalation.count_bad(10)
    assert escalation.first_bad_step == 7
    for _ in range(3):
        escalation.reset()
    assert escalation.first_bad_step is None
    escalation.count_bad(14)
    escalation.begin_run()
    assert (escalation.first_bad_step, escalation.bad_in_a_row) == (None, 0)


def test_a_ladder_of_one_halts_at_once():
    assert Escalation(1).count_bad(0)
