"""What the guard does in evaluation: nothing is dropped, a non-finite loss is reported and never becomes the best."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ...core.event import Culprit, Event
from ...core.finite import read_host
from ...core.step.guard import Guard
from ...core.vocabulary import Action, Signal
from ...plain_text import quote_metric
from ..compat.trainer import filters_evaluation
from ..compat.trainer_protocol import HostTrainer


class Evaluation:
    """Watches the evaluations of a trainer."""

    def __init__(self, trainer: HostTrainer, guard: Guard):
        self.trainer = trainer
        self.journal, self.ranks, self.boundary = guard.journal, guard.ranks, guard.boundary
        self.losses: list[Tensor] | None = None
        self.labelled: list[Tensor] = []  # whether each batch has a label; the loss of one without may be 0/0
        self._spoiled: set[str] = set()  # the losses that leave batches out, as of their last evaluation

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Surrounds `evaluate()`: its losses are kept, as scalars on the device, until its metrics are known."""
        self.losses, self.labelled = [], []
        try:
            yield
        finally:
            self.losses = None

    def keep(self, loss: object, labels: object) -> None:
        """Keeps the loss of an evaluation batch; nothing is read."""
        if self.losses is not None and isinstance(loss, Tensor):
            self.losses.append(loss.detach().mean())
            has_label = labels.ne(-100).any() if isinstance(labels, Tensor) and labels.numel() else loss.new_ones(())
            self.labelled.append(has_label.to(loss.device))

    def check(self, metrics: dict[str, float]) -> None:
        """Reports an evaluation loss that is not finite, with the first batch that made it so, also if the host has left such
        batches out of it."""
        if self.losses is None:  # several datasets: each has reported its own
            return
        step = self.trainer.state.global_step
        self._spoiled -= metrics.keys()
        logged = {k: v for k, v in metrics.items() if k.endswith("loss") or k == self.best_metric}
        bad = {k: v for k, v in logged.items() if isinstance(v, float) and not math.isfinite(v)}
        losses = read_host(self.losses) if bad else []
        for name, value in bad.items():
            first = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
            where = f", first in evaluation batch {first}" if first is not None else ""
            name = quote_metric(name)
            self._write(f"{name} is {value} at step {step}{where}", first, {name: value})
        # The loss that the host has computed comes with its running time.
        names = [k for k in logged if k not in bad and k.removesuffix("_loss") + "_runtime" in metrics]
        if names and filters_evaluation(self.trainer):
            found = self.boundary.together("evaluation", self._find_left_out, lambda why: None)
            if found is not None:
                self._report_left_out(names[0], metrics[names[0]], *found)

    def _find_left_out(self) -> tuple[int, int, float] | None:
        """Returns rank, number and loss of the first batch with labels whose loss is not finite. Every rank must call it."""
        values = read_host([*(self.losses or ()), *self.labelled])
        losses, labelled = values[: len(self.labelled)], values[len(self.labelled) :]
        bad = (i for i, has_label in enumerate(labelled) if has_label and not math.isfinite(losses[i]))
        mine = next(((i, losses[i]) for i in bad), None)
        every = self.ranks.gather(mine)
        return next(((rank, found[0], found[1]) for rank, found in enumerate(every) if found is not None), None)

    def _report_left_out(self, name: str, mean: float, rank: int, batch: int, loss: float) -> None:
        self._spoiled.add(name)
        step, name = self.trainer.state.global_step, quote_metric(name)
        what = f"the loss of evaluation batch {batch} is {loss} at step {step}, and {name} is the mean of the others"
        self._write(what, batch, {name: mean, "loss": loss}, rank)

    def _write(self, what: str, batch: int | None, values: dict[str, float], rank: int | None = None) -> None:
        step, culprit = self.trainer.state.global_step, Culprit(phase="loss")
        message = f"{what}; it cannot become the best metric"
        self.journal.write(Event(step, Signal.EVAL_NONFINITE, Action.OBSERVED, message, batch, rank, values, culprit))

    @property
    def best_metric(self) -> str:
        """The name of the metric that chooses the best model."""
        name = self.trainer.args.metric_for_best_model or "loss"
        return name if name.startswith("eval_") else f"eval_{name}"

    def spoils_best(self, metrics: dict[str, float]) -> bool:
        """Returns whether the metric that chooses the best model is not finite, or leaves out losses that are not."""
        value = metrics.get(self.best_metric)
        return self.best_metric in self._spoiled or (isinstance(value, float) and not math.isfinite(value))
