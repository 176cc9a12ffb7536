"""A host's method that was replaced by one that calls the trainer's own is passed through once, guarded."""

import pytest

from hf_nanguard import attach
from hf_nanguard.testing import Fault, plant

from ...reference import assert_same, tensors_of
from ...trainers import build, events_of, stock_class

METHODS = ("training_step", "compute_loss", "_prepare_inputs", "log", "get_batch_samples")


def watch(trainer, trainer_class, name, monkeypatch):
    """Replaces a method of the class by one that counts its calls and goes on to the trainer's, as a mock would."""
    calls, own = [], getattr(trainer, name)
    monkeypatch.setattr(
        trainer_class, name, staticmethod(lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs))
    )
    return calls


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("sft", name) for name in METHODS), ("grpo", "training_step"), ("grpo", "_generate_and_score_completions")],
)
def test_a_watched_method_is_called_as_often_as_in_stock(kind, name, tmp_path, monkeypatch):
    stock = build(kind, tmp_path / "stock", guard=False)
    with monkeypatch.context() as patch:
        expected = watch(stock, stock_class(kind), name, patch)
        stock.train()
    trainer = attach(build(kind, tmp_path / "guarded", guard=False))
    calls = watch(trainer, stock_class(kind), name, monkeypatch)
    trainer.train()
    assert len(calls) == len(expected) > 0
    assert_same(tensors_of(trainer), tensors_of(stock))
    assert events_of(trainer) == []


def test_a_watched_step_is_still_guarded(tmp_path, monkeypatch):
    trainer = attach(build("sft", tmp_path, guard=False))
    plant(trainer, Fault("loss", 1, 1))
    watch(trainer, stock_class("sft"), "training_step", monkeypatch)
    trainer.train()
    assert [event["action"] for event in events_of(trainer)] == ["dropped"]
