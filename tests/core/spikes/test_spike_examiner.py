"""A finite spike examined sample by sample in a hand-written loop: which rows, or what else; and no trace of it."""

import json
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hf_nanguard.core.autopsy.evidence.suspect_batch import SuspectBatch
from hf_nanguard.core.rerun.micro_batch import MicroBatch
from hf_nanguard.core.rng import RngState
from hf_nanguard.core.settings import Policy
from hf_nanguard.core.spikes.measured_batch import measure_samples
from hf_nanguard.core.step.guard import Guard
from hf_nanguard.testing import OperationCounter

NUM_STEPS = 50
SIZE = 8
TRUTH = torch.randn(6, 1, generator=torch.Generator().manual_seed(99))


def make_batch(seed, size=SIZE):
    """Learnable data: a linear function with a little noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator)
    return {"x": x, "y": x @ TRUTH + 0.3 * torch.randn(size, 1, generator=generator)}


def build(layer=nn.Identity):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), layer(), nn.Dropout(0.1), nn.Linear(16, 1))


@dataclass
class Run:
    """A loop, with what a guard has written about it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    guard: Guard
    events: list
    losses: list

    @classmethod
    def begin(cls, policy=None, model=None, optimizer=None, max_grad_norm=None):
        events = []
        model = build() if model is None else model
        optimizer = (
            torch.optim.Adam(model.parameters(), lr=0.01) if optimizer is None else optimizer(model.parameters())
        )
        guard = Guard(model, optimizer, policy or Policy(), on_event=events.append, max_grad_norm=max_grad_norm)
        torch.manual_seed(1)
        return cls(model, optimizer, guard, events, [])

    def loss(self, batch):
        loss = nn.functional.mse_loss(self.model(batch["x"]), batch["y"])
        self.losses.append(loss.item())
        return loss

    def measure(self, batch, state):
        """The loss of a batch with a random state."""
        torch.set_rng_state(state)
        return self.loss(batch).item()

    def rng_states(self, batches):
        """The random state before each of the batches, if they are run one after the other."""
        first, states = torch.get_rng_state(), []
        for batch in batches:
            states.append(torch.get_rng_state())
            self.loss(batch)
        torch.set_rng_state(first)
        return states

    def steps(self, first, number, size=1):
        for step in range(first, first + number):
            self.guard.step(self.loss, [make_batch(10 * step + index) for index in range(size)])
        return self

    def spoil(self, *batches):
        self.guard.step(self.loss, list(batches))
        return self

    def found(self):
        return [event["values"]["examination"] for event in self.events if "examination" in event["values"]]


def spoiled(samples=(3,), factor=50.0, seed=7777, size=SIZE):
    """A batch in which some samples are 50 times too large."""
    batch = make_batch(seed, size)
    batch["x"][list(samples)] *= factor
    return batch


@pytest.fixture(scope="module")
def spiked():
    return Run.begin().steps(0, NUM_STEPS).spoil(spoiled()).steps(NUM_STEPS + 1, 3)


def test_the_sample_that_carries_a_spike_is_named(spiked):
    assert [event["signal"] for event in spiked.events] == ["loss_spike", "grad_spike"]
    [by_loss, by_norm] = spiked.events
    assert by_loss["culprit"]["samples"] == by_norm["culprit"]["samples"] == [3]
    assert by_loss["values"]["examination"]["verdict"] == "rows"
    assert by_loss["micro_step"] == 0
    assert "sample 3 of micro-batch 0 is to blame" in by_loss["message"]


def test_the_event_has_every_sample_and_the_batch_without_the_bad_one(spiked):
    found = spiked.found()[0]
    losses = {each["sample"]: each["loss"] for each in found["samples"]}
    assert len(losses) == found["num_samples"] == SIZE
    assert losses[3] > 100 * max(loss for sample, loss in losses.items() if sample != 3)
    assert found["without"]["loss"] < 3 * found["usual"]["loss"] < losses[3]


def make_rest(batch, samples=(3,)):
    """A batch without some samples."""
    kept = [sample for sample in range(SIZE) if sample not in samples]
    return {name: tensor[kept] for name, tensor in batch.items()}


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


