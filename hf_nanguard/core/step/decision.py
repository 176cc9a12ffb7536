"""The decision on one optimizer step, and the count of bad steps in a row after which the run halts."""

import math
from dataclasses import dataclass

from ..monitors.spike_detector import SpikeDetector
from ..settings import Policy
from ..vocabulary import Signal, StrEnum


class StepAction(StrEnum):
    """How the step continues."""

    STEP = "step"
    REDO = "redo"
    REPAIR = "repair"
    CLIP = "clip"
    SKIP = "skip"
    HALT = "halt"


@dataclass(frozen=True)
class Decision:
    """How the step continues and, unless it is healthy, which signal says why."""

    action: StepAction
    signal: Signal | None = None


HEALTHY = Decision(StepAction.STEP)


def decide(losses: list[float], norm: float, policy: Policy, norms: SpikeDetector, alone: bool = True) -> Decision:
    """Decides an optimizer step from what was read of it: finite first, then thresholds, then statistics.

    The norm, measured before clipping, is the same on every rank. Unless this rank is `alone`, everything but `STEP` depends
    on the norm only, so all ranks make the same decision: a non-finite loss is marked in the gradients before they are
    reduced, and one that could not be marked is only observed. `norms` holds the norms of healthy steps so far.
    """
    has_bad_loss = not all(map(math.isfinite, losses))
    if not math.isfinite(norm) or (alone and has_bad_loss):
        signal = Signal.LOSS_NONFINITE if has_bad_loss else Signal.GRAD_NONFINITE
        actions = {"skip": StepAction.SKIP, "repair": StepAction.REPAIR, "halt": StepAction.HALT}
        action = actions.get(policy.on_nonfinite, StepAction.REDO)
        return Decision(action if policy.acts else StepAction.STEP, signal)
    if policy.skip_grad_norm is not None and norm > policy.skip_grad_norm:
        return Decision(StepAction.SKIP, Signal.GRAD_SPIKE)
    spike = norms.is_spike(norm)
    actions = {"clip": StepAction.CLIP, "skip": StepAction.SKIP, "rewind": StepAction.SKIP}
    action = actions.get(policy.on_spike, StepAction.STEP)
    if spike and norms.can_act and policy.acts and action is not StepAction.STEP:
        return Decision(action, Signal.GRAD_SPIKE)
    if has_bad_loss:
        return Decision(StepAction.STEP, Signal.LOSS_NONFINITE)
    return Decision(StepAction.STEP, Signal.GRAD_SPIKE) if spike else HEALTHY


class Escalation:
    """Counts bad steps in a row; after too many of them the run has to halt.

    Bad steps with fewer than `max_bad_steps` good ones between them are one period, which has a first bad step.
    """

    def __init__(self, max_bad_steps: int):
        self.max_bad_steps = max_bad_steps
        self.begin_run()

    def begin_run(self) -> None:
        """Gives a run its full budget, also if it resumes another."""
        self.bad_in_a_row = 0
        self.num_good = 0  # since the last bad step
        self.first_bad_step: int | None = None

    def reset(self) -> None:
        """Sets the count back to zero after a good step."""
        self.bad_in_a_row = 0
        self.num_good += 1
        if self.num_good >= self.max_bad_steps:
            self.first_bad_step = None

    @property
    def is_half_way(self) -> bool:
        """Whether half of the bad steps in a row that are allowed have occurred."""
        return self.bad_in_a_row >= max(1, self.max_bad_steps // 2)

    def count_bad(self, step: int) -> bool:
        """Counts a bad step; returns whether the run has to halt."""
        self.bad_in_a_row += 1
        self.num_good = 0
        self.first_bad_step = step if self.first_bad_step is None else self.first_bad_step
        return self.bad_in_a_row >= self.max_bad_steps
