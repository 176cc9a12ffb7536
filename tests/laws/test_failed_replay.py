"""L9: a micro-batch that cannot be run again costs its step, which is known to be bad, and nothing else."""

import pytest
import torch

from hf_nanguard.core.rerun.closed_iterators import UnrepeatableError
from hf_nanguard.core.step.redo import Redo
from hf_nanguard.testing import Fault, plant
from tests.reference import assert_same, tensors_of, without
from tests.trainers import build, events_of, stock_class

STEP = 1
ALL = [(STEP, micro) for micro in range(3)]


class Once:
    """A loss that cannot be computed again: whatever replays a micro-batch gets an error."""

    def __init__(self, trainer, error):
        self.trainer, self.error, self.num_errors = trainer, error, 0

    def __call__(self, *args):
        if self.trainer.nanguard.replaying:
            self.num_errors += 1
            raise self.error


def _in_the_loss(trainer, once):
    compute = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: (once(), compute(*args, **kwargs))[1]


def _in_a_hook(trainer, once):
    trainer.model.model.layers[0].register_forward_hook(once)


def _consuming(trainer, once):
    """As a loss that reads from an iterator does, which has as many items as the run has micro-batches."""
    left, compute = iter(range(3 * trainer.args.max_steps)), trainer.compute_loss
    once.error = UnrepeatableError()

    def consume(*args, **kwargs):
        try:
            next(left)
        except UnrepeatableError:
            once.num_errors += 1
            raise
        return compute(*args, **kwargs)

    trainer.compute_loss = consume


PLACES = {
    "iterator": (_consuming, None),
    "out of memory": (_in_the_loss, torch.OutOfMemoryError("planted")),
    "memory error": (_in_the_loss, MemoryError()),
    "hook": (_in_a_hook, RuntimeError("a hook that runs once")),
    "no text": (_in_the_loss, Exception()),
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("kind", ["plain", pytest.param("sft", marks=pytest.mark.slow)])
def test_a_step_that_cannot_be_redone_is_skipped(kind, name, tmp_path):
    place, error = PLACES[name]
    trainer = build(kind, tmp_path / "guarded")
    planted = plant(trainer, Fault("loss", step=STEP, micro_step=1))
    once = Once(trainer, error)
    place(trainer, once)
    trainer.train()
    assert planted.triggered
    assert once.num_errors == 1  # nothing is tried again
    stock = build(kind, tmp_path / "stock", without(stock_class(kind), *ALL), guard=False)
    stock.train()
    assert_same(tensors_of(trainer), tensors_of(stock))
    failed, skipped = events_of(trainer)
    assert (failed["signal"], skipped["signal"]) == ("guard_failed", "loss_nonfinite")
    assert skipped["action"] == "skipped"
    assert failed["culprit"]["source"].startswith("core/rerun/" if name == "iterator" else "hf/trainer/")
    assert type(once.error).__name__ in failed["message"]
    assert failed["message"] in skipped["message"]
    assert not trainer.nanguard.guard.group.micro_batches  # nothing is held


def test_an_autopsy_that_runs_out_of_memory_costs_the_explanation_only(tmp_path, monkeypatch):
    trainer = build("plain", tmp_path / "guarded")
    planted = plant(trainer, Fault("loss", step=STEP, micro_step=1))
    compute = trainer.compute_loss

    def compute_loss(*args, **kwargs):
        if trainer.nanguard.guard.redo.examining:
            raise torch.OutOfMemoryError("planted")
        return compute(*args, **kwargs)

    trainer.compute_loss = compute_loss
    trainer.train()
    assert planted.triggered
    stock = build("plain", tmp_path / "stock", without(stock_class("plain"), (STEP, 1)), guard=False)
    stock.train()
    assert_same(tensors_of(trainer), tensors_of(stock))
    assert [(event["signal"], event["action"]) for event in events_of(trainer)] == [
        ("guard_failed", "observed"),
        ("loss_nonfinite", "dropped"),
    ]


def test_a_redo_that_keeps_failing_is_turned_off(tmp_path):
    trainer = build("plain", tmp_path, max_steps=6)
    plant(trainer, *(Fault("loss", step=step, micro_step=1) for step in range(1, 6)))
    once = Once(trainer, RuntimeError("planted"))
    _in_the_loss(trainer, once)
    trainer.train()
    assert once.num_errors == 3
    failures = [event for event in events_of(trainer) if event["signal"] == "guard_failed"]
    assert [event["values"]["turned_off"] for event in failures] == [False, False, True]
    assert trainer.nanguard.guard.counter.skipped_steps == 5


def test_ctrl_c_in_a_redo_is_ctrl_c(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Redo, "find_bad", interrupt)
    trainer = build("plain", tmp_path)
    plant(trainer, Fault("loss", step=STEP, micro_step=1))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not trainer.nanguard.replaying
    assert not trainer.nanguard.watches


def test_nothing_needs_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")
    trainer = build("plain", tmp_path)
    plant(trainer, Fault("loss", step=STEP, micro_step=1))
    trainer.train()
    [event] = events_of(trainer)
    assert (event["signal"], event["action"]) == ("loss_nonfinite", "dropped")
    assert event["bundle"] is not None
