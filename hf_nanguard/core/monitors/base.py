"""What looks at a run every so many steps, and costs nothing in between.

    monitor.begin_step(step)       before the first forward of a step: put hooks in place, if the step is due
    monitor.end_backward(step)     forward and backward are over, nothing is decided yet: take the hooks away again
    monitor.before_update(step)    the optimizer is about to step (never called for a step that is skipped)
    monitor.after_update(step)     it has stepped; returns a reason to halt, the same on every rank, or `None`

`step` is `state.global_step` when the step began, the number that its events carry. A group that is run again is run
between `end_backward` and `before_update`, where no hook is left.
"""

from collections.abc import Callable
from typing import Any

EARLY = (10, 20, 40)  # most failures are there from the beginning, and short runs want to hear of them too


class Hook:
    """A hook of a monitor on a module. A copy of the module, or a pickle, has one in its place that does nothing."""

    def __init__(self, function: Callable[..., None]):
        self.function = function

    def __call__(self, *args: Any) -> None:
        self.function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        return Hook(_look_away)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_look_away,)


def _look_away(*args: Any) -> None:
    return


class Monitor:
    """Looks at a run every so many steps. Subclasses override what they need.

    Args:
        every_n_steps (`int`):
            The period; 0 turns the monitor off.
        early (`tuple[int, ...]`, *optional*, defaults to `(10, 20, 40)`):
            Further steps, counted from 1, at which it looks.
    """

    def __init__(self, every_n_steps: int, early: tuple[int, ...] = EARLY):
        self.every_n_steps = every_n_steps
        self.early = early

    def is_due(self, step: int) -> bool:
        """Returns whether the monitor looks at this step; the same on every rank."""
        done = step + 1
        return self.every_n_steps > 0 and (done % self.every_n_steps == 0 or done in self.early)

    def begin_step(self, step: int) -> None:
        """Runs before the first forward of a step."""
        return

    def end_backward(self, step: int) -> None:
        """Runs after its last backward."""
        return

    def before_update(self, step: int) -> None:
        """Runs right before the optimizer steps."""
        return

    def after_update(self, step: int) -> str | None:
        """Runs after the optimizer has stepped, on every rank; returns a reason to halt, the same on every rank."""
        return None

    def close(self) -> None:
        """Takes away what a step that was broken off may have left."""
        return

    def metrics(self) -> dict[str, float]:
        """Returns what was seen since the last row of the log, under `nanguard/` names; empty if nothing was."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns what survives a checkpoint, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what [`Monitor.state_dict`] returned."""
        return
