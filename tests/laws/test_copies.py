"""Copies, pickles and failed runs: a copy of a guarded trainer has its own guard or none, and nothing of ours stays behind."""

import copy
import gc
import inspect
import pickle
from itertools import product

import pytest
import torch
from accelerate.state import GradientState
from transformers import Trainer, TrainerCallback

from hf_nanguard import GuardArguments, GuardedTrainer, GuardedTrainerMixin
from hf_nanguard.hf.trainer.guarded_class import OURS, Override
from hf_nanguard.testing import Fault, plant
from tests.reference import assert_same, tensors_of
from tests.trainers import build, events_of, stock_class

from .ways import WAYS, build_guarded, params

SETTINGS = GuardArguments(nanguard_max_bad_steps=7)


def _pickled(trainer):
    return pickle.loads(pickle.dumps(trainer))


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": _pickled}


@pytest.mark.parametrize(
    ("way", "make"),
    params(
        ("class", "copy"),
        ("attach", "deepcopy"),
        ("callback in the constructor", "pickle"),
        ("callback added later", "deepcopy"),
        ("nanguard run", "deepcopy"),
        cases=product(WAYS, COPIES),
    ),
)
def test_a_copy_has_its_own_guard_or_none(way, make, tmp_path):
    GradientState._reset_state()  # holds weak references of earlier runs that no trainer, stock or guarded, can be pickled with
    trainer = build_guarded(way, "plain", tmp_path, SETTINGS)
    if way == "callback added later" and make != "pickle":  # it guards from the first run on
        trainer.train()
    seen = vars(trainer)["nanguard"].guard.counter.seen if "nanguard" in vars(trainer) else 0
    other = COPIES[make](trainer)
    if way == "nanguard run":  # the takeover has ended
        assert type(other) is Trainer
        assert not set(OURS) & vars(other).keys()
        return
    plant(other, Fault("loss", step=1, micro_step=1))
    other.train()
    assert other.nanguard.trainer is other.nanguard.recorder.trainer is other
    assert other.nanguard.policy.max_bad_steps == 7
    assert [event["action"] for event in events_of(other)] == ["dropped"]
    assert other.nanguard.guard.counter.seen == 12
    assert "nanguard" not in vars(trainer) or trainer.nanguard.trainer is trainer
    assert "nanguard" not in vars(trainer) or trainer.nanguard.guard.counter.seen == seen


@pytest.mark.parametrize(
    ("way", "kind"), params(("attach", "plain"), cases=product(list(WAYS)[:-1], ("plain", "grpo")))
)
def test_a_copy_of_a_trained_trainer_trains_as_that_of_a_stock_one(way, kind, tmp_path):
    ends = []
    for name in ("stock", way):
        folder = tmp_path / name
        trainer = build(kind, folder, guard=False) if name == "stock" else build_guarded(way, kind, folder)
        trainer.train()
        other = copy.deepcopy(trainer)
        other.train()
        ends.append(tensors_of(other))
        assert events_of(other) == []
    assert_same(*ends)


@pytest.mark.parametrize("way", params("callback added later"))
def test_nothing_is_held_after_a_run_or_an_error(way, tmp_path):
    class Failing(stock_class("plain")):
        fails = False

        def compute_loss(self, *args, **kwargs):
            if self.fails and self.state.global_step == 2:
                raise ZeroDivisionError
            return super().compute_loss(*args, **kwargs)

    trainer = build_guarded(way, "plain", tmp_path, trainer_class=Failing)
    before = set(vars(trainer))
    trainer.train()
    assert _num_batches() == 0
    Failing.fails = True
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert _num_batches() == 0
    assert set(vars(trainer)) - before - set(OURS) <= set(vars(_trained_stock(tmp_path)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trainer.model.modules())
    assert trainer.args.logging_nan_inf_filter


def _num_batches():
    """Returns how many tensors of the shape of a batch, two samples of sixteen tokens, are alive."""
    gc.collect()
    return sum(
        type(thing) is torch.Tensor and thing.dtype is torch.int64 and thing.shape == (2, 16)
        for thing in gc.get_objects()
    )


def _trained_stock(tmp_path):
    stock = build("plain", tmp_path / "stock", guard=False)
    stock.train()
    return stock


# ---- what a script sees of the guard ----


@pytest.mark.parametrize(
    ("way", "kind"),
    params(
        ("class", "plain"),
        ("attach", "grpo"),
        ("callback added later", "plain"),
        cases=product(WAYS, ("plain", "sft", "grpo")),
    ),
)
def test_every_method_has_the_signature_of_the_host(way, kind, tmp_path):
    trainer = build_guarded(way, kind, tmp_path, max_steps=1)
    trainer.train()
    names = {name for cls in type(trainer).__mro__ for name, value in vars(cls).items() if isinstance(value, Override)}
    assert {"train", "training_step", "_save_checkpoint", "_run_epoch"} <= names
    host = stock_class(kind)
    for name in names - {"__init__"}:
        assert inspect.signature(getattr(trainer, name)) == inspect.signature(getattr(host, name).__get__(trainer)), (
            name
        )
        assert getattr(trainer, name).__doc__ == getattr(host, name).__doc__


def test_the_constructor_has_the_signature_of_the_host_and_the_settings():
    theirs, ours = (list(inspect.signature(cls.__init__).parameters) for cls in (Trainer, GuardedTrainer))
    assert ours == [*theirs, "guard"]
    assert list(inspect.signature(GuardedTrainer).parameters) == ours[1:]


def test_every_override_shows_the_signature_of_the_host():
    """No method of the mixin hides a method of the Trainer under another signature."""
    ours = {name for name, value in vars(GuardedTrainerMixin).items() if inspect.isfunction(value)}
    assert not {name for name in ours if hasattr(Trainer, name)} - {"__reduce_ex__"}


@pytest.mark.parametrize("way", params("callback in the constructor", "callback added later"))
def test_a_trainer_says_it_is_of_the_class_it_was_built_as(way, tmp_path):
    class Mine(Trainer):
        def compute_loss(self, *args, **kwargs):
            seen.append((self.__class__, isinstance(self, Mine), self.args.logging_nan_inf_filter))
            return super().compute_loss(*args, **kwargs)

    class Reading(TrainerCallback):
        def _read(self, args, *rest, **kwargs):
            seen.append((None, True, args.logging_nan_inf_filter))

        on_step_begin = on_substep_end = on_pre_optimizer_step = on_step_end = on_log = _read

    seen = []
    trainer = build_guarded(way, "plain", tmp_path, trainer_class=Mine, extra={"callbacks": [Reading()]})
    trainer.train()
    assert {named for _, named, _ in seen} == {True}
    assert {told for _, _, told in seen} == {True}
    if way != "class":  # whose instances are of the guarded class, as the script has asked for
        assert {cls for cls, _, _ in seen if cls is not None} == {Mine}
        assert type(trainer).__qualname__ == Mine.__qualname__
