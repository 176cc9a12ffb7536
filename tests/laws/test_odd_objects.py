"""L9: objects that a user may well have, and that refuse what the guard would like to know of them, change nothing."""

import numpy as np
import pytest
import torch

from tests.reference import assert_same, losses_of, tensors_of
from tests.trainers import build, events_of, stock_class

from .ways import build_guarded

WAYS = ("class", "attach", "callback in the constructor")


class NoText:
    """An object that cannot be shown."""

    def __repr__(self):
        raise RuntimeError("no text")


ROWS = {
    "no text": NoText,
    "array": lambda: np.arange(3.0),
    "array of NaN": lambda: np.array([np.nan, 1.0]),
    "tensor": lambda: torch.arange(3.0),
    "scalar tensor": lambda: torch.tensor(float("nan")),
    "bytes": lambda: b"\xff\x00",
    "set": lambda: {1, 2},
    "key that is no text": lambda: {(1, 2): object()},
}
SETTINGS = {"max_steps": 2, "gradient_accumulation_steps": 1}


def _train(trainer, value):
    """Trains with a value in every row while the trainer logs it."""
    log, rows = trainer.log, []

    def log_with(logs, *args, **kwargs):
        rows.append(logs)
        log({**logs, "odd": value}, *args, **kwargs)
        trainer.state.log_history[-1].pop("odd")

    trainer.log = log_with
    trainer.train()
    assert rows
    return trainer


def _without_printing(trainer):
    """The stock callback that prints rows cannot show every object either."""
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ in ("PrinterCallback", "ProgressCallback"):
            trainer.remove_callback(callback)
    return trainer


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("way", WAYS)
def test_odd_objects_in_a_row_of_the_log(way, name, tmp_path):
    stock = _train(_without_printing(build("plain", tmp_path / "stock", guard=False, **SETTINGS)), ROWS[name]())
    ours = _train(_without_printing(build_guarded(way, "plain", tmp_path / "ours", **SETTINGS)), ROWS[name]())
    assert_same(tensors_of(ours), tensors_of(stock))
    assert losses_of(ours) == losses_of(stock)
    assert {event["signal"] for event in events_of(ours)} <= {"guard_failed"}


def _refuse(model, known):
    """Makes a model raise another error than AttributeError for names that it does not know and that hosts do not ask for."""
    cls = type(model)

    def __getattr__(self, name):  # noqa: N807 - it becomes the method of that name
        try:
            return cls.__getattr__(self, name)
        except AttributeError:
            if name in known:
                raise
            raise RuntimeError(f"{name} is not known") from None

    model.__class__ = type(cls.__name__, (cls,), {"__getattr__": __getattr__, "__module__": cls.__module__})


def _find_asked(folder):
    """Returns the names that transformers and accelerate ask a model for and that it need not have."""
    asked = set()
    trainer = build("plain", folder, guard=False, **SETTINGS)
    cls = type(trainer.model)

    def __getattr__(self, name):  # noqa: N807 - it becomes the method of that name
        try:
            return cls.__getattr__(self, name)
        except AttributeError:
            asked.add(name)
            raise

    trainer.model.__class__ = type(cls.__name__, (cls,), {"__getattr__": __getattr__, "__module__": cls.__module__})
    trainer.train()
    return asked


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_raises_for_unknown_names(way, tmp_path):
    known = _find_asked(tmp_path / "asked")
    stock = build("plain", tmp_path / "stock", guard=False, **SETTINGS)
    _refuse(stock.model, known)
    stock.train()
    ours = build_guarded(way, "plain", tmp_path / "ours", **SETTINGS)
    _refuse(ours.model, known)
    ours.train()
    assert_same(tensors_of(ours), tensors_of(stock))
    assert losses_of(ours) == losses_of(stock)


@pytest.mark.parametrize("way", WAYS)
def test_an_error_of_the_user_without_text_passes(way, tmp_path):
    class EmptyError(Exception):
        pass

    trainer = build_guarded(way, "plain", tmp_path, **SETTINGS)
    trainer.compute_loss = lambda *args, **kwargs: (_ for _ in ()).throw(EmptyError())
    with pytest.raises(EmptyError) as raised:
        trainer.train()
    assert raised.value.args == ()
    assert isinstance(trainer, stock_class("plain"))
