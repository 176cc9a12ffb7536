"""Detects a loss that diverges in finite numbers: it stays above where the run began, or above its own best.

A level is the median of the last `NUM_LEVEL` losses, in logarithms. It must exceed the first level, or the best one, by a
factor and by a multiple of the noise from one step to the next, and stay there. New data (a curriculum, another task) and a
learning rate that restarts raise a loss above its best as well, but then it falls again. So there it must also have lost half
of what was gained, and not be falling.
"""

import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ..event import JsonObject
from .spike_detector import MAX_LOG, MEAN_TO_SIGMA

NUM_KEPT = 100
NUM_LEVEL = 10
SIGMAS = 2.5  # the median of NUM_LEVEL values has 0.4 of their standard deviation
ABOVE_START, NUM_ABOVE_START = 1.6, 20  # factor, and steps for which it lasts
ABOVE_BEST, NUM_ABOVE_BEST = 2.5, 50
SUDDEN = 5.0  # multiple of the first level that is reported at once
FALLS = 0.8  # a level below that share of what it was NUM_ABOVE_BEST steps before is falling
MIN_LOSS = 1e-30


@dataclass(frozen=True)
class Divergence:
    """A level of the loss that stays too high."""

    value: float
    usual: float  # the level that it is compared with
    since: int  # the first step above
    reference: str  # "start" or "best"


class DivergenceDetector:
    """Follows the level of a loss and reports that it diverges, once until it has recovered."""

    def __init__(self) -> None:
        self.floor = MIN_LOSS
        self.logs: deque[float] = deque(maxlen=NUM_KEPT)
        self.steps: deque[int] = deque(maxlen=NUM_KEPT)
        self.first: list[float] = []
        self.best: float | None = None
        self.above: deque[float] = deque(maxlen=NUM_ABOVE_BEST)  # the levels since it is too high
        self.since = 0
        self.num_below = 0
        self.is_reported = False

    def raise_floor(self, floor: float) -> None:
        """Makes values below `floor` count as `floor`: around 0, factors between values mean nothing."""
        self.floor, low = floor, math.log(floor)
        self.logs = deque((max(value, low) for value in self.logs), maxlen=NUM_KEPT)
        self.first = [max(value, low) for value in self.first]
        self.best = None if self.best is None else max(self.best, low)

    def add(self, step: int, loss: float) -> Divergence | None:
        """Adds a finite loss and returns that it diverges, if that is new."""
        self.logs.append(math.log(max(loss, self.floor)))
        self.steps.append(step)
        if len(self.first) < NUM_LEVEL:
            self.first.append(self.logs[-1])
        if len(self.logs) <= NUM_LEVEL:
            return None
        level, noise = median(list(self.logs)[-NUM_LEVEL:]), self._noise()
        # the first loss is the only one before any update, and a single value
        start = min(median(self.first), self.first[0] + noise)
        best = level if self.best is None else self.best
        self.best = min(level, best)
        above_start = level > start + math.log(ABOVE_START) + noise
        above_best = level > max(best + math.log(ABOVE_BEST) + noise, _mean(start, best))
        if not self._lasts(level, above_start or above_best, start if above_start else best) or self.is_reported:
            return None
        is_falling = level < self.above[0] + math.log(FALLS)
        if above_start and (len(self.above) >= NUM_ABOVE_START or level > start + math.log(SUDDEN) + noise):
            reference, usual = "start", min(self.first[0], median(self.first))
        elif above_best and len(self.above) == NUM_ABOVE_BEST and not is_falling:
            reference, usual = "best", best
        else:
            return None
        self.is_reported = True
        return Divergence(math.exp(min(level, MAX_LOG)), math.exp(usual), self.since, reference)

    def _lasts(self, level: float, is_above: bool, reference: float) -> bool:
        """Notes whether the level is too high; it has recovered once it was not for as long as it must last."""
        if not is_above:
            self.above.clear()
            self.num_below += 1
            self.is_reported = self.is_reported and self.num_below < NUM_ABOVE_BEST
            return False
        if not self.above:
            self.since = self._find_first(level, reference)
        self.above.append(level)
        self.num_below = 0
        return True

    def _find_first(self, level: float, reference: float) -> int:
        """Returns the first step from which on the losses were nearer to the level than to what it is compared with."""
        found = self.steps[-1]
        for step, value in zip(reversed(self.steps), reversed(self.logs), strict=True):
            if value < (level + reference) / 2:
                break
            found = step
        return found

    def _noise(self) -> float:
        """Returns a multiple of the noise of a value, without the largest tenth of the moves, which a divergence makes."""
        moves = sorted(abs(after - before) for before, after in pairwise(self.logs))
        kept = moves[: math.ceil(0.9 * len(moves))]
        return SIGMAS * MEAN_TO_SIGMA * sum(kept) / len(kept)

    def state_dict(self) -> JsonObject:
        """Returns what `load_state_dict` needs, as JSON values."""
        return {
            **vars(self),
            "logs": list(self.logs),
            "steps": list(self.steps),
            "first": list(self.first),
            "above": list(self.above),
        }

    def load_state_dict(self, state: JsonObject) -> None:
        """Restores what [`DivergenceDetector.state_dict`] returned."""
        for name, value in vars(self).items():
            saved = state[name]
            setattr(self, name, deque(saved, maxlen=value.maxlen) if isinstance(value, deque) else saved)


def _mean(first: float, second: float) -> float:
    """Returns the logarithm of the mean of two values that are given as logarithms."""
    high, low = max(first, second), min(first, second)
    return high + math.log((1 + math.exp(low - high)) / 2)
