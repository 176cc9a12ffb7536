"""A held micro-batch measured sample by sample: loss and gradient norm of each, as if it were the whole step."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ...boundary import attempt
from ...plain_text import quote_error
from ..autopsy.evidence.suspect_batch import SuspectBatch, find_fields
from ..rerun.micro_batch import MicroBatch
from ..rerun.runner import Runner
from .spike_examination import SampleReading

MAX_SUSPECTS = 4  # micro-batches that are examined sample by sample
IGNORED_LABEL = -100
NUM_MANY = 8


@dataclass
class MeasuredBatch:
    """A micro-batch and what was measured of it."""

    suspect: SuspectBatch
    index: int  # its position in the group
    num_labels: int | None  # how many labels a target may be
    whole: tuple[float, float]  # loss and norm
    samples: list[SampleReading] = field(default_factory=list)
    failure: str | None = None  # why its samples were not run alone

    @property
    def classes(self) -> Tensor | None:
        """Its labels, if they are classes or tokens."""
        labels = next(iter(find_fields(self.suspect.fields, ("labels",))), None)
        return None if labels is None or labels.is_floating_point() else labels

    def has_many_targets(self, sample: int) -> bool:
        """Whether the loss of a sample is a mean over many targets, so that one hard target does not decide it."""
        labels = self.classes
        if labels is None or labels.ndim < 2 or sample >= len(labels):
            return False
        return int((labels[sample] != IGNORED_LABEL).sum()) >= NUM_MANY

    def is_one_class(self, sample: int) -> bool:
        """Whether the loss of a sample is that of one class, or a few."""
        return self.classes is not None and not self.has_many_targets(sample)

    @property
    def guess(self) -> float:
        """The loss of a uniform guess over the classes; at least two are known to exist, none of numbers."""
        return 0.0 if self.classes is None else math.log(max(self.num_labels or 2, 2))

    def measure_without(self, samples: set[int]) -> tuple[float, float] | None:
        """Returns loss and norm without some samples, `None` if nothing is left."""
        rest = [sample for sample in range(self.suspect.num_samples or 1) if sample not in samples]
        return self.suspect.measure(rest) if rest else None


def measure_group(
    runner: Runner,
    suspects: Sequence[MicroBatch],
    others: Sequence[MicroBatch],
    num_wanted: int,
    deadline: float,
    rank: int,
) -> list[MeasuredBatch]:
    """Measures the suspects, those with the largest norms if they are many, then others until enough samples are known."""
    chosen = list(suspects)
    if len(chosen) > MAX_SUSPECTS:
        norms = {micro.index: SuspectBatch(runner, micro, None).measure()[1] for micro in chosen}
        chosen = sorted(chosen, key=lambda micro: -norms[micro.index])[:MAX_SUSPECTS]
    measured: list[MeasuredBatch] = []
    for number, micro in enumerate([*chosen, *others]):
        is_enough = number >= len(chosen) and sum(len(each.samples) for each in measured) >= num_wanted
        if time.monotonic() > deadline or is_enough:
            break
        measured.append(measure_samples(SuspectBatch(runner, micro, None), deadline, rank))
    return measured


def measure_samples(suspect: SuspectBatch, deadline: float, rank: int) -> MeasuredBatch:
    """Measures all samples of a micro-batch, or none: a part of them says nothing about a minority."""
    index, rows = suspect.micro.index, suspect.rows or []
    number = suspect.num_samples or 1
    measured = MeasuredBatch(suspect, index, suspect.runner.num_labels, suspect.measure())
    given = suspect.micro.rows
    if given and suspect.rows is None and suspect.documents is None:
        measured.failure = f"{len(given)} rows of the dataset are {number} entries of the batch"
        return measured

    def measure() -> list[SampleReading]:
        samples = []
        for sample in range(number):
            if time.monotonic() > deadline:
                raise TimeoutError
            loss, norm = measured.whole if number == 1 else suspect.measure([sample])
            row = rows[sample] if sample < len(rows) else None
            samples.append(SampleReading(index, sample, row, loss, norm, rank))
        return samples

    def fail(error: Exception) -> list[SampleReading]:  # a batch that cannot be cut: packing, BatchNorm; or out of time
        measured.failure = quote_error(error)
        return []

    measured.samples = attempt(measure, fail)
    return measured
