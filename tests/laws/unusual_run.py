"""An unusual set-up: how its trainer is built and run, in each way to guard it, and what must be equal to stock: a healthy
run to the stock run, and a run with one bad step to the stock run in which that step never was.

To add one, write a function with `@setup` (or `@slow_setup`) of a [`Table`] that returns a [`Run`]. It is called anew for every
trainer.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_nanguard import GuardArguments, NanGuardCallback, attach, guarded
from hf_nanguard.takeover.built_trainers import Takeover
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
        config: their class.
        change: called with the trainer once it is built.
        train: called with the trainer to train it.
    """

    model: nn.Module | None = field(default_factory=tiny_llama)
    rows: Any = field(default_factory=lambda: token_rows(24))
    trainer_class: type[Trainer] = Trainer
    extra: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    config: type[TrainingArguments] = TrainingArguments
    change: Callable[[Any], object] = id
    train: Callable[[Any], object] = lambda trainer: trainer.train()

    def build(self, folder: Any, wrap: Callable[[type], Callable[..., Any]] = lambda cls: cls, **given: Any) -> Any:
        """Builds the trainer from its class, or from what `wrap` makes of it."""
        arguments = {"gradient_accumulation_steps": 2, "max_steps": 3, "remove_unused_columns": False}
        args = self.config(**common_arguments(folder, **{**arguments, **self.arguments}))
        trainer = wrap(self.trainer_class)(self.model, args=args, train_dataset=self.rows, **{**self.extra, **given})
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
NOT_COMPARED = re.compile(r"nanguard/|.*(_runtime|_per_second|step_time|_mem_.*)$")  # ours; time and memory


class Table:
    """The set-ups of a module."""

    def __init__(self) -> None:
        self.cases: list[Any] = []

    def setup(self, make: Callable[[], Run]) -> Callable[[], Run]:
        """Adds a set-up."""
        self.cases.append(pytest.param(make, id=make.__name__))
        return make

    def add(self, name: str, make: Callable[[], Run], quick: bool = False) -> None:
        """Adds a set-up by name."""
        self.cases.append(pytest.param(make, id=name, marks=[] if quick else [pytest.mark.slow]))

    def slow_setup(self, make: Callable[[], Run]) -> Callable[[], Run]:
        """Adds a set-up that is run by `make slow`."""
        self.cases.append(pytest.param(make, id=make.__name__, marks=pytest.mark.slow))
        return make

    def cases_of(self, *quick: str) -> list[Any]:
        """Returns the set-ups of which only the named ones are not slow."""
        assert {case.id for case in self.cases} >= {*quick}
        slow = pytest.mark.slow
        return [pytest.param(*c.values, id=c.id, marks=[] if c.id in quick else slow) for c in self.cases]


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


# ---- one bad step ----

BAD_STEP = 1


@contextmanager
def bad_step(trainer: Any) -> Iterator[list[int]]:
    """Makes what the model returns in training NaN in one step; yields that step, once for each time."""
    seen: list[int] = []

    def spoil(module: nn.Module, inputs: Any, output: Any) -> Any:
        is_bad = module.training and torch.is_grad_enabled() and trainer.state.global_step == BAD_STEP
        if module is not trainer.model or not is_bad:
            return None
        seen.append(trainer.state.global_step)
        return spoiled(output)

    hook = nn.modules.module.register_module_forward_hook(spoil)  # also of a model that `train()` makes
    try:
        yield seen
    finally:
        hook.remove()


def spoiled(output: Any) -> Any:
    """Returns the output of a model with NaN in all its numbers."""
    if isinstance(output, torch.Tensor):
        return output * float("nan") if output.is_floating_point() else output
    if isinstance(output, Mapping):
        return type(output)(**{name: spoiled(value) for name, value in output.items()})
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(spoiled, output))
    return type(output)(map(spoiled, output)) if isinstance(output, (tuple, list)) else output


def leave_out_step(trainer: Any) -> None:
    """Makes a stock trainer pass over one step: neither model nor optimizer nor schedule runs. Its batches are fetched, and the
    first is prepared, because what preparing a batch draws stays drawn. Gradients are zero, for code that clips or reads them."""
    own_step = trainer.training_step
    held: list[Any] = []  # an optimizer and its `step`, which its schedule has wrapped

    def no_step(closure: Any = None) -> None:
        """Takes the place of the optimizer's `step`."""

    def training_step(model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        optimizer, leaves_out = trainer.optimizer, trainer.state.global_step == BAD_STEP
        optimizer._is_overflow = leaves_out  # holds the schedule
        if leaves_out and not held:
            trainer._prepare_inputs(inputs)
            for parameter in trainer.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            held.append((optimizer, optimizer.step))
            no_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
            optimizer.step = no_step
        elif held and not leaves_out:
            skipped, step = held.pop()  # a callback may have put another in its place
            skipped.step = step
        return torch.zeros(()) if leaves_out else own_step(model, inputs, *args, **kwargs)

    trainer.training_step = training_step


def losses_of(log: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    """Returns the rows of training losses without norms, by the number of the run and the step."""
    found: dict[tuple[int, int], str] = {}
    run, before = 0, 0
    for row in (row for row in log if "loss" in row):
        run, before = run + (row["step"] <= before), row["step"]
        found[run, before] = str({name: value for name, value in row.items() if name != "grad_norm"})
    return found


def without_bad_step(rows: dict[tuple[int, int], str], expected: dict[tuple[int, int], str]) -> dict:
    """Leaves out the rows in which the stock run shows the loss of the bad step as 0: the first of each run from then on."""
    of_bad_step = {run: step for run, step in reversed(expected) if step > BAD_STEP}
    return {place: row for place, row in rows.items() if of_bad_step.get(place[0]) != place[1]}


def check_no_trace(make: Callable[[], Run], folder: Path) -> None:
    """Checks that a set-up with one bad step, guarded in each way, ends as the stock run in which that step never was."""
    run = seeded(make)
    reference = run.build(folder / "stock")
    leave_out_step(reference)
    tensors, log = train(reference, run)
    expected = losses_of(log)
    for index, (guard_by, _) in enumerate(WAYS):
        run = seeded(make)
        trainer = guard_by(run, folder / str(index), GuardArguments(nanguard_autopsy=False))
        with bad_step(trainer) as seen:
            ours = train(trainer, run)
        assert seen
        assert_same(ours[0], tensors)
        assert without_bad_step(losses_of(ours[1]), expected) == without_bad_step(expected, expected)
        assert {event["action"] for event in events_of(trainer) if event["step"] == BAD_STEP} >= {"skipped"}
