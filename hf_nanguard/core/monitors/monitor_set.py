"""The monitors of a run, called together at each stage of a step.

A compiled model ignores hooks, and hooks that are there while it is compiled become part of the graph. Such a run has an extra
forward of the step's micro-batches instead, in Python and after the last backward, at steps at which a monitor of forwards is
due: hooks exist for that forward only. It costs the forwards of a step and keeps no activations.

A monitor that fails is reported and turned off. With several ranks that happens on all of them, because the others may wait for
its share of an exchange: the rank where it failed takes part in the next one and makes it fail. If the exchange of this stage
was over when it failed, that is the one of the next check.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from torch import nn
from torch.optim import Optimizer

from ...boundary import RankError
from ..event import Failure, JsonObject
from ..journal import Journal
from ..settings import Policy
from .activations import ActivationMonitor
from .base import Monitor, load_whole
from .module_outputs import Head
from .weight_updates import UpdateMonitor
from .weights import WeightMonitor

logger = logging.getLogger("hf_nanguard")

T = TypeVar("T")


def build_monitors(
    policy: Policy,
    model: nn.Module,
    optimizer: Optimizer | None,
    journal: Journal,
    *,
    compiled: bool = False,
    head: Head | None = None,
) -> tuple[Monitor, ...]:
    """Builds the monitors that a policy asks for.

    The model must have no DDP wrapper. `optimizer` is `None` if weights and optimizer state cannot be read from here; `compiled`
    says whether nothing but compiled graphs runs, which ignore hooks; `head` is one that the loss may use without calling it.
    """
    if policy.mode == "off":
        return ()
    full, patterns, weight_steps = policy.full_metrics, policy.activation_modules, policy.weight_check_steps
    activations = ActivationMonitor(
        model, journal, policy.activation_steps, full, patterns=patterns, head=head, compiled=compiled
    )
    if optimizer is None:
        return (activations,)
    return (
        activations,
        WeightMonitor(model, journal, weight_steps, optimizer=optimizer, acts=policy.acts),
        UpdateMonitor(model, journal, weight_steps, full, optimizer=optimizer),
    )


class MonitorSet:
    """Calls all monitors of a run at each stage of a step and keeps their state in checkpoints."""

    def __init__(self, journal: Journal):
        self.journal = journal
        self.boundary = journal.boundary
        self.monitors: tuple[Monitor, ...] = ()
        self.failed: tuple[Monitor, ...] = ()  # whose failure the other ranks do not know yet
        self.step: int | None = None  # the step under way
        self.awaits_update = False
        self.run_forwards: Callable[[], None] | None = None  # if hooks are ignored: runs the forwards of the step again
        self.loaded: JsonObject = {}  # the state of a checkpoint that was loaded before the monitors were built

    def begin(self, monitors: tuple[Monitor, ...], run_forwards: Callable[[], None] | None = None) -> None:
        """Replaces the monitors and restores their state from the checkpoint that was loaded, if any. `run_forwards` is given
        if the model ignores hooks: it runs the forwards of the step under way again, with hooks, and leaves no trace."""
        self.close()
        self.monitors, self.failed, self.run_forwards = monitors, (), run_forwards
        for monitor in monitors:
            name = type(monitor).__name__
            if (state := self.loaded.get(name)) is None:
                continue
            try:
                load_whole(monitor, state)
            except ValueError as error:  # written by another version
                logger.warning("hf_nanguard: the state of %s is not readable (%s), so it starts anew.", name, error)
        self.loaded = {}

    def begin_step(self, step: int) -> None:
        """Runs before the first forward of a step."""
        self.step, self.awaits_update = step, False
        if self.run_forwards is None:
            self._each(lambda monitor: monitor.begin_step(step), "begin_step")

    def end_backward(self) -> None:
        """Runs after the last backward of a step."""
        if (step := self.step) is not None:
            if self.run_forwards is not None:
                self._each(lambda monitor: monitor.begin_step(step), "begin_step")
                if any(monitor.hooks_forward and monitor.is_due(step) for monitor in self.monitors):
                    self.run_forwards()
            self._each(lambda monitor: monitor.end_backward(step), "end_backward")

    def before_update(self) -> None:
        """Runs right before the optimizer steps."""
        self.awaits_update = self.step is not None
        if (step := self.step) is not None:
            self._each(lambda monitor: monitor.before_update(step), "before_update")

    def after_update(self) -> Failure | None:
        """Runs after the optimizer has stepped, once a step and on every rank; returns why the run cannot continue."""
        step = self.step
        if not self.awaits_update or step is None:
            return None
        self.awaits_update = False
        return next(filter(None, self._each(lambda monitor: monitor.after_update(step), "after_update")), None)

    def check_before_save(self, step: int) -> Failure | None:
        """Checks what is about to be saved, on every rank; returns a reason not to save it."""
        return next(
            filter(None, self._each(lambda monitor: monitor.check_before_save(step), "check_before_save", step)), None
        )

    def check_start(self, step: int, halts: bool) -> Failure | None:
        """Checks the state before the first step of a run, on every rank; returns why it cannot begin."""
        return next(
            filter(None, self._each(lambda monitor: monitor.check_start(step, halts), "check_start", step)), None
        )

    @property
    def has_bad_start(self) -> bool:
        """Whether something was bad before the first step and is ignored."""
        return any(monitor.ignored for monitor in self.monitors)

    def find_accepted(self) -> frozenset[str]:
        """Returns the parameters and buffers that were not finite before the first update, by design."""
        return frozenset().union(*(monitor.accepted for monitor in self.monitors))

    def is_sound(self) -> bool:
        """Returns whether weights and optimizer state of this rank are finite, as far as a monitor checks them."""
        return all(monitor.is_sound() for monitor in self.monitors)

    def close(self) -> None:
        """Removes hooks and samples that an interrupted step may have left."""
        self.step, self.awaits_update = None, False
        for monitor in self.monitors:
            self._release(monitor)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the next row of the log."""
        return {name: value for row in self._each(lambda monitor: monitor.metrics()) for name, value in row.items()}

    def state_dict(self) -> JsonObject:
        """Returns the state of all monitors by class name, as JSON values."""
        return dict(self._each(lambda monitor: (type(monitor).__name__, monitor.state_dict())))

    def load_state_dict(self, state: JsonObject) -> None:
        """Restores what [`MonitorSet.state_dict`] returned, now or as soon as the monitors are built."""
        self.loaded = dict(state)
        if self.monitors:
            self.begin(self.monitors, self.run_forwards)

    def _each(self, call: Callable[[Monitor], T], stage: str = "", step: int | None = None) -> list[T]:
        """Calls a function with every monitor; returns the results of those that did not fail."""
        results: list[T] = []
        ranks, due = self.journal.ranks, self.failed if stage else ()
        for monitor in self.monitors:
            before, succeeded = ranks.num_exchanges, len(results)
            is_known = self.boundary.call(type(monitor).__name__, self._try, monitor, call, results, max_failures=1)
            if len(results) > succeeded:
                continue
            self._remove(monitor)
            if ranks.size > 1 and not is_known:
                self.failed += (monitor,)
                due += (monitor,) if stage and ranks.num_exchanges == before else ()
        for monitor in due:
            before = ranks.num_exchanges
            with self.boundary.not_survivable():
                monitor.fail_exchange(stage, (self.step if step is None else step) or 0)
            if ranks.num_exchanges > before:
                self.failed = tuple(other for other in self.failed if other is not monitor)
        return results

    def _try(self, monitor: Monitor, call: Callable[[Monitor], T], results: list[T]) -> bool:
        """Returns whether the monitor has failed on a rank, which has told all others."""
        try:
            results.append(call(monitor))
        except RankError:
            return True
        return False

    def _remove(self, monitor: Monitor) -> None:
        self.monitors = tuple(other for other in self.monitors if other is not monitor)
        self._release(monitor)

    def _release(self, monitor: Monitor) -> None:
        """Closes a monitor. Its hooks are removed even if it fails, is off, or is interrupted."""
        with monitor.hooks:
            self.boundary.call("monitors", monitor.close)