@pytest.mark.parametrize("optimizer", [None, momentum])
@pytest.mark.parametrize("others", [[], [make_batch(8), make_batch(9)]])
def test_the_window_without_the_bad_rows_is_the_run_that_never_had_them(optimizer, others):
    begin, batches = NUM_STEPS - 10, [spoiled(), *others]
    given = {"optimizer": optimizer, "max_grad_norm": 0.5}
    run = Run.begin(Policy(snapshot_steps=20), **given).steps(0, NUM_STEPS).spoil(*batches)
    window = run.found()[0]["window"]
    assert (window["snapshot_step"], window["steps"]) == (begin, list(range(begin, NUM_STEPS + 1)))
    for name, arm in (("with_rows", batches), ("without_rows", [make_rest(batches[0]), *others])):
        other = Run.begin(Policy(mode="off"), **given).steps(0, begin)
        losses = [other.steps(step, 1).losses[-1] for step in range(begin, NUM_STEPS)]
        rest = [make_rest(batches[0]), *others]
        states = other.rng_states(batches)  # which is what each held micro-batch is run again with
        other.spoil(*arm)
        assert window[name] == pytest.approx([*losses, sum(other.losses[-len(arm) :]) / len(arm)], rel=1e-6)
        after = [other.measure(batch, state) for batch, state in zip(rest, states, strict=True)]
        assert window["others_after"][name] == pytest.approx(sum(after) / len(after), rel=1e-6)
    assert window["others_after"]["with_rows"] != window["others_after"]["without_rows"]


def test_a_window_that_cannot_be_repeated_says_why():
    class Closed(torch.optim.Adam):
        def __deepcopy__(self, memo):
            raise TypeError("no copies")

    run = Run.begin(Policy(snapshot_steps=20), optimizer=lambda parameters: Closed(parameters, lr=0.01))
    found = run.steps(0, NUM_STEPS).spoil(spoiled()).found()[0]
    assert (found["verdict"], found["window"]) == ("rows", {"why_not": "its optimizer cannot be copied"})
    alone = Run.begin(Policy(snapshot_steps=20))
    for step in range(80):
        alone.guard.step(alone.loss, [make_batch(step, 1)])
    found = alone.spoil(spoiled([0], size=1)).found()[-1]
    assert found["window"] == {"why_not": "a rank has no other sample in this step"}


def test_an_examination_leaves_no_trace(spiked):
    other = Run.begin(Policy(autopsy=False)).steps(0, NUM_STEPS).spoil(spoiled()).steps(NUM_STEPS + 1, 3)
    assert not other.found()
    for one, another in zip(spiked.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, another)


def test_a_step_that_is_not_out_of_line_reads_nothing_more():
    run = Run.begin().steps(0, NUM_STEPS)
    plain = Run.begin(Policy(autopsy=False)).steps(0, NUM_STEPS)
    counts = []
    for each in (run, plain):
        with OperationCounter() as counter:
            each.steps(NUM_STEPS, 3)
        counts.append((counter.reads, counter.ops))
    assert counts[0] == counts[1]
    assert not run.events


def test_a_bad_sample_too_small_for_a_spike_is_named_as_well():
    run = Run.begin().steps(0, NUM_STEPS, 4)
    bad = make_batch(7777)
    bad["y"][2] += 12.0
    watch = run.guard.loss_watch.spikes
    watch.ratio = run.guard.norms.ratio = 1e6  # no spike
    run.spoil(make_batch(1), bad, make_batch(2), make_batch(3))
    [event] = run.events
    assert (event["signal"], event["action"], event["culprit"]["samples"]) == ("loss_spike", "observed", [2])
    assert event["micro_step"] == 1


def test_a_sample_with_a_large_gradient_that_the_model_predicts_is_not_to_blame():
    """A healthy pair of DPO was blamed for its norm although its loss was below that of the others."""
    run = Run.begin().steps(0, NUM_STEPS)
    batch = make_batch(7777)
    batch["x"][3] *= 300.0
    run.model[2].p = 0.0
    batch["y"][3] = run.model(batch["x"][3:4])[0].detach() + 0.3  # an error as usual, whose gradient is large
    [found] = run.spoil(batch).found()
    assert found["verdict"] == "batch"
    assert max(each["grad_norm"] for each in found["samples"]) > 50 * found["usual"]["grad_norm"]


