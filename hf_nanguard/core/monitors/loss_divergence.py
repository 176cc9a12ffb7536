"""Detects a loss that diverges in finite numbers: it stays above where the run began, or above its own best.

All is measured in logarithms and by quantiles, because a diverged loss is far noisier than a healthy one. There are four cases:

- At once: a learning rate that is far too high ruins the model with the first update or two, so that only one or two losses are
  those of the healthy model. Among the first `NUM_EARLY` losses nearly all must be above them, by a factor and by a multiple of
  the noise. A single loss may be low by chance. So the multiple is smaller only if the gradient norm has grown as well.
- Above the start: most recent losses are above most of the first `NUM_FIRST` for some time.
- Never better: the run has never been better than its start and is worse for a long time, by less.
- Above the best: new data (a curriculum, another task) and a learning rate that restarts raise a loss above its best as well, but
  then it falls again. So it must also have lost half of what was gained, and not be falling.
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
MOST = 0.2  # quantile: four of five values are above the lower one, or below the upper one
NUM_EARLY, NUM_SOUND = 40, (1, 2)  # losses among which a run diverges at once, and its first losses that have not
LOW, MEDIAN = (1.5, 1.2), (2.0, 1.6)  # factors over these first losses, of the lowest recent losses and of their median
SIGMAS_ALONE, SIGMAS_WITH_NORM = 3.0, 1.5
NORM_FACTOR, NORM_SHARE = (
    6.0,
    0.8,
)  # growth of the norm; where squares are low by chance, their norm is by the root of that
ABOVE_START, MOST_ABOVE_START, NUM_ABOVE_START = (
    1.5,
    1.25,
    10,
)  # factors of medians and of quantiles, and steps it lasts
NEVER_BETTER, NUM_WORSE, WORSE, MOST_WORSE, STAYS = 0.9, 60, 1.25, 1.02, 0.93
ABOVE_BEST, NUM_ABOVE_BEST, SIGMAS_BEST = 2.5, 50, 2.5
FALLS = 0.8  # a level below that share of what it was NUM_ABOVE_BEST steps before is falling
MIN_LOSS, MIN_NORM = 1e-30, 1e-12


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
        self.norms: deque[float] = deque(maxlen=NUM_EARLY)
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

    def add(self, step: int, loss: float, norm: float = 1.0) -> Divergence | None:
        """Adds a finite loss, and the gradient norm of its step, and returns that it diverges, if that is new."""
        self.logs.append(math.log(max(loss, self.floor)))
        self.norms.append(math.log(max(norm, MIN_NORM)))
        self.steps.append(step)
        if len(self.first) < NUM_FIRST:
            self.first.append(self.logs[-1])
        if len(self.logs) <= NUM_FIRST:
            return None
        logs = list(self.logs)
        level, start = median(logs[-NUM_LEVEL:]), median(self.first)
        best = level if self.best is None else self.best
        self.best = min(level, best)
        at_once, above_start = self._is_above_at_once(logs), self._is_above_start(logs, start)
        above_start_long = self.best > start + math.log(NEVER_BETTER) and self._is_worse(logs, start)
        lost = max(best + math.log(ABOVE_BEST) + SIGMAS_BEST * _noise(logs), _mean(start, best))
        is_above = at_once or above_start or above_start_long
        reference = self.first[0] if at_once else start if is_above else best
        if not self._lasts(level, is_above or level > lost, reference) or self.is_reported:
            return None
        if at_once or above_start_long or (above_start and len(self.above) >= NUM_ABOVE_START):
            name, usual = "start", min(self.first[0], start)
        elif level > lost and len(self.above) == NUM_ABOVE_BEST and level >= self.above[0] + math.log(FALLS):
            name, usual = "best", best
        else:
            return None
        self.is_reported = True
        return Divergence(math.exp(min(level, MAX_LOG)), math.exp(usual), self.since, name)

    def _is_above_at_once(self, logs: list[float]) -> bool:
        """Returns whether the run is early, and above its first loss, or its first two."""
        if len(logs) > NUM_EARLY:
            return False
        size, noise = min(NUM_LEVEL, len(logs) - max(NUM_SOUND)), _noise(logs[max(NUM_SOUND) :])
        recent, norms = logs[-size:], list(self.norms)
        for number, low, factor in zip(NUM_SOUND, LOW, MEDIAN, strict=True):
            reference = max(logs[:number])
            rise, growth = median(recent) - reference, median(norms[-size:]) - max(norms[:number])
            has_grown = growth > max(math.log(NORM_FACTOR), NORM_SHARE * rise)
            lowest = _quantile(recent, MOST) if has_grown else sorted(recent)[1]
            sigmas = SIGMAS_WITH_NORM if has_grown else SIGMAS_ALONE * math.sqrt(NUM_LEVEL / size)  # of few losses
            if lowest > reference + math.log(low) and rise > math.log(factor) + sigmas * noise:
                return True
        return False

    def _is_above_start(self, logs: list[float], start: float) -> bool:
        """Returns whether most recent losses are above most of the first."""
        if len(logs) < NUM_FIRST + NUM_LEVEL:
            return False
        recent = logs[-NUM_LEVEL:]
        is_most = _quantile(recent, MOST) > _quantile(self.first, 1 - MOST) + math.log(MOST_ABOVE_START)
        return is_most and median(recent) > start + math.log(ABOVE_START)

    def _is_worse(self, logs: list[float], start: float) -> bool:
        """Returns whether the losses are above the start for long, and are not falling."""
        if len(logs) < NUM_FIRST + NUM_WORSE:
            return False
        recent, half = logs[-NUM_WORSE:], NUM_WORSE // 2
        is_most = _quantile(recent, MOST) > _quantile(self.first, 1 - MOST) + math.log(MOST_WORSE)
        stays = median(recent[half:]) > median(recent[:half]) + math.log(STAYS)
        return is_most and stays and median(recent) > start + math.log(WORSE) + _noise(logs)

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
            "norms": list(self.norms),
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
    """Returns the noise of a value, one standard deviation, without the largest tenth of the moves."""
    moves = sorted(abs(after - before) for before, after in pairwise(logs))
    kept = moves[: math.ceil(0.9 * len(moves))]
    return MEAN_TO_SIGMA * sum(kept) / len(kept)


def _quantile(values: Iterable[float], share: float) -> float:
    """Returns the value below which a share of the values is."""
    ranked = sorted(values)
    return ranked[round(share * (len(ranked) - 1))]
