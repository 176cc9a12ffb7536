"""No step passes by the guard in silence: whichever method of a trainer is replaced, it is guarded or reported at once."""

import gc
import logging
from itertools import product
from types import MethodType

import pytest
import torch
from transformers import Trainer

from hf_nanguard import attach, guarded
from hf_nanguard.hf.trainer.held_inputs import HeldInputs
from tests.trainers import build, events_of

from .ways import build_guarded, params

METHODS = (
    "train", "_inner_training_loop", "_run_epoch", "_finalize_training", "get_train_dataloader", "get_batch_samples",
    "training_step", "_prepare_inputs", "floating_point_ops", "_clip_grad_norm", "_get_grad_norm",
    "_clip_grad_norm _get_grad_norm", "_maybe_log_save_evaluate", "log",
)  # fmt: skip
REPORTED = {
    ("training_step", "above"),
    ("_clip_grad_norm _get_grad_norm", "above"),
    ("_clip_grad_norm _get_grad_norm", "on it"),
}
QUICK = {
    ("train", "on it"),
    ("get_batch_samples", "above"),
    ("training_step", "above"),
    ("_clip_grad_norm _get_grad_norm", "on it"),
}


class Bad(Trainer):
    """Its loss is NaN in step 1."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * (torch.nan if self.state.global_step == 1 else 1.0)


def _own(names):
    """Methods that do what those of the Trainer do, without calling the guard's."""

    def make(name):
        return lambda self, *args, **kwargs: getattr(Trainer, name)(self, *args, **kwargs)

    return {name: make(name) for name in names.split()}


def _build(place, own, folder):
    if place == "above":
        return build("plain", folder, type("Mine", (guarded(Bad),), own), guard=False)
    trainer = attach(build("plain", folder, type("Mine", (Bad,), own if place == "below" else {}), guard=False))
    if place == "on it":
        vars(trainer).update((name, MethodType(method, trainer)) for name, method in own.items())
    return trainer


@pytest.mark.parametrize(("names", "place"), params(*QUICK, cases=product(METHODS, ("below", "above", "on it"))))
def test_a_replaced_method_is_guarded_or_reported(names, place, tmp_path, caplog):
    trainer, before = _build(place, _own(names), tmp_path), _num_held()
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        trainer.train()
    events = events_of(trainer)
    if (names, place) in REPORTED:
        assert [(event["signal"], event["step"]) for event in events] == [("guard_failed", 0)]
        assert f"because {', '.join(names.split())} of Mine replaces the method of the Trainer" in events[0]["message"]
        assert [record.levelname for record in caplog.records if "[guard_failed]" in record.message] == ["WARNING"]
    else:
        assert {(event["signal"], event["action"], event["step"]) for event in events} == {
            ("loss_nonfinite", "skipped", 1)
        }
        assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    assert _num_held() == before


class OwnLoop(Trainer):
    """Steps by an optimizer of its own, and calls nothing of the Trainer but its loss."""

    def _inner_training_loop(self, *args, **kwargs):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for batch in list(self.get_train_dataloader())[:4]:
            self.calls_training_step and self.training_step(self.model, batch)
            self.compute_loss(self.model, batch).backward()
            optimizer.step()
            held.append(_num_held())
            self.state.global_step += 1


held: list[int] = []


@pytest.mark.parametrize(("way", "calls"), params(("attach", True), cases=product(("class", "attach"), (False, True))))
def test_a_loop_of_its_own_is_reported_and_nothing_is_held(way, calls, tmp_path):
    held.clear()
    OwnLoop.calls_training_step = calls
    OwnLoop.current_gradient_accumulation_steps, OwnLoop._tr_loss = 1, torch.tensor(0.0)
    trainer = build_guarded(way, "plain", tmp_path, trainer_class=OwnLoop)
    before = _num_held()
    trainer.train()
    [event] = events_of(trainer)
    assert (event["signal"], event["step"]) == ("guard_failed", 0)
    assert "_inner_training_loop" in event["message"]
    assert held == [before] * 4


def test_another_optimizer_of_other_parameters_is_nobodys_business(tmp_path):
    other = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    class Two(Trainer):
        def training_step(self, *args, **kwargs):
            other(torch.ones(2)).sum().backward()
            optimizer.step()
            return super().training_step(*args, **kwargs)

    trainer = attach(build("plain", tmp_path, Two, guard=False))
    trainer.train()
    assert events_of(trainer) == []


def _num_held():
    """Counts the inputs that are held in this process; runs of other tests may have been interrupted."""
    gc.collect()
    return sum(type(thing) is HeldInputs for thing in gc.get_objects())
