"""Detects a loss that diverges in finite numbers: it stays above where the run began, or above its own best.

A level is the median of the last `NUM_LEVEL` losses, in logarithms. It must exceed the first level, or the best one, by a
factor and by a multiple of the noise from one step to the next, and stay there. A diverged loss is noisier than a healthy one,
so the noise against the start is at most that of the first losses. New data (a curriculum, another task) and a
learning rate that restarts raise a loss above its best as well, but then it falls again. So there it must also have lost half
of what was gained, and not be falling.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ..event import JsonObject
from .spike_detector import MAX_LOG, MEAN_TO_SIGMA

NUM_KEPT = 100
NUM_LEVEL, NUM_FIRST = 20, 10
SIGMAS = 2.5
LEVEL_TO_VALUE = 0.5  # noise of the difference of a level and the first one, relative to that of a value
NUM_EARLY = 40  # losses among which a run that diverges at once is compared with its first loss
SINGLE = 2.0  # factor by which a single value, without noise of its own, may be too low
ABOVE_START, NUM_ABOVE_START = 1.6, 10  # factor, and steps for which it lasts
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

    @property
    def is_open(self) -> bool:
        """Whether the level is too high, or has been reported and not recovered yet."""
        return bool(self.above) or self.is_reported

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
        if len(self.first) < NUM_FIRST:
            self.first.append(self.logs[-1])
        if len(self.logs) <= NUM_FIRST:
            return None
        level, noise = median(list(self.logs)[-NUM_LEVEL:]), _noise(self.logs)
        start = self._start(noise)
        best = level if self.best is None else self.best
        self.best = min(level, best)
        above_start = level > start + math.log(ABOVE_START)
        above_best = level > max(best + math.log(ABOVE_BEST) + noise, _mean(start, best))
        if not self._lasts(level, above_start or above_best, start if above_start else best) or self.is_reported:
            return None
        is_falling = level < self.above[0] + math.log(FALLS)
        if above_start and (len(self.above) >= NUM_ABOVE_START or level > start + math.log(SUDDEN)):
            reference, usual = "start", min(self.first[0], median(self.first))
        elif above_best and len(self.above) == NUM_ABOVE_BEST and not is_falling:
            reference, usual = "best", best
        else:
            return None
        self.is_reported = True
        return Divergence(math.exp(min(level, MAX_LOG)), math.exp(usual), self.since, reference)

    def _start(self, noise: float) -> float:
        """Returns the level of the first losses plus noise; early on the first loss may be the only one that has not diverged."""
        start = median(self.first) + LEVEL_TO_VALUE * min(noise, _noise(self.first))
        is_early = len(self.logs) <= NUM_EARLY
        return min(start, self.first[0] + math.log(SINGLE) + noise) if is_early else start

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


def _noise(logs: Iterable[float]) -> float:
    """Returns a multiple of the noise of a value, without its trend and the largest tenth of the moves."""
    moves = [after - before for before, after in pairwise(logs)]
    trend = median(moves)
    moves = sorted(abs(move - trend) for move in moves)
    kept = moves[: math.ceil(0.9 * len(moves))]
    return SIGMAS * MEAN_TO_SIGMA * sum(kept) / len(kept)
