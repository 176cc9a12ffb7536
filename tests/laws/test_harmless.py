"""L9: an error inside the guard never ends or alters a run. Every entry from the host is made to fail in turn."""

import errno
import logging
import traceback
from collections.abc import Collection
from contextlib import nullcontext
from functools import cache
from logging.handlers import BufferingHandler
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from hf_nanguard import GuardArguments, GuardedTrainerMixin
from hf_nanguard.hf.trainer.guarded_class import Override
from tests.models import token_dataset
from tests.reference import assert_same, losses_of, tensors_of
from tests.trainers import build, events_of

from .entry_points import Entry, failing, watched_entries
from .ways import WAYS, build_guarded, params

ERRORS = {
    "Exception": lambda: Exception("planted"),
    "MemoryError": lambda: MemoryError("planted"),
    "ENOSPC": lambda: OSError(errno.ENOSPC, "planted"),
    "KeyboardInterrupt": KeyboardInterrupt,
}
SETTINGS: dict[str, Any] = {"max_steps": 2, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 2}
PLAIN_FIELDS = "hf/trainer/step_recorder.py:StepRecorder.end_run"  # an interrupt at its very beginning leaves them
# A guard that joined a train() under way learns of its end here; an interrupt before that is known at the next train().
ENDS = [
    f"hf/trainer/{name}"
    for name in ("mixin.py:GuardedTrainerMixin._finalize_training", "trainer_guard.py:TrainerGuard.finalizing")
]
MONITORS = {f"nanguard_{name}_steps": 1 for name in ("activation", "attention", "weight_check")}


def _settings(kind: str) -> dict[str, Any]:
    if kind != "plain":
        return dict(SETTINGS)
    return {**SETTINGS, "eval_strategy": "steps", "eval_steps": 2, "extra": {"eval_dataset": token_dataset(2)}}


def _run(
    kind: str, folder: Path, way: str | None, entries: Collection[Entry] = (), error: Any = None, after: int = 0
) -> Any:
    """Builds and trains; returns the trainer and the entries that failed."""
    if way is None:
        trainer = build(kind, folder, guard=False, **_settings(kind))
        trainer.train()
        return trainer, set()
    guard = GuardArguments(**MONITORS)
    with failing(entries, error, after) if entries else nullcontext(set()) as raised:
        trainer = build_guarded(way, kind, folder, guard, **_settings(kind))
        trainer.train()
    return trainer, raised


