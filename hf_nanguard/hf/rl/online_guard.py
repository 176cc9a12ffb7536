"""The guard of an online trainer's data, as its [`TrainerGuard`] sees it: completions, rewards and log-ratios."""

from transformers import Trainer

from ...core.event import Culprit, Event
from ...core.rerun.micro_batch import AccumulationGroup
from ...core.step.guard import Guard
from ...core.vocabulary import Action, Cause, Signal
from ..data.learning_signal import StepSignal
from .ratio_bound import Overflow, RatioBound
from .rollout import Rollout

TERMS = {
    "ratio": ("The log-ratio of new to old policy", Cause.RATIO_OVERFLOW),
    "kl": ("The log-ratio of reference to policy in the KL term", Cause.KL_OVERFLOW),
}
"""What each bounded term is called in an event, and the cause."""


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
        self.journal = guard.journal
        policy, bound = guard.policy, guard.policy.ratio_bound
        self.rollout = Rollout(trainer, guard)
        self.ratio = RatioBound(bound, self._emit_overflow) if policy.acts and bound is not None else None

    def add_readings(self, group: AccumulationGroup) -> None:
        """Has the counts of bounded log-ratios read with the step."""
        if self.ratio is not None:
            self.ratio.add_readings(group)

    def step_signal(self, grad_norm: float | None) -> StepSignal | None:
        """Classifies the settled step by its rewards and its gradient norm."""
        return self.rollout.step_signal(grad_norm)

    def take_metrics(self) -> dict[str, float]:
        """Returns how many log-ratios and KL terms were bounded since the last call, if any."""
        counts = {} if self.ratio is None else self.ratio.take_counts()
        return {f"nanguard/bounded_{name}": float(number) for name, number in counts.items() if number}

    def _emit_overflow(self, first: Overflow) -> None:
        """Writes the event of the first log-ratio that was bounded; later ones are only counted in the metrics."""
        step, rank = self.trainer.state.global_step, self.journal.ranks.rank
        what, cause = TERMS[first.term]
        token = "" if first.token is None else f"token {first.token} of "
        row = "" if first.row is None else f" (dataset row {first.row})"
        message = (
            f"{what} was {first.log_ratio:.4g} at {token}completion {first.sample}{row} in micro-batch {first.micro_step} "
            f"of step {step}; it was bounded to +/-{first.bound:g} before exp. Later ones are counted in "
            f"nanguard/bounded_{first.term}."
        )
        values = {"log_ratio": first.log_ratio, "bound": first.bound}
        culprit = Culprit(
            phase="loss",
            term=first.term,
            samples=[first.sample],
            rows=None if first.row is None else [first.row],
            tokens=None if first.token is None else [[first.sample, first.token]],
        )
        self.journal.write(
            Event(step, Signal.RATIO_OVERFLOW, Action.REPAIRED, message, first.micro_step, rank, values, culprit, cause)
        )
