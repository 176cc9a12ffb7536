"""What a Trainer adds up between two rows of its log, as a part of a snapshot."""

from dataclasses import dataclass

import torch

from .trainer import metric_lists, metric_store, running_loss
from .trainer_protocol import HostTrainer


@dataclass(frozen=True)
class LoggedState:
    """Sums, and the number of steps that they count."""

    loss: torch.Tensor  # since the last row
    total: float  # in rows
    num_unlogged: int
    num_steps: int
    num_rows: int
    metrics: dict[str, list]


class LogSums:
    """The running loss, the mean loss of the run and TRL's metric lists. A rewind takes the steps that it leaves out from the
    next row and from the mean; rows that are written stay.

    Can go when the Trainer lets a subclass say what is logged.
    """

    def __init__(self, trainer: HostTrainer):
        self.trainer = trainer

    def copy(self, reused: object) -> LoggedState:
        trainer, step = self.trainer, self.trainer.state.global_step
        return LoggedState(
            loss=running_loss(trainer).clone(),
            total=trainer._total_loss_scalar,
            num_unlogged=step - trainer._globalstep_last_logged,
            num_steps=step - trainer._initial_global_step,
            num_rows=self._count_rows(),
            metrics={name: list(values) for name, values in metric_lists(trainer).items()},
        )

    def restore(self, saved: LoggedState, step: int) -> None:
        trainer, is_logged = self.trainer, self._count_rows() > saved.num_rows
        total, metrics = running_loss(trainer), metric_store(trainer)
        total.copy_(torch.zeros_like(total) if is_logged else saved.loss)
        trainer._total_loss_scalar = saved.total + (float(saved.loss) if is_logged else 0.0)
        trainer._globalstep_last_logged = step - (0 if is_logged else saved.num_unlogged)
        trainer._initial_global_step = step - saved.num_steps
        for name in metric_lists(trainer):
            del metrics[name]
        metrics.update({} if is_logged else {name: list(values) for name, values in saved.metrics.items()})

    def _count_rows(self) -> int:
        return sum("loss" in row for row in self.trainer.state.log_history)
