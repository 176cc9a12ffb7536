"""Detects a loss that diverges in finite numbers: it stays above where the run began, or above its own best.

All is measured in logarithms and by quantiles, because a diverged loss is far noisier than a healthy one. There are four cases:

- At once: a learning rate that is far too high ruins the model with the first update or two, so that only one or two losses are
  those of the healthy model. Among the first `NUM_EARLY` losses nearly all must be above them, by a factor and by a multiple of
  the noise. A single loss may be low by chance. So the multiple is smaller only if the gradient norm has grown as well.
- Above the start: most recent losses are above most of the first `NUM_FIRST` for some time, and are not falling.
- Never better: the run has never been better than its start and is worse for a long time, by less, from early on: later a small rise comes
  with other data as well.
- Stays above the start: by less than that, later and without a norm that grows. Harder data raise a loss the same way, at once
  (another source) or little by little (sorted rows), so neither the rise nor its size tells the two apart. The norm does: on harder
  data that of a healthy model grows by about half as much as the loss, in logarithms. So the loss must be steady for long, and
  the norm must not have followed it; if the norm has vanished instead, as that of a saturated model does, not for so long.
- Above the best: new data (a curriculum, another task) and a learning rate that restarts raise a loss above its best as well, but
  then it falls again. So it must also have lost half of what was gained, and not be falling.

A loss with a memory (RL, a moving target, data in an order) also wanders away from where it was without being broken. So except at
once, the level must be further away than such a series gets by itself ([`Wander`]), unless the gradient norm has grown as much as
the loss: that of a diverging model does, nearly always.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ...own_fields import own_fields
from ..event import JsonObject
from .spike_detector import MAX_LOG, MEAN_TO_SIGMA

NUM_KEPT = 100
NUM_LEVEL, NUM_FIRST = 20, 10
MOST = 0.2  # quantile: four of five values are above the lower one, or below the upper one
NUM_EARLY, NUM_SOUND = 40, (1, 2)  # losses among which a run diverges at once, and its first losses that have not
LOW, MEDIAN = (1.5, 1.2), (2.0, 1.6)  # factors over these first losses, of the lowest recent losses and of their median
SIGMAS_ALONE, SIGMAS_WITH_NORM = 3.0, 1.0
NORM_FACTOR, NORM_SHARE = (
    6.0,
    0.8,
)  # growth of the norm; where squares are low by chance, their norm is by the root of that
ABOVE_START, MOST_ABOVE_START, NUM_ABOVE_START = (
    1.5,
    1.25,
    10,
)  # factors of medians and of quantiles, and steps it lasts
ABOVE_START_ALONE, STAYS_ABOVE = (
    2.0,
    0.9,
)  # the factor if the norm has not grown as well; what ten losses keep of the ten before
EARLY = 0.75  # of a rise: a loss that has risen less at first rises with its data
NEVER_BETTER, NUM_WORSE, WORSE, MOST_WORSE, STAYS = 0.9, 60, 1.25, 1.02, 0.93
FOLLOWS = 0.1  # of a rise of the loss: a norm that grows by less does not follow it
VANISHED = 0.5  # the factor of a norm that has
SETTLED = 0.25  # what a norm that is a reference may have fallen before
NUM_STAYS_VANISHED, NUM_STAYS = 50, 100
NUM_STAYS_LONG = 300  # if no norm is known, or the loss is worse by a little only
NUM_REFERENCE = 200
STEADY = 0.15  # of a rise: what a steady loss may move from one half of its steps to the other
ABOVE_BEST, NUM_ABOVE_BEST, SIGMAS_BEST = 2.5, 50, 2.5
FALLS = 0.8  # a level below that share of what it was NUM_ABOVE_BEST steps before is falling
WITH_NORM = 2.0  # growth of the norm, at least, that tells a divergence from a loss that wanders
NUM_BLOCKS, SIGMAS_WANDER = 16, 4.0
FAR_ABOVE_START, FAR_ABOVE_BEST = 6.0, 4.0  # factors by which no healthy loss is too high for long
MEDIAN_TO_SIGMA = 1.483
MIN_LOSS, MIN_NORM = 1e-30, 1e-12


@dataclass(frozen=True)
class Divergence:
    """A level of the loss that stays too high."""

    value: float
    usual: float  # the level that it is compared with
    since: int  # the first step above
    reference: str  # "start" or "best"


class Wander:
    """How far a series gets by itself: that of a random walk with noise on top, whose steps are estimated from all of it.

    The series is kept as at most `NUM_BLOCKS` means of blocks, which become longer with it. Noise averages out in a block and a
    walk does not, which tells the two apart. A steady rise or fall does not count, nor do a few jumps.
    """

    def __init__(self) -> None:
        self.size = 2
        self.means: list[float] = []
        self.open: list[float] = []

    @property
    def num_seen(self) -> int:
        """The number of values so far."""
        return len(self.means) * self.size + len(self.open)

    def value_at(self, index: int) -> float:
        """Returns the mean of the block with the value of that index."""
        return [*self.means, sum(self.open) / max(len(self.open), 1)][index // self.size]

    def add(self, value: float) -> None:
        self.open.append(value)
        if len(self.open) == self.size:
            self.means.append(sum(self.open) / self.size)
            self.open.clear()
        if len(self.means) == NUM_BLOCKS:
            self.means = [(one + other) / 2 for one, other in zip(self.means[::2], self.means[1::2], strict=True)]
            self.size *= 2

    def distance(self, span: int, recent: list[float]) -> float:
        """Returns how far it gets in `span` values, one standard deviation; the noise is taken from recent values.

        For a walk with steps of variance s and noise of variance n, the second differences of values have 2 s + 6 n, those of
        means of k values (k + 1/k) s + 6 n / k.
        """
        upper = 1 + 2 / math.sqrt(max(len(self.means), 1))  # because few means say little
        excess = upper * _bend(self.means) - _bend(recent) / self.size
        return math.sqrt(max(excess, 0.0) / (self.size - 1 / self.size) * max(span, 0))


class DivergenceDetector:
    """Follows the level of a loss and reports that it diverges, once until it has recovered."""

    def __init__(self) -> None:
        self.floor = MIN_LOSS
        self.logs: deque[float] = deque(maxlen=NUM_KEPT)
        self.norms: deque[float] = deque(maxlen=NUM_STAYS_LONG)
        self.steps: deque[int] = deque(maxlen=NUM_KEPT)
        self.wander = Wander()
        self.first: list[float] = []
        self.first_norms: list[float] = []
        self.early: float | None = None  # the level soon after the start; a later rise may come with other data
        self.best: float | None = None
        self.best_norm = 0.0  # the level of the norm at that time
        self.best_at = 0  # number of losses until then
        self.above: deque[float] = deque(maxlen=NUM_ABOVE_BEST)  # the levels since it is too high
        self.since = 0
        self.sound_logs: deque[float] = deque(maxlen=NUM_REFERENCE)  # the last ones near the start
        self.sound_norms: deque[float] = deque(maxlen=NUM_REFERENCE)
        self.num_raised, self.raised_since = 0, 0  # losses that are not near the start any more
        self.raised_move = 0.0  # what a loss moved by itself in a step before
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
        self.early = None if self.early is None else max(self.early, low)
        self.sound_logs = deque((max(value, low) for value in self.sound_logs), maxlen=NUM_REFERENCE)

    def add(self, step: int, loss: float, norm: float = 1.0) -> Divergence | None:
        """Adds a finite loss, and the gradient norm of its step, and returns that it diverges, if that is new."""
        self.logs.append(math.log(max(loss, self.floor)))
        self.norms.append(math.log(max(norm, MIN_NORM)))
        self.steps.append(step)
        self.wander.add(self.logs[-1])
        if len(self.first) < NUM_FIRST:
            self.first.append(self.logs[-1])
            self.first_norms.append(self.norms[-1])
        if len(self.logs) <= NUM_FIRST:
            return None
        logs = list(self.logs)
        level, start = median(logs[-NUM_LEVEL:]), median(self.first)
        norm_level, num_seen = median(list(self.norms)[-NUM_LEVEL:]), self.wander.num_seen
        if self.best is None or level <= self.best:
            self.best, self.best_norm, self.best_at = level, norm_level, num_seen
        best = self.best
        num_early = NUM_EARLY + NUM_LEVEL
        if self.early is None and num_seen >= num_early:  # more only after a checkpoint of an earlier version
            value = level if num_seen == num_early else self.wander.value_at(NUM_EARLY + NUM_LEVEL // 2)
            self.early = max(value, math.log(self.floor))
        sound_norm = min(median(self.first_norms), max(self.first_norms[: max(NUM_SOUND)]))
        has_grown = _has_grown(norm_level - sound_norm, level - start)
        from_start = 0.0 if has_grown else self._usual_distance(logs, num_seen, FAR_ABOVE_START)
        from_best = self._usual_distance(logs, num_seen - self.best_at + NUM_LEVEL, FAR_ABOVE_BEST)
        from_best = 0.0 if _has_grown(norm_level - self.best_norm, level - best) else from_best
        at_once = self._is_above_at_once(logs)
        is_far = level > start + from_start
        above_start = is_far and self._is_above_start(logs, start, ABOVE_START if has_grown else ABOVE_START_ALONE)
        is_worse = is_far and best > start + math.log(NEVER_BETTER) and self._is_worse(logs, start)
        above_start_long = is_worse and (
            has_grown or (self.early is not None and self.early - start > EARLY * (median(logs[-NUM_WORSE:]) - start))
        )
        self._note_raised(level, start)
        from_before = SIGMAS_WANDER * self.raised_move * math.sqrt(num_seen)  # without the rise itself
        stays_above = level > start + min(from_start, from_before) and self._stays_above(logs, start, best)
        lost = max(best + max(math.log(ABOVE_BEST) + SIGMAS_BEST * _noise(logs), from_best), _mean(start, best))
        is_still = self.is_reported and self.num_raised > 0
        is_above = at_once or above_start or above_start_long or stays_above or is_still
        reference = self.first[0] if at_once else start if is_above else best
        if not self._lasts(level, is_above or level > lost, reference) or self.is_reported:
            return None
        is_far_above = level > start + math.log(FAR_ABOVE_START)
        is_certain = has_grown or is_far_above
        must_last = NUM_ABOVE_START if is_certain else NUM_ABOVE_BEST
        falls = not is_far_above and median(logs[-NUM_FIRST:]) < median(logs[-2 * NUM_FIRST : -NUM_FIRST]) + math.log(
            STAYS_ABOVE
        )
        if at_once or above_start_long or (above_start and len(self.above) >= must_last and not falls):
            name, usual = "start", min(self.first[0], start)
        elif stays_above:
            name, usual, self.since = "start", start, self.raised_since
        elif level > lost and len(self.above) == NUM_ABOVE_BEST and level >= self.above[0] + math.log(FALLS):
            name, usual = "best", best
        else:
            return None
        self.is_reported = True
        return Divergence(math.exp(min(level, MAX_LOG)), math.exp(usual), self.since, name)

    def _usual_distance(self, logs: list[float], span: int, most: float) -> float:
        """Returns how far a healthy loss gets by itself, at most by a factor."""
        return min(SIGMAS_WANDER * self.wander.distance(span, logs), math.log(most))

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
            if not has_grown and median(logs[number : number + NUM_FIRST]) < reference + rise / 2:
                continue  # it has risen little by little
            lowest = _quantile(recent, MOST) if has_grown else sorted(recent)[1]
            sigmas = SIGMAS_WITH_NORM if has_grown else SIGMAS_ALONE * math.sqrt(NUM_LEVEL / size)  # of few losses
            if lowest > reference + math.log(low) and rise > math.log(factor) + sigmas * noise:
                return True
        return False

    def _is_above_start(self, logs: list[float], start: float, factor: float) -> bool:
        """Returns whether most recent losses are above most of the first, and their median by a factor."""
        if len(logs) < NUM_FIRST + NUM_LEVEL:
            return False
        recent = logs[-NUM_LEVEL:]
        is_most = _quantile(recent, MOST) > _quantile(self.first, 1 - MOST) + math.log(MOST_ABOVE_START)
        return is_most and median(recent) > start + math.log(factor)

    def _is_worse(self, logs: list[float], start: float) -> bool:
        """Returns whether the losses are above the start for long, and are not falling."""
        if len(logs) < NUM_FIRST + NUM_WORSE:
            return False
        recent, half = logs[-NUM_WORSE:], NUM_WORSE // 2
        is_most = _quantile(recent, MOST) > _quantile(self.first, 1 - MOST) + math.log(MOST_WORSE)
        stays = median(recent[half:]) > median(recent[:half]) + math.log(STAYS)
        return is_most and stays and median(recent) > start + math.log(WORSE) + _noise(logs)

    def _note_raised(self, level: float, start: float) -> None:
        """Notes for how long the level is not near the start, and the losses and norms of before."""
        if level > start + math.log(WORSE) / 2:
            if not self.num_raised:
                self.raised_since = self._find_first(level, start)
                self.raised_move = self.wander.distance(1, list(self.logs))
            self.num_raised += 1
            return
        self.num_raised = 0
        if len(self.logs) >= NUM_LEVEL:  # the level lags, so that newer ones may not be near the start any more
            self.sound_logs.append(self.logs[-NUM_LEVEL])
            self.sound_norms.append(self.norms[-NUM_LEVEL])

    def _stays_above(self, logs: list[float], start: float, best: float) -> bool:
        """Returns whether the losses are steadily above the start, for so long and with such a norm that it is not the data."""
        if self.num_raised < NUM_STAYS_VANISHED or len(self.sound_norms) < NUM_LEVEL:
            return False
        kept = logs[-self.num_raised :]
        half, norms, sound = len(kept) // 2, list(self.norms)[-self.num_raised + NUM_LEVEL :], list(self.sound_norms)
        usual = max(_middle(self.sound_logs), start + math.log(NEVER_BETTER))
        rise = _middle(kept) - usual
        if abs(_middle(kept[half:]) - _middle(kept[:half])) > STEADY * rise:
            return False
        is_high, is_long = rise > math.log(ABOVE_START), self.num_raised >= NUM_STAYS_LONG
        if min(norms) == max(norms):  # it is not known
            return is_high and is_long
        half = len(sound) // 2
        growth = _middle(norms) - _middle(sound)
        if growth > FOLLOWS * rise or _middle(sound[:half]) - _middle(sound[half:]) > SETTLED:
            return False
        must_stay = NUM_STAYS_VANISHED if growth < math.log(VANISHED) else NUM_STAYS
        is_worse = best > start + math.log(NEVER_BETTER) and rise > math.log(WORSE) + _noise(logs)
        return (is_high and self.num_raised >= must_stay) or (is_worse and is_long)

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
        return {
            **own_fields(self),
            "logs": list(self.logs),
            "norms": list(self.norms),
            "steps": list(self.steps),
            "first": list(self.first),
            "first_norms": list(self.first_norms),
            "wander": {"size": self.wander.size, "means": list(self.wander.means), "open": list(self.wander.open)},
            "above": list(self.above),
            "sound_logs": list(self.sound_logs),
            "sound_norms": list(self.sound_norms),
        }

    def load_state_dict(self, state: JsonObject) -> None:
        for name, value in own_fields(self).items():
            if (saved := state.get(name, value)) is value:  # a checkpoint of an earlier version
                continue
            if isinstance(value, Wander):
                value.size, value.means, value.open = saved["size"], list(saved["means"]), list(saved["open"])
                continue
            setattr(self, name, deque(saved, maxlen=value.maxlen) if isinstance(value, deque) else saved)


def _has_grown(growth: float, rise: float) -> bool:
    """Returns whether a gradient norm has grown with the loss, as it does if a model diverges."""
    return growth > max(math.log(WITH_NORM), NORM_SHARE * rise)


def _mean(first: float, second: float) -> float:
    """Returns the logarithm of the mean of two values that are given as logarithms."""
    high, low = max(first, second), min(first, second)
    return high + math.log((1 + math.exp(low - high)) / 2)


def _noise(logs: Iterable[float]) -> float:
    """Returns the noise of a value, one standard deviation, without the largest tenth of the moves."""
    moves = sorted(abs(after - before) for before, after in pairwise(logs))
    kept = moves[: math.ceil(0.9 * len(moves))]
    return MEAN_TO_SIGMA * sum(kept) / len(kept)


def _bend(values: list[float]) -> float:
    """Returns the variance of second differences, in which a steady rise or fall cancels, robustly."""
    bends = [abs(one - 2 * two + three) for one, two, three in zip(values, values[1:], values[2:], strict=False)]
    return (MEDIAN_TO_SIGMA * median(bends)) ** 2 if bends else 0.0


def _middle(values: Iterable[float]) -> float:
    """Returns the mean of the middle half of values."""
    ranked = sorted(values)
    kept = ranked[len(ranked) // 4 : len(ranked) - len(ranked) // 4]
    return sum(kept) / len(kept)


def _quantile(values: Iterable[float], share: float) -> float:
    """Returns the value below which a share of the values is."""
    ranked = sorted(values)
    return ranked[round(share * (len(ranked) - 1))]
