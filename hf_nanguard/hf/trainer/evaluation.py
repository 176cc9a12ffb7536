"""What the guard does in evaluation: nothing is dropped, a loss that is not finite is told and never becomes the best."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ...core.event import Culprit, Event
from ...core.finite import read_host
from ...core.step.guard import Guard
from ...core.vocabulary import Action, Signal
from ..compat.trainer_protocol import HostTrainer


class Evaluation:
    """Watches the evaluations of a trainer."""

    def __init__(self, trainer: HostTrainer, guard: Guard):
        self.trainer = trainer
        self.guard = guard
        self.losses: list[Tensor] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Surrounds `evaluate()`: its losses are kept, as scalars on the device, until its metrics are known."""
        self.losses = []
        try:
            yield
        finally:
            self.losses = None

    def keep(self, loss: Any) -> None:
        """Keeps the loss of an evaluation batch; nothing is read."""
        if self.losses is not None and isinstance(loss, Tensor):
            self.losses.append(loss.detach().mean())

    def check(self, metrics: dict[str, float]) -> None:
        """Reports an evaluation loss that is not finite, with the first batch that made it so."""
        if self.losses is None:  # several datasets: each has told for itself
            return
        told = {k: v for k, v in metrics.items() if k.endswith("loss") or k == self.best_metric}
        bad = {k: v for k, v in told.items() if isinstance(v, float) and not math.isfinite(v)}
        losses = read_host(self.losses) if bad else []
        step = self.trainer.state.global_step
        for name, value in bad.items():
            first = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
            where = f", first in evaluation batch {first}" if first is not None else ""
            message = f"{name} is {value} at step {step}{where}; it cannot become the best metric"
            rank, culprit = self.guard.ranks.rank, Culprit(phase="loss")
            self.guard.journal.write(
                Event(step, Signal.EVAL_NONFINITE, Action.OBSERVED, message, first, rank, {name: value}, culprit)
            )

    @property
    def best_metric(self) -> str:
        """The name of the metric that chooses the best model."""
        name = self.trainer.args.metric_for_best_model or "loss"
        return name if name.startswith("eval_") else f"eval_{name}"

    def spoils_best(self, metrics: dict[str, float]) -> bool:
        """Returns whether the metric that chooses the best model is not finite."""
        value = metrics.get(self.best_metric)
        return isinstance(value, float) and not math.isfinite(value)
