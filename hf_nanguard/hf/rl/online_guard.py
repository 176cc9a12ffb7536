"""The guard of an online trainer's data, as its [`TrainerGuard`] sees it: completions, rewards and log-ratios."""

from typing import Any

from ...core.step.guard import Guard
from ..data.learning_signal import StepSignal
from .ratio_bound import RatioBound
from .rollout import Rollout


class OnlineGuard:
    """Owns the rollout and the ratio bound of an online trainer. Implements [`OnlineData`].

    Args:
        trainer (`Trainer`):
            The online trainer.
        guard (`Guard`):
            Its guard.
    """

    def __init__(self, trainer: Any, guard: Guard):
        policy, bound = guard.policy, guard.policy.ratio_bound
        self.rollout = Rollout(trainer, guard, policy)
        self.ratio = RatioBound(bound) if policy.acts and bound is not None else None

    def step_signal(self, grad_norm: float | None) -> StepSignal | None:
        """Classifies the settled step by its rewards and its gradient norm."""
        return self.rollout.step_signal(grad_norm)

    def take_metrics(self) -> dict[str, float]:
        """Returns how many log-ratios and KL terms were bounded since the last call, if any."""
        counts = {} if self.ratio is None else self.ratio.take_counts()
        return {f"nanguard/bounded_{name}": float(number) for name, number in counts.items() if number}
