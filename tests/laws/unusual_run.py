"""An unusual set-up: how its trainer is built and run, in each way to guard it, and what must be equal to stock.

To add one, write a function with `@setup` (or `@slow_setup`) of a [`Table`] that returns a [`Run`]. It is called anew for every
trainer.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_nanguard import GuardArguments, NanGuardCallback, attach, guarded
from hf_nanguard.takeover.takeover import Takeover
from tests.models import tiny_llama, token_rows
from tests.reference import assert_same, tensors_of
from tests.trainers import common_arguments, events_of


@dataclass
class Run:
    """How a trainer is built and run.

    Args:
        model: the model.
        rows: its training data.
        trainer_class: the class of the trainer.
        extra: further arguments of the constructor.
        arguments: training arguments.
        change: called with the trainer once it is built.
        train: called with the trainer to train it.
    """

    model: nn.Module | None = field(default_factory=tiny_llama)
    rows: Any = field(default_factory=lambda: token_rows(24))
    trainer_class: type[Trainer] = Trainer
    extra: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], object] = id
    train: Callable[[Any], object] = lambda trainer: trainer.train()

    def build(self, folder: Any, wrap: Callable[[type], Callable[..., Any]] = lambda cls: cls, **given: Any) -> Any:
        """Builds the trainer from its class, or from what `wrap` makes of it."""
        arguments = {"gradient_accumulation_steps": 2, "max_steps": 3, "remove_unused_columns": False}
        args = TrainingArguments(**common_arguments(folder, **{**arguments, **self.arguments}))
        trainer = wrap(self.trainer_class)(self.model, args, train_dataset=self.rows, **{**self.extra, **given})
        self.change(trainer)
        return trainer


def as_class(run: Run, folder: Any, guard: GuardArguments) -> Any:
    return run.build(folder, guarded, guard=guard)


def attached(run: Run, folder: Any, guard: GuardArguments) -> Any:
    return attach(run.build(folder), guard)


def by_callback(run: Run, folder: Any, guard: GuardArguments) -> Any:
    return run.build(folder, callbacks=[NanGuardCallback(guard), *run.extra.get("callbacks", ())])


def taken_over(run: Run, folder: Any, guard: GuardArguments) -> Any:
    settings = {setting.name: getattr(guard, setting.name) for setting in fields(GuardArguments)}
    with Takeover(settings, lambda sentence: None):
        return run.build(folder)


WAYS = ((attached, "halt"), (as_class, "drop_samples"), (by_callback, "repair"), (taken_over, "drop"))
NOT_COMPARED = re.compile(r"nanguard/|.*(_runtime|_per_second|_mem_.*)$")  # ours; time and memory


class Table:
    """The set-ups of a module."""

    def __init__(self) -> None:
        self.cases: list[Any] = []

    def setup(self, make: Callable[[], Run]) -> Callable[[], Run]:
        """Adds a set-up."""
        self.cases.append(pytest.param(make, id=make.__name__))
        return make

    def slow_setup(self, make: Callable[[], Run]) -> Callable[[], Run]:
        """Adds a set-up that is run by `make slow`."""
        self.cases.append(pytest.param(make, id=make.__name__, marks=pytest.mark.slow))
        return make


def seeded(make: Callable[[], Run]) -> Run:
    """Builds a set-up from a fixed random state."""
    torch.manual_seed(0)
    return make()


def train(trainer: Any, run: Run) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Trains from a fixed random state; returns what training changes, and the log without times."""
    torch.manual_seed(5)
    random.seed(5)
    run.train(trainer)
    history = trainer.state.log_history
    tensors = {k: torch.where(v.isnan(), 7, v) for k, v in tensors_of(trainer).items()}  # NaN is not equal to itself
    return tensors, [{k: v for k, v in row.items() if not NOT_COMPARED.match(k)} for row in history]


def check_as_stock(make: Callable[[], Run], folder: Path) -> None:
    """Checks that a set-up, guarded in each way and with each policy for bad input, trains as the stock trainer does."""
    run = seeded(make)
    tensors, log = train(run.build(folder / "stock"), run)
    for index, (guard_by, policy) in enumerate(WAYS):
        run = seeded(make)
        trainer = guard_by(run, folder / str(index), GuardArguments(nanguard_on_bad_input=policy))
        ours = train(trainer, run)
        assert_same(ours[0], tensors)
        assert str(ours[1]) == str(log)  # as text, because NaN is not equal to itself
        assert trainer.nanguard.guard.counter.seen > 0
        events = events_of(trainer)
        assert {event["action"] for event in events} <= {"observed"}
        assert len({event["signal"] for event in events}) == len(events)
