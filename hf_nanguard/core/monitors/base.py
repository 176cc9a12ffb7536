"""The base class of monitors, which check a run every N steps and cost nothing in between.

    monitor.begin_step(step)       before the first forward of a step: add hooks if a check is due. Where hooks are ignored (see
                                   `monitor_set.py`), after the last backward, before an extra forward
    monitor.end_backward(step)     after the last backward, before any decision: remove the hooks
    monitor.before_update(step)    right before the optimizer steps (not called if the step is skipped)
    monitor.after_update(step)     right after; returns why the run cannot continue, the same on every rank, or `None`

`step` is `state.global_step` at the beginning of the step, the number that its events carry. If a group is run again, that
happens between `end_backward` and `before_update`, when no hook is left.

To add a monitor: subclass [`Monitor`] in its own file, add it to `monitor_set.build_monitors`, and test it.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor, nn

from ...plain_text import format_error
from ..event import Culprit, Event, Failure, JsonObject, JsonValue, Remedy
from ..journal import Journal
from ..ranks import Ranks
from ..vocabulary import Action, Cause, Signal

EARLY = (10, 20, 40)  # most failures exist from the beginning, and short runs need to report them too


class Stateful(Protocol):
    """Something whose state is saved in checkpoints."""

    def state_dict(self) -> JsonObject: ...

    def load_state_dict(self, state: JsonObject) -> None: ...


def load_whole(owner: Stateful, state: JsonObject) -> None:
    """Loads a state completely or not at all: one that does not fit is a `ValueError`, and the owner is as before."""
    before = owner.state_dict()
    try:
        owner.load_state_dict(state)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if before:
            owner.load_state_dict(before)
        raise ValueError(format_error(error)) from error


class Hook:
    """A module hook that does nothing in copies and pickles of the module. The function must not raise, because the forward
    must continue: [`Boundary.wrapped`] sees to that."""

    def __init__(self, function: Callable[..., None]):
        self.function = function

    def __call__(self, *args: object) -> None:
        self.function(*args)

    def __deepcopy__(self, memo: dict[int, object]) -> "Hook":
        return Hook(_do_nothing)

    def __reduce__(self) -> tuple[type["Hook"], tuple[Callable[..., None]]]:
        return Hook, (_do_nothing,)


def _do_nothing(*args: object) -> None:
    return


@dataclass(eq=False)
class Monitor:
    """Checks a run every N steps. Subclasses override the methods they need and add their settings as keyword arguments."""

    hooks_forward: ClassVar[bool] = False  # whether it measures what hooks see in a forward

    model: nn.Module  # without DDP wrapper
    journal: Journal  # where events are written; it also knows the ranks that train together
    every_n_steps: int  # 0 turns the monitor off
    full_metrics: bool = False  # log a metric for every module or parameter, and not only a summary
    early: tuple[int, ...] = EARLY  # additional steps, counted from 1, at which a check is due
    is_off: bool = field(default=False, init=False)
    hooks: ExitStack = field(default_factory=ExitStack, init=False)  # closed with the monitor, also if that fails
    _row: dict[str, float] = field(default_factory=dict, init=False)

    @property
    def ranks(self) -> Ranks:
        """The ranks that train together."""
        return self.journal.ranks

    # ---- overridden by subclasses ----

    @property
    def accepted(self) -> frozenset[str]:
        """The parameters and buffers that were not finite before the first update, by design."""
        return frozenset()

    def is_due(self, step: int) -> bool:
        """Returns whether this step is checked; the same on every rank."""
        done = step + 1
        return not self.is_off and self.every_n_steps > 0 and (done % self.every_n_steps == 0 or done in self.early)

    def begin_step(self, step: int) -> None:
        """Runs before the first forward of a step."""
        return

    def end_backward(self, step: int) -> None:
        """Runs after the last backward of a step."""
        return

    def before_update(self, step: int) -> None:
        """Runs right before the optimizer steps."""
        return

    def after_update(self, step: int) -> Failure | None:
        """Runs after the optimizer has stepped, on every rank; returns why the run cannot continue, the same on every rank."""
        return None

    def check_before_save(self, step: int) -> Failure | None:
        """Runs before a checkpoint is saved, on every rank; returns a reason not to, the same on every rank."""
        return None

    def check_start(self, step: int, halts: bool) -> Failure | None:
        """Runs before the first step of a run, on every rank; returns why it cannot begin. Unless a bad start `halts` the run, what
        is bad is reported once and ignored from then on."""
        return None

    @property
    def ignored(self) -> frozenset[str]:
        """The tensors that were bad before the first step and are ignored."""
        return frozenset()

    def is_sound(self) -> bool:
        """Returns whether what a checkpoint would hold is finite on this rank, as far as this monitor checks it."""
        return True

    def fail_exchange(self, stage: str, step: int) -> None:
        """Takes part in the exchange of a stage, named as its method, after an error on this rank alone, so that it fails on
        every rank. Overridden by monitors that exchange something; called for every stage until one does."""
        return

    def close(self) -> None:
        """Discards samples that an interrupted step may have left. Subclasses also remove `hooks` here; [`MonitorSet`] removes
        them whether or not this succeeds."""
        self.hooks.close()

    def state_dict(self) -> JsonObject:
        """Returns the state to save in a checkpoint, as JSON values."""
        return {}

    def load_state_dict(self, state: JsonObject) -> None:
        """Restores what [`Monitor.state_dict`] returned."""
        return

    # ---- used by subclasses ----

    def metrics(self) -> dict[str, float]:
        """Returns the metrics recorded since the last row of the log and forgets them."""
        row, self._row = self._row, {}
        return row

    def record(self, name: str, value: float, parts: Mapping[str, float] | None = None, noun: str = "") -> None:
        """Adds `nanguard/<name>` to the next row of the log and, with `full_metrics`, the value of each module or parameter
        as `nanguard/<noun>/<part>`; the noun is the name by default."""
        self._row[f"nanguard/{name}"] = value
        if self.full_metrics and parts:
            self._row |= {f"nanguard/{noun or name}/{part}": each for part, each in parts.items()}

    def emit(
        self,
        step: int,
        signal: Signal,
        message: str,
        values: Mapping[str, JsonValue] | None = None,
        culprit: Culprit | None = None,
        cause: Cause | None = None,
        remedies: tuple[Remedy, ...] = (),
    ) -> None:
        """Writes an event about an observation that is the same on every rank, on rank 0 only."""
        event = Event(
            step, signal, Action.OBSERVED, message, values=values or {}, culprit=culprit, cause=cause, remedies=remedies
        )
        self.journal.write_once(event)

    def turn_off(self, step: int, message: str) -> None:
        """Turns the monitor off for the rest of the run and writes an event that says why."""
        self.is_off = True
        self.emit(step, Signal.GUARD_FAILED, message)

    def reduce_max(self, values: Tensor) -> None:
        """Replaces values by their maximum over ranks, in place, with one message. Every rank must call it."""
        self.ranks.reduce_max(values)
