"""The monitors of a run, walked through together, step by step."""

from typing import Any

from torch import nn

from .activation import ActivationMonitor
from .agreement import Ranks
from .journal import Journal
from .monitor import Monitor
from .movement import MovementMonitor
from .policy import Policy
from .soundness import SoundnessMonitor


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


class Patrol:
    """Takes every monitor through the steps of a run.

    Args:
        monitors (`tuple[Monitor, ...]`, *optional*):
            The monitors; may be set later, when model and optimizer are known.
    """

    def __init__(self, monitors: tuple[Monitor, ...] = ()):
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
                monitor.load_state_dict(state)
        self.loaded = {}

    def begin_step(self, step: int) -> None:
        """Runs before the first forward of a step."""
        self.step, self.awaits_update = step, False
        for monitor in self.monitors:
            monitor.begin_step(step)

    def end_backward(self) -> None:
        """Runs after its last backward."""
        for monitor in self.monitors if self.step is not None else ():
            monitor.end_backward(self.step)  # type: ignore[arg-type]

    def before_update(self) -> None:
        """Runs right before the optimizer steps."""
        self.awaits_update = self.step is not None
        for monitor in self.monitors if self.awaits_update else ():
            monitor.before_update(self.step)  # type: ignore[arg-type]

    def after_update(self) -> str | None:
        """Runs after the optimizer has stepped, once a step and on every rank; returns a reason to halt."""
        if not self.awaits_update:
            return None
        assert self.step is not None
        self.awaits_update = False
        reasons = [monitor.after_update(self.step) for monitor in self.monitors]
        return next((reason for reason in reasons if reason is not None), None)

    def close(self) -> None:
        """Takes away what a step that was broken off may have left."""
        self.step, self.awaits_update = None, False
        for monitor in self.monitors:
            monitor.close()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the next log row."""
        return {name: value for monitor in self.monitors for name, value in monitor.metrics().items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns what survives a checkpoint."""
        return {type(monitor).__name__: monitor.state_dict() for monitor in self.monitors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what [`Patrol.state_dict`] returned, now or once the monitors are there."""
        self.loaded = dict(state)
        if self.monitors:
            self.begin(self.monitors)
