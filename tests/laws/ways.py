"""The five ways to guard a trainer, as one table: every law holds for each of them."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_nanguard import GuardArguments, NanGuardCallback, attach
from hf_nanguard.takeover.built_trainers import Takeover
from hf_nanguard.testing import OperationCounter
from tests.trainers import build

Make = Callable[..., Any]
"""Builds a trainer of a guarded class or of the stock one, given whether it is the guarded one and further arguments."""


def _as_class(make: Make, guard: GuardArguments | None) -> Any:
    return make(True, guard=guard)


def _attached(make: Make, guard: GuardArguments | None) -> Any:
    return attach(make(False), guard)


def _in_the_list(make: Make, guard: GuardArguments | None) -> Any:
    return make(False, callbacks=[NanGuardCallback(guard)])


def _added_later(make: Make, guard: GuardArguments | None) -> Any:
    trainer = make(False)
    trainer.add_callback(NanGuardCallback(guard))
    return trainer


def _taken_over(make: Make, guard: GuardArguments | None) -> Any:
    given = {} if guard is None else {field.name: getattr(guard, field.name) for field in fields(GuardArguments)}
    with Takeover(given, logging.getLogger("hf_nanguard").debug):
        return make(False)


WAYS: dict[str, Callable[[Make, GuardArguments | None], Any]] = {
    "class": _as_class,
    "attach": _attached,
    "callback in the constructor": _in_the_list,
    "callback added later": _added_later,
    "nanguard run": _taken_over,
}


def params(*quick: Any, cases: Iterable[Any] = WAYS) -> list[Any]:
    """Returns cases for `pytest.mark.parametrize`; those that are not `quick` are for `make slow`."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in quick else [pytest.mark.slow])
        for case in cases
    ]


def _make(
    kind: str, folder: Path, settings: dict[str, Any], extra: dict[str, Any], guarded: bool,
    callbacks: tuple[Any, ...] = (), **more: Any,
) -> Any:  # fmt: skip
    extra = {**extra, "callbacks": [*callbacks, *extra.get("callbacks", ())], **more}
    return build(kind, folder, guard=guarded, extra=extra, **settings)


def build_guarded(
    way: str,
    kind: str,
    folder: Path,
    guard: GuardArguments | None = None,
    extra: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Builds a guarded trainer in one of the five ways."""
    return WAYS[way](partial(_make, kind, folder, settings, extra or {}), guard)


class CountSteps(TrainerCallback):
    """Counts from the end of step 2 to the end of step 4: two whole steps, after the guard has learned which buffers
    training writes."""

    def __init__(self):
        self.context = OperationCounter()
        self.count = None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.count = self.context.__enter__()
        if state.global_step == 4:
            self.context.__exit__(None, None, None)