def test_samples_that_are_all_bad_are_a_batch_if_other_micro_batches_pass():
    run = Run.begin().steps(0, NUM_STEPS, 2).spoil(make_batch(1), spoiled(range(SIZE)))
    assert {found["verdict"] for found in run.found()} == {"batch"}
    assert all(event["culprit"] is None or not event["culprit"]["samples"] for event in run.events)


def test_weights_that_one_update_has_moved_far_are_the_learning_rate():
    run = Run.begin().steps(0, NUM_STEPS)
    for group in run.optimizer.param_groups:
        group["lr"] = 30.0
    run.steps(NUM_STEPS, 1)
    run.events.clear()
    run.steps(NUM_STEPS + 1, 1)
    found = run.found()[0]
    assert found["verdict"] == "learning_rate"
    assert found["relative_update"] > 1.0


def test_a_second_moment_that_was_lost_is_the_state():
    run = Run.begin().steps(0, NUM_STEPS)
    for state in run.optimizer.state.values():
        state["exp_avg_sq"].mul_(1e-9)
    run.steps(NUM_STEPS, 1)
    for state in run.optimizer.state.values():
        state["exp_avg_sq"].mul_(1e-9)
    run.events.clear()
    run.steps(NUM_STEPS + 1, 1)
    assert run.found()[0]["verdict"] == "state"


def test_a_batch_that_cannot_be_cut_says_so():
    bad = make_batch(7777)
    bad["y"][3] += 500.0
    run = Run.begin(model=build(lambda: nn.BatchNorm1d(16))).steps(0, NUM_STEPS).spoil(bad)
    found = run.found()[0]
    assert found["verdict"] is None
    assert "could not be run alone" in found["why"]


def test_a_batch_whose_rows_cannot_be_told_apart_blames_none():
    """A list with a mapping for each row: its first tensor says nothing about their number."""
    run = Run.begin().steps(0, 1)
    batch = spoiled()
    parts = [{name: tensor[index : index + 1] for name, tensor in batch.items()} for index in range(SIZE)]
    run.guard.runner.begin_group(lambda parts: sum(map(run.loss, parts)) / SIZE)
    micro = MicroBatch(0, parts, RngState.capture("cpu"), row_numbers=list(range(SIZE)))
    measured = measure_samples(SuspectBatch(run.guard.runner, micro, None), math.inf, rank=0)
    assert measured.samples == []
    assert "8 rows of the dataset are 1 entries" in measured.failure


def test_single_samples_are_compared_with_those_of_other_steps():
    run = Run.begin()
    for step in range(80):
        run.guard.step(run.loss, [make_batch(step, 1)])
    run.events.clear()
    run.spoil(spoiled([0], size=1))
    assert run.found()[0]["verdict"] == "rows"
    assert run.events[0]["culprit"]["samples"] == [0]


def test_no_more_spikes_are_examined_than_autopsies_are_allowed():
    run = Run.begin(Policy(max_autopsies=2)).steps(0, NUM_STEPS)
    watch = run.guard.spikes.watch
    for step in (1, 2):
        watch.conclude(step, True, False)
    assert not run.spoil(spoiled()).found()


def test_what_was_learned_survives_a_checkpoint(spiked):
    state = json.loads(json.dumps(spiked.guard.state_dict()))
    other = Run.begin()
    other.guard.load_state_dict(state)
    assert other.guard.state_dict()["spikes"] == spiked.guard.state_dict()["spikes"]


def test_a_rewind_leaves_out_the_window_and_names_the_samples_beside_it():
    run = Run.begin(Policy(on_spike="rewind", snapshot_steps=5)).steps(0, 55).spoil(spoiled())
    [event] = [event for event in run.events if event["signal"] == "grad_spike"]
    assert event["action"] == "rewound"
    assert event["values"]["examination"]["verdict"] == "rows"
    assert {each["sample"] for each in event["values"]["examination"]["samples"]} == set(range(SIZE))


def test_an_examination_that_fails_takes_nothing_from_the_step(spiked, monkeypatch):
    def fail(*args):
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(SuspectBatch, "measure", fail)
    run = Run.begin().steps(0, NUM_STEPS).spoil(spoiled()).steps(NUM_STEPS + 1, 3)
    assert [event["signal"] for event in run.events] == ["guard_failed", "loss_spike", "grad_spike"]
    for one, another in zip(run.model.parameters(), spiked.model.parameters(), strict=True):
        assert torch.equal(one, another)
