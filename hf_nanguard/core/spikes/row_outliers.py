"""Which samples of a group are out of line with all others that were measured: plain numbers, no tensors.

Losses and norms of single samples vary by factors, so they are given as logarithms, relative to the usual level of the run. A
sample is out of line if it is above all of these:

    median + `SIGMAS` spreads of the others      where samples differ by nature, a large one is nothing special; or
                                                 `LINEAR_SIGMAS` without logarithms, whichever is less
    `GAP` times the largest of the others        hard samples are seldom alone
    `LEAST` times the median of the others

The spread is that of the upper half, because hard samples are what a bad one must be distinguished from. The others are the samples of
the same group and those of earlier groups that were examined; without `MIN_OTHERS` of them nothing is out of line, and the
spread of few counts as larger than it is.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from ..event import JsonObject

SIGMAS = 6.0
LINEAR_SIGMAS = 200.0  # squared errors spread over many powers of ten below their median
GAP = math.log(2.0)
LEAST = math.log(3.0)
MIN_OTHERS = 6
DOUBT = 6.0  # with n others, their spread counts as 1 + DOUBT / n times as large
UPPER = 0.9  # the quantile from which the spread is taken, and its place in a normal distribution
UPPER_SIGMAS = 1.2816
MAX_LOG = 600.0
NUM_KEPT = 128


def find_bound(others: Sequence[float], extremes: Sequence[float] = ()) -> float | None:
    """Returns the logarithm above which a sample is out of line with others; `None` if those are too few.

    `extremes` are large ones that were chosen for that: the gap counts from the largest of them, the spread leaves them out.
    """
    if len(others) < MIN_OTHERS:
        return None
    ranked = sorted(others)
    middle, high = median(ranked), _quantile(ranked, UPPER)
    doubt = (1 + DOUBT / len(ranked)) / UPPER_SIGMAS
    by_factor = middle + max(SIGMAS * doubt * (high - middle), LEAST)
    by_distance = math.log1p(LINEAR_SIGMAS * doubt * math.expm1(min(high - middle, MAX_LOG))) + middle
    return max(min(by_factor, max(by_distance, middle + LEAST)), max(ranked[-1], *extremes, -math.inf) + GAP)


def _quantile(ranked: Sequence[float], share: float) -> float:
    place = share * (len(ranked) - 1)
    below = int(place)
    return ranked[below] + (place - below) * (ranked[min(below + 1, len(ranked) - 1)] - ranked[below])


def find_outliers(samples: Sequence[float], others: Sequence[float], extremes: Sequence[float] = ()) -> list[int]:
    """Returns the positions of the samples that are out of line: a minority, or none.

    All are logarithms of what was measured: of each sample of a group, of `others` that are known to be usual, and of the
    largest samples of earlier groups (`extremes`), which were not out of line.
    """
    order = sorted(range(len(samples)), key=lambda index: -samples[index])
    for number in range(max(1, (len(samples) - 1) // 2), 0, -1):
        bound = find_bound([*(samples[index] for index in order[number:]), *others], extremes)
        if bound is not None and samples[order[number - 1]] > bound:
            return sorted(order[:number])
    return []


class UsualSamples:
    """Samples of earlier examinations that were not out of line: logarithms, relative to the usual level at that time."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=NUM_KEPT)
        self.extremes: deque[float] = deque(maxlen=NUM_KEPT)  # the largest of each examination, for which it was chosen

    def add(self, values: list[float]) -> None:
        *rest, largest = sorted(values) or [-math.inf]
        self.values.extend(rest)
        self.extremes.append(largest)

    def state_dict(self) -> JsonObject:
        return {"values": list(self.values), "extremes": [value for value in self.extremes if math.isfinite(value)]}

    def load_state_dict(self, state: JsonObject) -> None:
        for name, kept in (("values", self.values), ("extremes", self.extremes)):
            kept.clear()
            kept.extend(value for value in map(float, state[name]) if math.isfinite(value))
