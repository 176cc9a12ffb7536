"""A host's method that was replaced by one that calls the trainer's own is passed through once, guarded."""

import inspect

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


NAMES = {"guard": 3, "host": 4, "part": 5, "override": 6, "trainer": 7, "call": 8, "method": 9}


class Asking(stock_class("plain")):
    """Its methods take keywords with the names that the guard has for its own arguments."""

    given = ()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None, **names):
        self.given = (*self.given, names)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.compute_loss(model, inputs, **NAMES)
        return loss

    def evaluate(self, eval_dataset=None, *, guard=None, host=None, part=None, override=None, **others):
        self.asked = {"guard": guard, "host": host, "part": part, "override": override, **others}
        return super().evaluate(eval_dataset)


def test_keywords_of_the_host_may_have_the_names_of_our_arguments(tmp_path):
    trainer = build("plain", tmp_path, Asking, max_steps=1)
    trainer.train()
    assert trainer.given == ({}, NAMES) * 3
    trainer.evaluate(trainer.train_dataset, **NAMES)
    assert trainer.asked == NAMES
    for name in ("compute_loss", "training_step", "evaluate", "log", "train"):
        for ours, theirs in ((trainer, build("plain", tmp_path, Asking, guard=False)), (type(trainer), Asking)):
            assert inspect.signature(getattr(ours, name)) == inspect.signature(getattr(theirs, name))
    assert events_of(trainer) == []
