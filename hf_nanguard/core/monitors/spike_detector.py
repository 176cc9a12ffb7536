"""Detects spikes of a series, the loss or the gradient norm: compares each value with the median of recent ones.

Everything is measured in logarithms: norms and losses vary by factors, increasingly so towards the end of a run, where a
linear scale would report spikes. The level is a median, which a single outlier does not change, the spread that of moves from
one value to the next, which a decay does not change. Spikes are not added. Non-finite values are never added: after
one NaN, a mean or an EMA would call every later step bad, or none. Slow drifts are not detected here, see
`loss_divergence.py`.

A value far above the others may also be the first of new data: a curriculum, another task. So a spike of less than `SUDDEN`
times the median is reported only once the values have come back, and a level that stays becomes the new history.
"""

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ..event import JsonObject

SIGMAS = 8.0
MEAN_TO_SIGMA = 0.886  # of the moves from one value to the next, mean magnitude, to the standard deviation of values
MEDIAN_TO_SIGMA = 1.048  # the same of the median magnitude
MAX_LOG = 700.0  # beyond 709 the exponential is infinite
NUM_KEPT = 100
NUM_LOCAL = 30  # of them, whose median is the usual level
MIN_TO_ACT = 50  # values from which on the history is long enough to clip or skip a step by it
NUM_LEVEL = 10  # values above the threshold in a row that are a new level; below it, that end an episode
FIRST_RATIO = (
    500.0  # multiple of the first value that the second must exceed; after n values it is FIRST_RATIO / n**1.5
)
SUDDEN = 10.0


@dataclass(frozen=True)
class Spike:
    """A value far above the recent ones."""

    step: int
    value: float
    usual: float  # the median of the values before
    threshold: float

    @property
    def midpoint(self) -> float:
        """The value, between the usual ones and the threshold, below which the series has come back."""
        return math.sqrt(self.usual) * math.sqrt(self.threshold)


class SpikeDetector:
    """Keeps the last finite values of a series and detects spikes.

    Args:
        ratio (`float`, *optional*, defaults to `50.0`):
            Multiple of the usual level that a spike must exceed, because almost constant values have a very small spread; in
            healthy runs with small batches a norm is forty times the median now and then.
        tail (`float`, *optional*, defaults to `1.0`):
            Multiple of the largest rise from one value to the next, in logarithms, that a spike must exceed as well: values
            that jump between several levels, e.g. of several tasks, are no spikes.
        robust_sigmas (`float`, *optional*):
            Standard deviations above the usual level that a spike must exceed as well, taken from the median move, which many
            outliers do not change. Without it eight, taken from the mean.
    """

    def __init__(self, ratio: float = 50.0, tail: float = 1.0, robust_sigmas: float | None = None):
        self.ratio = ratio
        self.tail = tail
        self.robust_sigmas = robust_sigmas
        self.floor = 0.0  # values below count as this one; without a floor exact zeros do not count
        self.values: deque[float] = deque(maxlen=NUM_KEPT)
        self.logs: deque[float] = deque(maxlen=NUM_KEPT)
        self.pending: list[Spike] = []  # in a row, up to now
        self.num_quiet = NUM_LEVEL  # values since the last spike
        self.is_reported = False  # whether the latest episode is
        self._threshold: float | None = None

    def begin_run(self) -> None:
        """Forgets the values of another run."""
        self.pending, self.num_quiet, self.is_reported = [], NUM_LEVEL, False
        self._replace([])

    def raise_floor(self, floor: float, ratio: float | None = None) -> None:
        """Makes values below `floor` count as `floor`: where a series moves around 0, factors between values mean nothing.
        From now on a spike must exceed `ratio` times the usual level if it is given."""
        self.floor = max(self.floor, floor)
        self.ratio = self.ratio if ratio is None else ratio
        self._replace(list(self.values))

    @property
    def can_act(self) -> bool:
        """Whether the history is long enough to clip or skip a step by it."""
        return len(self.logs) >= MIN_TO_ACT

    @property
    def is_open(self) -> bool:
        """Whether an episode of spikes has not ended yet."""
        return self.num_quiet < NUM_LEVEL

    @property
    def usual(self) -> float | None:
        """The usual level, `None` without a history."""
        return math.exp(self._level()) if self.logs else None

    def threshold(self) -> float | None:
        """Returns the value above which a new one is a spike, `None` without a history."""
        if self._threshold is None and self.logs:
            ratio = math.log(max(self.ratio, FIRST_RATIO / len(self.logs) ** 1.5))
            moves = [after - before for before, after in pairwise(self.logs)] or [0.0]
            if self.robust_sigmas is None:
                spread = SIGMAS * MEAN_TO_SIGMA * sum(map(abs, moves)) / len(moves)
            else:
                spread = self.robust_sigmas * MEDIAN_TO_SIGMA * median(map(abs, moves))
            self._threshold = math.exp(min(self._level() + max(spread, ratio, self.tail * max(moves)), MAX_LOG))
        return self._threshold

    def is_spike(self, value: float) -> bool:
        threshold = self.threshold()
        return threshold is not None and value > threshold

    def add(self, step: int, value: float) -> Spike | None:
        """Adds a value and returns the spike to report now, if any: once an episode. A non-finite value is ignored."""
        if not math.isfinite(value):
            return None
        threshold, usual = self.threshold(), self.usual
        if threshold is None or usual is None or value <= (self.pending[0].midpoint if self.pending else threshold):
            spikes, self.pending = self.pending, []
            self._append(value)
            self.num_quiet += 1
            return self._report(max(spikes, key=lambda spike: spike.value)) if spikes else None
        self.is_reported = self.is_reported and self.num_quiet < NUM_LEVEL
        self.num_quiet = 0
        spike = Spike(step, value, usual, threshold)
        self.pending.append(spike)
        if len(self.pending) == NUM_LEVEL:
            self._replace([spike.value for spike in self.pending])
            self.pending = []
        return self._report(spike) if value > SUDDEN * usual else None

    def _report(self, spike: Spike) -> Spike | None:
        is_new, self.is_reported = not self.is_reported, True
        return spike if is_new else None

    def _append(self, value: float) -> None:
        if (raised := max(value, self.floor)) > 0.0:
            self.values.append(value)
            self.logs.append(math.log(raised))
            self._threshold = None

    def _replace(self, values: list[float]) -> None:
        self.values.clear()
        self.logs.clear()
        self._threshold = None
        for value in values:
            self._append(value)

    def _level(self) -> float:
        """Returns the usual level; the last few values count alone if they are higher, as where a warm-up ends."""
        return max(median(list(self.logs)[-count:]) for count in (NUM_LOCAL, NUM_LEVEL))

    def state_dict(self) -> JsonObject:
        """Returns the values, and what they count at least, for a checkpoint."""
        return {"values": list(self.values), "floor": self.floor}

    def load_state_dict(self, state: JsonObject) -> None:
        """Restores the values of a checkpoint; non-finite ones are ignored."""
        self.floor = max(self.floor, float(state.get("floor", 0.0)))
        self.pending, self.num_quiet = [], NUM_LEVEL
        self._replace([value for value in map(float, state["values"]) if math.isfinite(value)])
