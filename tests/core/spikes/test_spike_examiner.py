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

    @classmethod
    def begin(cls, policy=None, model=None, optimizer=None):
        events = []
        model = build() if model is None else model
        optimizer = (
            torch.optim.Adam(model.parameters(), lr=0.01) if optimizer is None else optimizer(model.parameters())
        )
        guard = Guard(model, optimizer, policy or Policy(), on_event=events.append)
        torch.manual_seed(1)
        return cls(model, optimizer, guard, events)

    def loss(self, batch):
        return nn.functional.mse_loss(self.model(batch["x"]), batch["y"])

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
