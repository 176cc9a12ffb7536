"""The monitors of a run, walked through together, step by step.

A monitor that fails must not end a run that is sound: it says so and is off from there on. Not among several ranks: others
may wait for the message it did not send, so there the error is raised.
"""

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from ..event import Event
from ..journal import Journal
from ..ranks import Ranks
from ..settings import Policy
from ..vocabulary import Action, Signal
from .activations import ActivationMonitor
from .base import Monitor
from .weight_updates import MovementMonitor
from .weights import SoundnessMonitor

logger = logging.getLogger("hf_nanguard")


def build_monitors(
    policy: Policy, model: nn.Module, optimizer: Any, journal: Journal, ranks: Ranks, compiled: bool = False
) -> tuple[Monitor, ...]:
    """Builds the monitors a policy asks for.

    Args:
        policy (`Policy`):
            The periods.
        model (`nn.Module`):
            The model without wrappers.
        optimizer (`torch.optim.Optimizer`, *optional*):
            Its optimizer; `None` if weights and moments are kept where nobody else can look.
        journal (`Journal`), ranks (`Ranks`):
            Where events go, and the processes that train together.
        compiled (`bool`, *optional*, defaults to `False`):
            Whether the model runs under `torch.compile`.
    """
    if policy.mode == "off":
        return ()
    monitors: list[Monitor] = [
        ActivationMonitor(
            model, journal, ranks, policy.activation_steps, policy.activation_modules, policy.full_metrics,
            compiled=compiled,
        )
    ]  # fmt: skip
    if optimizer is not None:
        watched = (model, optimizer, journal, ranks, policy.weight_check_steps)
        monitors += [SoundnessMonitor(*watched, policy.acts), MovementMonitor(*watched, policy.full_metrics)]
    return tuple(monitors)


class MonitorSet:
    """Takes every monitor through the steps of a run.

    Args:
        monitors (`tuple[Monitor, ...]`, *optional*):
            The monitors; may be set later, when model and optimizer are known.
        journal (`Journal`, *optional*):
            Where it goes that a monitor failed; without one the error is raised.
    """

    def __init__(self, monitors: tuple[Monitor, ...] = (), journal: Journal | None = None):
        self.journal = journal
        self.monitors = monitors
        self.step: int | None = None  # the step that is being watched
        self.awaits_update = False
        self.loaded: dict[str, Any] = {}  # the state of a checkpoint, for monitors that are not there yet

    def begin(self, monitors: tuple[Monitor, ...]) -> None:
        """Puts new monitors on patrol, with the state of the checkpoint that was loaded."""
        self.close()
        self.monitors = monitors
        for monitor in monitors:
            if (state := self.loaded.get(type(monitor).__name__)) is not None:
                try:
                    monitor.load_state_dict(state)
                except (KeyError, TypeError, ValueError, AttributeError) as error:  # of another version
                    name = type(monitor).__name__
                    logger.warning(
                        "hf_nanguard: the state of %s was not readable (%r), so it starts anew.", name, error
                    )
        self.loaded = {}

    def begin_step(self, step: int) -> None:
        """Runs before the first forward of a step."""
        self.step, self.awaits_update = step, False
        self._each(lambda monitor: monitor.begin_step(step))

    def end_backward(self) -> None:
        """Runs after its last backward."""
        if (step := self.step) is not None:
            self._each(lambda monitor: monitor.end_backward(step))

    def before_update(self) -> None:
        """Runs right before the optimizer steps."""
        self.awaits_update = self.step is not None
        if (step := self.step) is not None:
            self._each(lambda monitor: monitor.before_update(step))

    def after_update(self) -> str | None:
        """Runs after the optimizer has stepped, once a step and on every rank; returns a reason to halt."""
        step = self.step
        if not self.awaits_update or step is None:
            return None
        self.awaits_update = False
        return next(filter(None, self._each(lambda monitor: monitor.after_update(step))), None)

    def check_before_save(self, step: int) -> str | None:
        """Looks at what is about to be saved, on every rank; returns a reason not to."""
        found = self._each(lambda m: m.check_before_save(step) if isinstance(m, SoundnessMonitor) else None)
        return next(filter(None, found), None)

    def is_sound(self) -> bool:
        """Returns whether weights and optimizer state of this rank are finite, as far as there is a monitor for that."""
        return all(m.find() is None for m in self.monitors if isinstance(m, SoundnessMonitor))

    def close(self) -> None:
        """Takes away what a step that was broken off may have left."""
        self.step, self.awaits_update = None, False
        for monitor in self.monitors:
            monitor.close()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the next log row."""
        return {name: value for found in self._each(lambda m: m.metrics()) for name, value in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns what survives a checkpoint."""
        return dict(self._each(lambda monitor: (type(monitor).__name__, monitor.state_dict())))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what [`MonitorSet.state_dict`] returned, now or once the monitors are there."""
        self.loaded = dict(state)
        if self.monitors:
            self.begin(self.monitors)

    def _each(self, work: Callable[[Monitor], Any]) -> list[Any]:
        """Does something with every monitor; returns what came of it, but for those that failed."""
        found = []
        for monitor in self.monitors:
            try:
                found.append(work(monitor))
            except (
                Exception
            ) as error:  # whatever a model, a tensor or an optimizer of another kind makes a monitor raise
                if self.journal is None or self.journal.ranks.size > 1:
                    raise
                self._retire(monitor, error, self.journal)
        return found

    def _retire(self, monitor: Monitor, error: Exception, journal: Journal) -> None:
        self.monitors = tuple(other for other in self.monitors if other is not monitor)
        monitor.close()
        message = f"{type(monitor).__name__} failed and is off from here on: {type(error).__name__}: {str(error)[:300]}"
        logger.warning("hf_nanguard: %s", message, exc_info=error)
        journal.write(Event(self.step or 0, Signal.GUARD_FAILED, Action.OBSERVED, message))
