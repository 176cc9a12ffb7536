"""The decision on one optimizer step, and the count of bad steps in a row after which the run halts."""

import math
from dataclasses import dataclass
from enum import StrEnum

from ..robust_window import RobustWindow
from ..settings import Policy
from ..vocabulary import Signal


class StepAction(StrEnum):
    """How the step goes on."""

    STEP = "step"
    REDO = "redo"
    REPAIR = "repair"
    CLIP = "clip"
    SKIP = "skip"
    HALT = "halt"


@dataclass(frozen=True)
class Decision:
    """How the step goes on and, unless it is healthy, which signal says why."""

    course: StepAction
    signal: Signal | None = None


HEALTHY = Decision(StepAction.STEP)


def decide(losses: list[float], norm: float, policy: Policy, norms: RobustWindow) -> Decision:
    """Decides an optimizer step from what was read of it: finite first, then thresholds, then statistics.

    The norm is the same on every rank, and everything but `STEP` depends on it alone, so all ranks decide alike. A
    non-finite loss whose gradients are finite is news of this rank only and therefore never more than observed.

    Args:
        losses (`list[float]`):
            The losses of the group's micro-batches on this rank.
        norm (`float`):
            The total norm of the gradients before clipping.
        policy (`Policy`):
            What to do.
        norms (`RobustWindow`):
            Norms of healthy steps so far.
    """
    if not math.isfinite(norm):
        signal = Signal.GRAD_NONFINITE if all(map(math.isfinite, losses)) else Signal.LOSS_NONFINITE
        courses = {"skip": StepAction.SKIP, "repair": StepAction.REPAIR, "halt": StepAction.HALT}
        course = courses.get(policy.on_nonfinite, StepAction.REDO)
        return Decision(course if policy.acts else StepAction.STEP, signal)
    if policy.skip_grad_norm is not None and norm > policy.skip_grad_norm:
        return Decision(StepAction.SKIP, Signal.GRAD_SPIKE)
    spike = norms.is_spike(norm)
    course = {"clip": StepAction.CLIP, "skip": StepAction.SKIP}.get(policy.on_spike, StepAction.STEP)
    if spike and policy.acts and course is not StepAction.STEP:
        return Decision(course, Signal.GRAD_SPIKE)
    if not all(map(math.isfinite, losses)):
        return Decision(StepAction.STEP, Signal.LOSS_NONFINITE)
    return Decision(StepAction.STEP, Signal.GRAD_SPIKE) if spike else HEALTHY


class Escalation:
    """Counts bad steps in a row and says when skipping is no longer an answer."""

    def __init__(self, max_bad_steps: int):
        self.max_bad_steps = max_bad_steps
        self.bad_in_a_row = 0

    def healthy(self) -> None:
        """A step went through: the count starts again."""
        self.bad_in_a_row = 0

    @property
    def is_half_way(self) -> bool:
        """Whether half of the bad steps in a row that are allowed have come."""
        return self.bad_in_a_row >= max(1, self.max_bad_steps // 2)

    def bad(self) -> bool:
        """Counts a bad step; returns whether the run has to halt."""
        self.bad_in_a_row += 1
        return self.bad_in_a_row >= self.max_bad_steps
