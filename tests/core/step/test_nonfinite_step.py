"""What becomes of a step whose norm is not finite: each way out, its event, its counts, and nothing left behind."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_nanguard.core.autopsy.examiner import Examiner
from hf_nanguard.core.finite import read_host
from hf_nanguard.core.journal import Journal
from hf_nanguard.core.monitors.spike_detector import SpikeDetector
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.core.rerun.micro_batch import AccumulationGroup, BatchAction, Finding, MicroBatch
from hf_nanguard.core.rerun.runner import LoopRunner
from hf_nanguard.core.rng import RngState
from hf_nanguard.core.settings import Policy
from hf_nanguard.core.step.bad_gradients import judge
from hf_nanguard.core.step.counters import Counter
from hf_nanguard.core.step.decision import Decision, Escalation, StepAction, decide
from hf_nanguard.core.step.nonfinite_step import Containment
from hf_nanguard.core.step.redo import Redo
from hf_nanguard.core.step.step_reading import StepReading
from hf_nanguard.core.vocabulary import Cause, Signal
from hf_nanguard.testing import INF, NAN, add_bad_gradient

STEP = 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(nn.functional.dropout(self.first(x), 0.5)).square().mean()


class Bench:
    """One group of micro-batches that has just run its backward, and the containment that is asked about it.

    A payload is the micro-batch's fault: `None`, `"loss"`, the name of a parameter, or a function of loss and model.
    """

    def __init__(self, payloads, policy=None, findings=None, value=NAN, why_not=None, scaler=None):
        self.model = Net()
        self.policy = policy or Policy()
        self.events = []
        self.ranks = Ranks(alone=True)
        self.counter, self.escalation = Counter(), Escalation(self.policy.max_bad_steps)
        journal = Journal(self.ranks, self.events.append)
        examiner = Examiner(replace(self.policy, autopsy=False), journal)  # it has tests of its own
        redo = Redo(journal, self.counter, examiner)
        self.containment = Containment(self.policy, journal, self.counter, self.escalation, redo)
        self.runner = LoopRunner(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1), scaler)
        if why_not is not None:
            self.runner.why_not = lambda group: why_not
        self.runs = []
        self.value = value
        self.runner.loss_fn = self.loss
        self.group = AccumulationGroup(weight=1 / max(len(payloads), 1))
        self.runner.buffers.keep()
        torch.manual_seed(42)
        self.before = torch.get_rng_state()
        for index, payload in enumerate(payloads):
            found = tuple((findings or {}).get(index, ()))
            micro = MicroBatch(index, (index, payload), RngState.capture(), found, [2 * index, 2 * index + 1])
            micro.loss = self.runner.run(micro, self.group.weight)
            self.group.micro_batches.append(micro)
        self.runs.clear()

    def loss(self, payload):
        index, fault = payload
        self.runs.append(index)
        loss = self.model(torch.full((2, 3), 1.0 + index))
        if fault is None:
            return loss
        if fault == "loss":
            return loss * self.value
        if callable(fault):
            return fault(loss, self.model)
        return add_bad_gradient(loss, dict(self.model.named_parameters())[fault], self.value)

    def contain(self, clipped=False):
        norm_dev = torch.as_tensor(NAN) if clipped else self.runner.measure()
        losses = read_host(self.group.losses)
        [norm] = read_host([norm_dev])
        decision = decide(losses, norm, self.policy, SpikeDetector())
        assert decision.signal or any(micro.must_be_dropped for micro in self.group.micro_batches), "nothing to contain"
        reading = StepReading(STEP, self.group, losses, norm, norm_dev, decision, clipped)
        return self.containment.contain(reading, self.runner)

    def told(self):
        return [(e["micro_step"], e["signal"], e["action"], e["culprit"] and e["culprit"]["rows"]) for e in self.events]

    def gradients(self):
        return {name: p.grad for name, p in self.model.named_parameters()}


def _finding(action, signal=Signal.LABELS_MASKED):
    return Finding(signal, "all labels are masked", action, Cause.ALL_LABELS_MASKED, samples=(1,))


def _assert_skipped(bench, outcome, size):
    """Nothing steps, and gradients and random state are those from before the group."""
    assert not outcome.stepped
    assert outcome.norm is None
    assert outcome.redone == []
    assert outcome.num_dropped == size
    assert set(bench.gradients().values()) == {None}
    assert torch.equal(torch.get_rng_state(), bench.before)
    assert bench.counter.skipped_steps == 1
    assert (bench.counter.seen, bench.counter.dropped) == (size, size)


# ---- redo ----


@pytest.mark.parametrize("fault", ["loss", "last.weight"])
@pytest.mark.parametrize("bad", [(0,), (1,), (2,), (0, 2)])
def test_an_event_for_every_bad_micro_batch_and_gradients_of_the_others(fault, bad):
    bench = Bench([fault if i in bad else None for i in range(3)])
    outcome = bench.contain()
    signal = "loss_nonfinite" if fault == "loss" else "grad_nonfinite"
    assert bench.told() == [(i, signal, "dropped", [2 * i, 2 * i + 1]) for i in bad]
    good = [i for i in range(3) if i not in bad]
    assert bench.runs == [0, 1, 2, *good]  # each alone, then the good ones
    expected = Bench([None] * len(good))  # the same random state, other data: made to match below
    expected.runner.clear()
    torch.set_rng_state(expected.before)
    for index in good:
        (expected.loss((index, None)) / len(good)).backward()
    found, wanted = bench.gradients(), expected.gradients()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert outcome.stepped
    assert outcome.fresh
    assert outcome.num_dropped == len(bad)
    assert len(outcome.redone) == len(good)
    assert float(outcome.norm) == pytest.approx(float(bench.runner.norm()))
    assert (bench.counter.seen, bench.counter.dropped, bench.counter.skipped_steps) == (3, len(bad), 0)
    assert bench.escalation.bad_in_a_row == 1
    assert not bench.containment.redo.replaying


def test_with_nothing_left_the_step_is_skipped_and_every_micro_batch_is_told():
    bench = Bench(["loss", "first.bias"])
    _assert_skipped(bench, bench.contain(), 2)
    assert bench.told() == [(0, "loss_nonfinite", "skipped", [0, 1]), (1, "grad_nonfinite", "skipped", [2, 3])]
    assert bench.events[1]["culprit"]["parameter"] == "first.bias"


def test_a_fault_that_does_not_come_again_is_transient_and_costs_nothing():
    strikes = iter([True])
    bench = Bench([None, lambda loss, model: loss * NAN if next(strikes, False) else loss])
    outcome = bench.contain()
    [event] = bench.events
    assert (event["cause"], event["action"], event["micro_step"]) == ("transient", "repaired", 1)
    assert "suspect hardware" in event["message"]
    assert outcome.stepped
    assert outcome.num_dropped == 0
    assert (bench.counter.dropped, bench.escalation.bad_in_a_row) == (0, 0)


def test_when_only_the_sum_is_bad_no_micro_batch_is_blamed():
    big = [lambda loss, model: loss * 0 + model.last.bias.sum() * 3e38] * 2
    bench = Bench(big)
    for parameter in bench.model.parameters():
        parameter.grad = torch.full_like(parameter, INF)
    bench.runner.regroup = lambda good, num_good: 1.0  # each is 3e38, together they overflow
    bench.group.weight = 1.0
    _assert_skipped(bench, bench.contain(), 2)
    [event] = bench.events
    assert (event["signal"], event["action"], event["micro_step"]) == ("grad_nonfinite", "skipped", None)
    assert "no single micro-batch is to blame, only their sum" in event["message"]


def test_a_finding_needs_no_probe_and_is_told_as_what_it_is():
    bench = Bench(["first.weight", None, None], findings={0: [_finding(BatchAction.DROP)]})
    outcome = bench.contain()
    assert bench.told() == [(0, "labels_masked", "dropped", [1])]
    assert bench.runs == [1, 2, 1, 2]
    assert outcome.num_dropped == 1


@pytest.mark.parametrize("policy", ["skip", "repair", "halt"])
def test_a_batch_that_must_be_dropped_is_dropped_whatever_the_policy_for_nan_is(policy):
    bench = Bench(["first.weight", None], Policy(on_nonfinite=policy), findings={0: [_finding(BatchAction.DROP)]})
    outcome = bench.contain()
    assert bench.told() == [(0, "labels_masked", "dropped", [1])]
    assert outcome.stepped
    assert outcome.halt is None


@pytest.mark.parametrize("policy", ["drop", "halt"])
def test_a_batch_that_must_be_dropped_is_no_halt_either_where_nothing_can_be_redone(policy):
    bench = Bench(
        ["first.weight", None], Policy(on_nonfinite=policy), {0: [_finding(BatchAction.DROP)]}, why_not="it is so"
    )
    outcome = bench.contain()
    _assert_skipped(bench, outcome, 2)
    assert bench.told() == [(0, "labels_masked", "skipped", [1])]
    assert outcome.halt is None


def test_a_finding_that_halts_ends_the_run_and_names_its_policy():
    bench = Bench(["first.weight", None], findings={0: [_finding(BatchAction.HALT)]})
    outcome = bench.contain()
    _assert_skipped(bench, outcome, 2)
    assert bench.told() == [(0, "labels_masked", "halted", [1])]
    assert "on_bad_input is 'halt'" in outcome.halt
    assert "all labels are masked" in outcome.halt


# ---- the whole step ----


@pytest.mark.parametrize("fault", ["loss", "last.weight"])
def test_what_cannot_be_redone_is_skipped_whole_and_says_why(fault):
    bench = Bench([None, fault, None], why_not="the moon is full")
    outcome = bench.contain()
    _assert_skipped(bench, outcome, 3)
    [event] = bench.events
    assert event["message"].endswith("; the whole group was skipped because the moon is full")
    assert event["micro_step"] == (1 if fault == "loss" else None)
    assert event["culprit"]["parameter"] == (None if fault == "loss" else fault)
    assert bench.runs == []


@pytest.mark.parametrize("why_not", [None, "the moon is full"])
def test_a_policy_that_skips_needs_no_excuse(why_not):
    bench = Bench([None, "loss"], Policy(on_nonfinite="skip"), why_not=why_not)
    _assert_skipped(bench, bench.contain(), 2)
    [event] = bench.events
    assert event["message"] == f"loss is nan at step {STEP}"
    assert bench.runs == []


@pytest.mark.parametrize("fault", ["loss", "last.weight"])
def test_halt_skips_and_says_which_policy_ended_the_run(fault):
    bench = Bench([fault], Policy(on_nonfinite="halt"))
    outcome = bench.contain()
    _assert_skipped(bench, outcome, 1)
    [event] = bench.events
    assert event["action"] == "halted"
    assert f"halted at step {STEP}" in outcome.halt
    assert "on_nonfinite is 'halt'" in outcome.halt


@pytest.mark.parametrize("policy", ["drop", "skip", "repair"])
def test_a_bad_loss_whose_gradients_are_finite_is_contained(policy):
    bench = Bench([lambda loss, model: loss + NAN], Policy(on_nonfinite=policy))
    outcome = bench.contain()
    _assert_skipped(bench, outcome, 1)
    [event] = bench.events
    assert (event["signal"], event["culprit"]["parameter"], event["culprit"]["phase"]) == (
        "loss_nonfinite",
        None,
        "loss",
    )
    assert event["values"]["num_bad_parameters"] == 0
    assert (bench.counter.num_nan, bench.counter.num_inf) == (0, 0)


# ---- repair ----


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_repair_zeroes_the_bad_entry_and_keeps_all_others(value):
    bench = Bench(["last.weight"], Policy(on_nonfinite="repair"), value=value)
    expected = {name: gradient.clone() for name, gradient in bench.gradients().items()}
    expected["last.weight"][0, 0] = 0.0
    outcome = bench.contain()
    assert outcome.stepped
    assert outcome.fresh
    assert outcome.num_dropped == 0
    assert all(torch.equal(bench.gradients()[name], expected[name]) for name in expected)
    [event] = bench.events
    assert (event["action"], event["culprit"]["parameter"]) == ("repaired", "last.weight")
    assert event["values"]["grad_norm_repaired"] == pytest.approx(float(outcome.norm))
    assert bench.escalation.bad_in_a_row == 1


def test_a_repair_that_leaves_nothing_is_a_skip():
    bench = Bench([lambda loss, model: loss * 0], Policy(on_nonfinite="repair"))
    for parameter in bench.model.parameters():
        parameter.grad = torch.full_like(parameter, NAN)
    _assert_skipped(bench, bench.contain(), 1)
    [event] = bench.events
    assert event["action"] == "skipped"
    assert "nothing was left after zeroing" in event["message"]


def test_a_loss_of_nan_is_not_repaired():
    bench = Bench([None, "loss"], Policy(on_nonfinite="repair"))
    _assert_skipped(bench, bench.contain(), 2)
    assert [(e["micro_step"], e["signal"], e["action"]) for e in bench.events] == [(1, "loss_nonfinite", "skipped")]


# ---- the weights themselves ----


def test_a_bad_parameter_is_named_and_is_a_failure():
    bench = Bench([None, None])
    bench.model.first.bias.data[2] = INF
    for micro in bench.group.micro_batches:
        micro.loss = torch.tensor(NAN)
    bench.model.first.bias.grad = torch.full((4,), NAN)
    failure = bench.contain().failure
    event = failure.event.as_dict()
    assert (event["signal"], event["cause"]) == ("param_nonfinite", "param_nonfinite")
    assert event["culprit"]["parameter"] == "first.bias"
    assert event["culprit"]["phase"] == "parameter"
    assert event["values"]["bad_parameters"] == {"first.bias": "inf"}
    assert "parameter first.bias contains inf" in failure.reason
    assert "earlier checkpoint" in failure.reason


def test_several_bad_parameters_are_counted():
    bench = Bench(["loss"])
    for parameter in (bench.model.first.weight, bench.model.last.bias):
        parameter.data.view(-1)[0] = NAN
    failure = bench.contain().failure
    assert failure.event.values["bad_parameters"] == {"first.weight": "nan", "last.bias": "nan"}
    assert "first.weight contains NaN" in failure.reason
    assert "as do 1 other parameters" in failure.reason


def test_healthy_weights_are_not_suspected():
    bench = Bench(["loss", "loss"])
    assert bench.contain().failure is None
    assert {event["signal"] for event in bench.events} == {"loss_nonfinite"}


# ---- escalation and counts ----


def test_too_many_in_a_row_are_a_failure_with_the_last_message():
    bench = Bench(["loss"], Policy(max_bad_steps=2))
    bench.escalation.bad_in_a_row = 1
    failure = bench.contain().failure
    assert [(event["signal"], event["action"]) for event in bench.events] == [("loss_nonfinite", "skipped")]
    assert (failure.event.signal, failure.event.values) == ("loss_nonfinite", {"bad_steps_in_a_row": 2})
    assert "2 bad steps in a row; last: loss is nan" in failure.reason
    assert "max_bad_steps" in failure.reason


def test_bad_gradients_are_counted_by_kind_and_shown_with_the_total(caplog):
    bench = Bench(["last.weight"], Policy(on_nonfinite="skip"), value=INF)
    bench.counter.num_nan, bench.counter.num_inf = 4, 2
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        bench.contain()
    assert (bench.counter.num_nan, bench.counter.num_inf) == (4, 3)
    block = next(record.getMessage() for record in caplog.records if "bad gradients" in record.getMessage())
    assert "NaN in 0 parameters (4 so far), inf in 1 (3 so far)" in block
    assert "bad:  last.weight (inf)" in block


def test_gradients_that_were_clipped_before_blame_no_parameter_but_the_probe_does(caplog):
    bench = Bench([None, "last.weight"])
    for parameter in bench.model.parameters():
        parameter.grad.fill_(NAN)  # what the host's clip leaves of one NaN
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        bench.contain(clipped=True)
    [event] = bench.events
    assert (event["micro_step"], event["culprit"]["parameter"]) == (1, "last.weight")
    assert not any("bad gradients" in record.getMessage() for record in caplog.records)


# ---- a loss scaler ----


def test_overflow_with_finite_losses_is_left_to_the_scaler():
    bench = Bench(["last.weight", None], value=INF, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    outcome = bench.contain()
    assert outcome.scaler_skips
    assert outcome.stepped
    assert bench.events == []
    assert (bench.counter.scaler_skips, bench.counter.skipped_steps, bench.counter.dropped) == (1, 0, 0)


def test_overflow_at_a_scale_of_one_is_told():
    bench = Bench(["last.weight"], value=INF, scaler=torch.amp.GradScaler("cpu", init_scale=1.0))
    assert bench.contain().scaler_skips
    [event] = bench.events
    assert (event["signal"], event["action"]) == ("grad_nonfinite", "observed")
    assert "the scale is not the cause" in event["message"]


def test_a_loss_of_nan_is_no_matter_of_scale():
    bench = Bench(["loss", None], scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    outcome = bench.contain()
    assert not outcome.scaler_skips
    assert bench.told() == [(0, "loss_nonfinite", "dropped", [0, 1])]


def test_the_same_bad_gradients_are_shown_once(caplog):
    """Every bad step has its event; the list of its parameters is in the log again only if it is another list."""
    containment = Bench([]).containment
    bad = [{"a": "nan"}, {"a": "nan"}, {"a": "nan", "b": "inf"}, dict.fromkeys("abc", "nan")]
    census = [judge(["a", "b", "c"], found) for found in bad]  # of the last one all are bad, as its event says
    for step, bad in enumerate(census):
        decision = Decision(StepAction.REDO, Signal.GRAD_NONFINITE)
        norm = torch.tensor(NAN)
        containment.log_gradients(StepReading(step, AccumulationGroup(None), [], NAN, norm, decision, census=bad))
    blocks = [record.message for record in caplog.records if "bad gradients" in record.message]
    assert [block.split("\n")[:2] for block in blocks] == [
        ["", f"---- bad gradients at step {step} ----"] for step in (0, 2)
    ]