@cache
def _stock(kind: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    with TemporaryDirectory() as folder:
        trainer, _ = _run(kind, Path(folder), None)
        return tensors_of(trainer), losses_of(trainer)


def _entries(kind: str, way: str, folder: Path) -> list[Entry]:
    with watched_entries() as found:
        trainer, _ = _run(kind, folder, way)
    assert_same(tensors_of(trainer), _stock(kind)[0])
    return sorted(found)


def _find_difference(
    kind: str, folder: Path, way: str, entries: Collection[Entry], error: Any, after: int = 0
) -> tuple[str | None, set[Entry]]:
    """Returns how a run with failing entries differs from the stock run, and which of them failed."""
    handler, logger = BufferingHandler(1000), logging.getLogger("hf_nanguard")
    logged, level = handler.buffer, logger.level
    raised: set[Entry] = set()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        trainer, raised = _run(kind, folder, way, entries, error, after)
        tensors, losses = _stock(kind)
        assert_same(tensors_of(trainer), tensors)
        assert losses_of(trainer) == losses
        told = [event["message"] for event in events_of(trainer) if event["signal"] == "guard_failed"]
        told += [log.getMessage() for log in logged]
        if raised and not any(" failed at " in message or "planted" in message for message in told):
            return "nobody was told", raised
        if any(module._forward_hooks for module in trainer.model.modules()):
            return "hooks are left", raised
    except Exception as problem:
        return "".join(traceback.format_exception(problem)[-6:]), raised
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return None, raised


def _walk(kind: str, way: str, tmp_path: Path, error: Any, after: int = 0, every: int = 1) -> dict[str, str]:
    """Makes each entry fail in a run of its own."""
    found = {}
    for number, entry in enumerate(_entries(kind, way, tmp_path / "healthy")[::every]):
        difference, raised = _find_difference(kind, tmp_path / str(number), way, [entry], error, after)
        if difference is not None or not (raised or after):
            found[str(entry)] = difference or "was not called"
    return found


def _walk_in_layers(kind: str, way: str, tmp_path: Path, error: Any) -> dict[str, str]:
    """Makes all entries fail in one run, then in another those that were not reached because of it, and so on."""
    left, number = set(_entries(kind, way, tmp_path / "healthy")), 0
    while left:
        difference, raised = _find_difference(kind, tmp_path / str(number), way, left, error)
        if difference is not None or not raised:
            return {", ".join(sorted(map(str, raised or left))): difference or "were not called"}
        left, number = left - raised, number + 1
    return {}


def _format(problems: dict[str, str]) -> str:
    return "\n\n".join(f"{entry}: {what}" for entry, what in problems.items())


def test_entries_may_fail(tmp_path):
    """An eighth of them; all of them in `make slow`."""
    problems = _walk("plain", "class", tmp_path, ERRORS["Exception"], every=8)
    assert not problems, _format(problems)


OURS = [name for name in ERRORS if name != "KeyboardInterrupt"]
LAYERS = [(kind, way, error) for kind in ("plain", "sft", "grpo") for way in WAYS for error in OURS]
QUICK = [("plain", way, OURS[i % len(OURS)]) for i, way in enumerate(WAYS)] + [("grpo", "class", "Exception")]


@pytest.mark.parametrize(("kind", "way", "error"), params(*QUICK, cases=LAYERS))
def test_many_entries_may_fail_in_one_run(kind, way, error, tmp_path):
    problems = _walk_in_layers(kind, way, tmp_path, ERRORS[error])
    assert not problems, _format(problems)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("error", OURS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["plain", "sft", "grpo"])
def test_every_entry_may_fail_in_every_way(kind, way, error, after, tmp_path):
    """From the first call on, or from a later one, so that a context also fails when it is left."""
    problems = _walk(kind, way, tmp_path, ERRORS[error], after)
    assert not problems, _format(problems)


def _interrupt(kind: str, folder: Path, way: str, entry: Entry) -> str | None:
    """Returns what is wrong with a run that is interrupted in an entry."""
    raised: set[Entry] = set()
    trainer = None
    try:
        trainer = build_guarded(way, kind, folder, GuardArguments(**MONITORS), **_settings(kind))
        with failing([entry], KeyboardInterrupt) as raised:
            trainer.train()
    except KeyboardInterrupt:
        guard = (
            None if trainer is None else vars(trainer).get("nanguard")
        )  # none if it was interrupted before it had one
        if guard is not None and (guard.watches or guard.replaying):
            return "the guard thinks that the run goes on"
        if trainer is not None and any(module._forward_hooks for module in trainer.model.modules()):
            return "hooks are left"
        return None
    except Exception as problem:
        return repr(problem)
    return "the interrupt was lost" if raised else None


WALKS = [("plain", "class", False), *((kind, way, True) for kind in ("plain", "grpo") for way in WAYS)]


@pytest.mark.parametrize(("kind", "way", "is_whole"), params(WALKS[0], cases=WALKS))
def test_ctrl_c_anywhere_is_ctrl_c(kind, way, is_whole, tmp_path):
    entries = _entries(kind, way, tmp_path / "healthy")
    known = [PLAIN_FIELDS, *(ENDS if way == "callback added later" else [])]
    entries = [entry for entry in entries if str(entry) not in known][:: 1 if is_whole else 10]
    found = {str(entry): _interrupt(kind, tmp_path / str(i), way, entry) for i, entry in enumerate(entries)}
    problems = {entry: what for entry, what in found.items() if what is not None}
    assert not problems, _format(problems)


def test_the_walk_is_not_empty(tmp_path):
    """What it walks over is found by watching a run, so a mistake there could leave nothing."""
    found = {str(entry) for entry in _entries("plain", "class", tmp_path)}
    overrides = {name for name, value in vars(GuardedTrainerMixin).items() if isinstance(value, Override)}
    called = {name.rpartition(".")[2] for name in found if "GuardedTrainerMixin" in name}
    elsewhere = {"predict", "_determine_best_metric", "_load_best_model", "push_to_hub", "_push_from_checkpoint"}
    elsewhere.add("_load_optimizer_and_scheduler")  # called by a resume
    assert overrides - called <= {"__init__", *elsewhere}
    assert {"core/step/settle.py:Settlement._settle", "hf/data/checked_collator.py:BatchCheck._check"} <= found
