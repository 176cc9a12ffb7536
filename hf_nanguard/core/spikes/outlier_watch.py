"""Which steps are examined sample by sample: those with a spike, and a few whose value is merely out of line.

Losses of micro-batches and the norm are on the host already, so a healthy step costs a comparison. A bad row in a batch of
good ones raises the mean too little for a spike to be reported, so the bound here is lower. What a healthy run pays for that is
bounded: an examination that names no row makes the next one wait `FIRST_WAIT` steps, then twice as many, so n steps have at most
log2(n / `FIRST_WAIT`) of them. Spikes do not wait; at most `nanguard_max_autopsies` of them are examined without a result. Nor does a
loss that is apart from all usual ones of a model that has learned; up to step n at most `nanguard_max_autopsies` and n / `STEPS_EACH` of
them are examined, with a result or not, and `MAX_APART` in a run. Steps whose rows are blamed already are not examined again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..event import JsonObject
from ..monitors.spike_detector import SpikeDetector
from ..vocabulary import Signal
from .confident_errors import LearnedLosses

SIGMAS = 5.0
RATIO = 1.2
NUM_START = 10  # values from which the level at the start is taken
MIN_SEEN = 30  # values before anything but a spike is examined
FIRST_WAIT = 20
WAIT_FACTOR = 2
MAX_APART, STEPS_EACH = 64, 20  # examinations of losses that are apart but no spikes: in a run, and steps for each


@dataclass(frozen=True)
class Suspicion:
    """Why a step is examined."""

    signal: Signal  # `loss_spike` or `grad_spike`
    micro_batches: list[int]  # those whose loss is out of line, the worst first; all if only the norm is
    usual: float
    threshold: float
    is_apart: bool = False  # whether the loss is apart from all usual ones, of a model that has learned

    @property
    def midpoint(self) -> float:
        """The value between usual and out of line."""
        return math.sqrt(self.usual * self.threshold)


class Series(SpikeDetector):
    """One series of a run: its recent values, and the level at its start."""

    def __init__(self) -> None:
        super().__init__(ratio=RATIO, tail=0.0, robust_sigmas=SIGMAS)
        self.first: list[float] = []

    def take(self, step: int, value: float) -> bool:
        """Adds a finite value and returns whether it is out of line."""
        if len(self.first) < NUM_START and value > 0.0:
            self.first.append(value)
        is_outlier = self.is_spike(value)
        self.add(step, value)
        return is_outlier

    @property
    def start(self) -> float | None:
        """The level at the start of the run, `None` if too few values are known. A model may learn within a few steps, so it is the
        largest value but one, which may be that of a bad row."""
        return sorted(self.first)[-2] if len(self.first) == NUM_START else None

    def state_dict(self) -> JsonObject:
        return {"detector": super().state_dict(), "first": list(self.first)}

    def load_state_dict(self, state: JsonObject) -> None:
        super().load_state_dict(state["detector"])
        self.first = [value for value in map(float, state["first"]) if math.isfinite(value)][:NUM_START]


class OutlierWatch:
    """Chooses the steps that are examined."""

    def __init__(self, max_fruitless: int):
        self.max_fruitless = max_fruitless
        self.begin_run()

    def begin_run(self) -> None:
        """Begins another run."""
        self.losses, self.norms = Series(), Series()
        self.learned = LearnedLosses()
        self.num_fruitless = self.num_in_a_row = self.num_apart = 0
        self.next_step = 0

    def suspect(self, step: int, losses: Sequence[float], norm: float, uses_losses: bool) -> Suspicion | None:
        """Adds the values of a step; returns why it may be examined, `None` if nothing is out of line. `losses` are of its
        micro-batches, each as if it were the whole step, and count only if they are judged, which only this rank knows."""
        found: Suspicion | None = None
        outliers = []
        before, threshold = self.losses.usual, self.losses.threshold()
        for index, loss in enumerate(losses):
            self.learned.add(loss, before, self.losses.start)
            if self.losses.take(step, loss) or self.learned.stands_apart(loss, before):
                outliers.append((loss, index))
        if outliers and uses_losses and before is not None and threshold is not None:
            order = [index for _, index in sorted(outliers, reverse=True)]
            is_apart = self.learned.stands_apart(max(outliers)[0], before)
            found = Suspicion(Signal.LOSS_SPIKE, order, before, threshold, is_apart)
        before, threshold = self.norms.usual, self.norms.threshold()
        if self.norms.take(step, norm) and found is None and before is not None and threshold is not None:
            found = Suspicion(Signal.GRAD_SPIKE, list(range(len(losses))), before, threshold)
        return found

    def stands_apart(self, loss: float) -> bool:
        """Returns whether a loss is far above the usual ones of a model that has learned, with a gap below it."""
        return self.learned.stands_apart(loss, self.losses.usual)

    def is_due(self, step: int, is_spike: bool, is_apart: bool = False) -> bool:
        """Returns whether a step that is out of line is examined; a spike need not wait, nor a loss that is apart, up to a bound."""
        if is_spike and self.num_fruitless < self.max_fruitless:
            return True
        if is_apart:
            return self.num_apart < min(MAX_APART, self.max_fruitless + step // STEPS_EACH)
        return not is_spike and step >= self.next_step and len(self.norms.logs) >= MIN_SEEN

    def conclude(
        self, step: int, is_spike: bool, found_rows: bool, has_verdict: bool = False, is_apart: bool = False
    ) -> None:
        """Notes what an examination came to; one with another verdict than rows was worth its time if it was that of a spike."""
        if is_apart:  # it has a bound of its own
            self.num_apart += 1
            return
        self.num_in_a_row = 0 if found_rows else self.num_in_a_row + 1
        self.num_fruitless += is_spike and not (found_rows or has_verdict)
        self.next_step = 0 if found_rows else step + FIRST_WAIT * WAIT_FACTOR ** (self.num_in_a_row - 1)

    def state_dict(self) -> JsonObject:
        """Returns what a checkpoint needs: the values. What was examined counts for one run."""
        return {
            "losses": self.losses.state_dict(),
            "norms": self.norms.state_dict(),
            "learned": self.learned.state_dict(),
        }

    def load_state_dict(self, state: JsonObject) -> None:
        self.losses.load_state_dict(state["losses"])
        self.norms.load_state_dict(state["norms"])
        self.learned.load_state_dict(state.get("learned", {"values": []}))
