"""The guard of an online trainer's data, as its [`TrainerGuard`] sees it: completions, rewards and log-ratios."""

from transformers import Trainer

from ...core.rerun.micro_batch import AccumulationGroup
from ...core.step.guard import Guard
from ..data.learning_signal import StepSignal
from .ratio_bound import RatioBound
from .ratio_overflow import RatioOverflow
from .rollout import Rollout


class OnlineGuard:
    """Owns the rollout and the ratio bound of an online trainer. Implements [`OnlineData`].

    Args:
        trainer (`Trainer`):
            The online trainer.
        guard (`Guard`):
            Its guard.
    """

    def __init__(self, trainer: Trainer, guard: Guard):
        self.trainer = trainer
        self.rollout = Rollout(trainer, guard)
        self.overflow = RatioOverflow(guard.journal)
        bound = guard.policy.ratio_bound if guard.policy.acts else None
        self.ratio = None if bound is None else RatioBound(bound, self.overflow)

    def add_readings(self, group: AccumulationGroup) -> None:
        """Has the counts of bounded log-ratios read with the step."""
        self.overflow.add_readings(group, self.trainer.state.global_step)

    def step_signal(self, grad_norm: float | None) -> StepSignal | None:
        """Classifies the settled step by its rewards and its gradient norm."""
        return self.rollout.step_signal(grad_norm)

    def take_metrics(self) -> dict[str, float]:
        """Returns how many log-ratios and KL terms were bounded since the last call, if any."""
        counts = self.overflow.take_counts()
        return {f"nanguard/bounded_{name}": float(number) for name, number in counts.items() if number}
