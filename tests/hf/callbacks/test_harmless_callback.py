"""L9 for callbacks: whatever fails in one of them, the stock run ends as it does without it."""

import pickle
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hf_nanguard import GradientMonitorCallback
from hf_nanguard.hf.callbacks.reduced_guard import ReducedGuard
from hf_nanguard.testing import Fault, plant
from tests.laws.entry_points import Entry, failing, watched_entries
from tests.reference import assert_same, losses_of, tensors_of
from tests.trainers import build, events_of

from .test_matrix import CALLBACKS

EVERY = {**CALLBACKS, "ReducedGuard": ReducedGuard}
SETTINGS = {"max_steps": 2, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1}
TAP = "hf/callbacks/gradient_tap.py"


def _train(folder: Path, *callbacks):
    trainer = build("plain", folder, guard=False, extra={"callbacks": list(callbacks)}, **SETTINGS)
    trainer.train(resume_from_checkpoint=None)
    return trainer


@cache
def _stock():
    with TemporaryDirectory() as folder:
        trainer = _train(Path(folder))
        return tensors_of(trainer), losses_of(trainer)


def _entries(name: str, folder: Path) -> list[Entry]:
    with watched_entries() as found:
        _train(folder, EVERY[name]())
    return sorted(entry for entry in found if entry.file.startswith("hf/callbacks/") and entry.name[-2:] != "__")


@pytest.mark.parametrize("name", EVERY)
def test_every_method_may_fail(name, tmp_path):
    entries = _entries(name, tmp_path / "healthy")
    assert any(entry.name.endswith(".on_train_begin") for entry in entries)
    for number, entry in enumerate(entries):
        with failing([entry], Exception) as raised:
            trainer = _train(tmp_path / str(number), EVERY[name]())
        assert raised, entry
        assert_same(tensors_of(trainer), _stock()[0])
        assert losses_of(trainer) == _stock()[1]
        failures = [event for event in events_of(trainer) if " failed at " in event["message"]]
        assert failures, entry
        assert failures[0]["culprit"]["source"].startswith("hf/callbacks/")


def test_the_hooks_of_the_tap_are_among_them(tmp_path):
    hooks = {entry.name for entry in _entries("GradientMonitorCallback", tmp_path) if entry.file == TAP}
    assert hooks == {f"GradientTap.{name}" for name in ("_on_forward", "_on_backward", "_after_backward")}


def test_an_error_of_a_users_subclass_is_the_users(tmp_path):
    class Own(GradientMonitorCallback):
        def on_step_end(self, *args, **kwargs):
            super().on_step_end(*args, **kwargs)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        _train(tmp_path, Own())


def test_a_report_that_fails_does_not_keep_a_bad_step(tmp_path, monkeypatch):
    def fail(*args):
        raise BrokenPipeError

    monkeypatch.setattr("hf_nanguard.hf.callbacks.gradient_monitor.tqdm.write", fail)
    callback = GradientMonitorCallback(halt_on_nan=True)
    trainer = build("plain", tmp_path, guard=False, extra={"callbacks": [callback]}, max_steps=3)
    planted = plant(trainer, Fault("loss", step=1))
    trainer.train()
    assert planted.triggered
    assert trainer.state.global_step == 2
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    [event] = events_of(trainer)
    assert event["signal"] == "guard_failed"


@pytest.mark.parametrize("name", ["GradientMonitorCallback", "CheckpointGuardCallback", "NanGuardCallback"])
def test_a_copy_has_no_run(name, tmp_path):
    callback = EVERY[name]()
    _train(tmp_path, callback)
    assert callback._boundary is not None
    assert pickle.loads(pickle.dumps(callback))._boundary is None
