"""What a trainer that makes its own training data hands to its [`TrainerGuard`], which knows nothing else about it."""

from typing import Protocol

from ...core.rerun.micro_batch import AccumulationGroup
from ..data.learning_signal import StepSignal


class OnlineData(Protocol):
    """The data of an online trainer (GRPO, RLOO): sampled and scored while the run goes on.

    Handed over once by [`TrainerGuard.use_online`].
    """

    def add_readings(self, group: AccumulationGroup) -> None:
        """Adds scalars to what is read at the end of the step, right before it is settled."""

    def step_signal(self, grad_norm: float | None) -> StepSignal | None:
        """Returns what the step that was just settled could learn from, `None` if that is not known.

        Args:
            grad_norm (`float`, *optional*):
                The gradient norm of the step before clipping.
        """

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of a log row, counted since the last call."""
