"""How many powers of two a module's outputs are away from the limit of their dtype, and when they will have used them up.

Growth that ends in an overflow is exponential or faster, so in bits it is a line or bends downwards. The line is fitted by
Theil and Sen (the median of all pairwise slopes), which one odd sample does not move, and samples may be spaced in any way.

A healthy run must never be called sick, so a forecast is told only if all of this holds: at least `MIN_SAMPLES` samples;
little is left (`RESERVE` of the dtype's powers of two above 1: 3.2 bits of float16's 16, where healthy runs keep more);
at least two bits were lost over the samples and clearly more than they scatter; if the loss slows down, what it has still
to take is more than what is left, for growth that levels off is healthy; and the overflow is not much further ahead than
the samples reach back. Besides, a module is told that has less than a bit left twice in a row. What looks like danger
but is not certain yet is looked at more often.

It cannot tell growth that will stop all of a sudden, with the learning rate's warm-up say, from growth that goes on: if that
happens inside the reserve, it warns. Nor does it see an overflow come that takes fewer steps than a few samples; and at a bit
in eight steps or faster it mostly speaks less than twenty steps ahead, for to speak earlier it would have to speak outside of
the reserve.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from ..robust_window import MAD_TO_SIGMA

WINDOW = 16
RECENT = 5
MIN_SAMPLES = 4
RESERVE = 0.2
MIN_LOSS = 2.0  # bits over the window
MIN_SIGMAS = 4.0
MARGIN = 1.5  # how often what is left must go into what growth that levels off has still to take
MAX_REACH = 2.0  # how far ahead a forecast may look, in spans of the window
MIN_SPAN = 100  # steps that a full window reaches back, however often there is a look
FEW_BITS = 1.0
CLOSE_STEPS = 10  # how often to look at a module that may be in danger, at least
FAR = 3.0  # reserves beyond which no module may be in danger
CLOSE_LOOKS = 8  # how often to look before the bits are gone at the latest pace
RECOVERY = 2.0  # bits that a module must regain before it is spoken of again

Sample = tuple[int, float]


@dataclass(frozen=True)
class Forecast:
    """What is going to happen to a module.

    Args:
        module (`str`):
            Its name.
        bits (`float`):
            What is left now.
        bits_per_100_steps (`float`):
            How fast that changes; negative while it shrinks.
        overflow_step (`int`, *optional*):
            When nothing will be left; `None` if little is left but it does not shrink.
        num_modules (`int`, *optional*, defaults to `1`):
            How many modules are in danger; this is the worst.
    """

    module: str
    bits: float
    bits_per_100_steps: float
    overflow_step: int | None
    num_modules: int = 1


def fit_line(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Returns the slope of a robust line through samples, its height at the last one, and their scatter about it."""
    now = samples[-1][0]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(samples, 2) if b[0] > a[0]]
    slope = median(slopes) if slopes else 0.0
    levelled = [bits + slope * (now - step) for step, bits in samples]
    height = median(levelled)
    return slope, height, MAD_TO_SIGMA * median(abs(value - height) for value in levelled)


def foresee_loss(samples: Sequence[Sample]) -> float:
    """Returns how many bits will go in all if the loss goes on slowing down as it did; inf if it does not slow down."""
    half = len(samples) // 2
    early, late = samples[: half + 1], samples[half:]
    before, after = fit_line(early)[0], fit_line(late)[0]
    if after >= 0 or before >= after:
        return 0.0 if after >= 0 else math.inf
    early_middle, late_middle = (part[0][0] + part[-1][0] for part in (early, late))
    decay = 2 * math.log(before / after) / (late_middle - early_middle)
    return -after * math.exp(-decay * (samples[-1][0] - late_middle / 2)) / decay


class Trend:
    """The recent headroom of one module.

    Args:
        reserve (`float`):
            Bits below which a forecast may be told.
    """

    def __init__(self, reserve: float):
        self.reserve = reserve
        self.samples: deque[Sample] = deque()
        self.told_at: float | None = None  # the bits that were left when it was spoken of
        self.told_step: float = math.inf  # the overflow that was foretold

    def add(self, step: int, bits: float) -> None:
        """Takes a sample in; one that is not later than the last replaces what it overtakes, as after a rewind."""
        while self.samples and self.samples[-1][0] >= step:
            self.samples.pop()
        if len(self.samples) == WINDOW:
            self._make_room(step)
        self.samples.append((step, bits))
        level = median(bits for _, bits in list(self.samples)[-3:])
        if self.told_at is not None and len(self.samples) >= 3 and level >= self.told_at + RECOVERY:
            self.told_at, self.told_step = None, math.inf

    def _make_room(self, step: int) -> None:
        """Lets the oldest sample go, or one in a crowd while all of them together reach back a few steps only."""
        place, samples = 0, list(self.samples)
        if step - samples[0][0] < MIN_SPAN:
            place = min(range(1, WINDOW - RECENT), key=lambda at: samples[at + 1][0] - samples[at - 1][0])
        del self.samples[place]

    def steps_left(self) -> float:
        """Returns how long the bits last at the latest pace, however uncertain that is; inf if they do not shrink."""
        slope, height, _ = fit_line(list(self.samples)[-RECENT:])
        return max(height, 0.0) / -slope if slope < 0 else math.inf

    def next_look(self, every_n_steps: int) -> int | None:
        """Returns a step before the next regular one at which to look again, if that could decide something."""
        step, bits = self.samples[-1]
        if self.told_at is not None:
            return None
        if bits < FEW_BITS:
            return step + 1
        left = self.steps_left()
        if bits >= FAR * self.reserve or left >= 4 * max(every_n_steps, 25):
            return None
        return step + max(1, min(CLOSE_STEPS, every_n_steps // 5, int(left / CLOSE_LOOKS)))

    def forecast(self, module: str) -> Forecast | None:
        """Returns what is going to happen, if that is bad and certain enough to be told."""
        samples = list(self.samples)
        step, bits = samples[-1]
        confirmed = max(bits for _, bits in samples[-2:])  # one sample may be a spike
        few = len(samples) >= 2 and confirmed < FEW_BITS
        if not few and (len(samples) < MIN_SAMPLES or confirmed > self.reserve):
            return None
        slope, height, scatter = fit_line(samples)
        latest, latest_height, _ = fit_line(samples[-RECENT:])
        span = step - samples[0][0]
        falls = slope < 0 and latest < 0 and len(samples) >= MIN_SAMPLES
        certain = (
            falls
            and max(height, latest_height) <= self.reserve
            and -slope * span >= max(MIN_LOSS, MIN_SIGMAS * scatter)
            and foresee_loss(samples) >= MARGIN * latest_height
            and self.steps_left() <= MAX_REACH * span
        )
        if not certain and not few:
            return None
        # What is told is the middle between all samples, which scatter least, and the later ones, which know of a bend.
        later, later_height, _ = fit_line(samples[-WINDOW // 2 :])
        pace, left = (slope + later) / 2, max((height + later_height) / 2, 0.0)
        overflow = step + math.ceil(left / -pace) if falls and pace < 0 else None
        return Forecast(module, left if certain else bits, 100 * pace, overflow)


class Headroom:
    """Follows the headroom of all watched modules and speaks once of each that is in danger."""

    def __init__(self) -> None:
        self.trends: dict[str, Trend] = {}

    def add(self, step: int, module: str, largest: float, limit: float) -> float:
        """Takes in the largest magnitude of a module's outputs; returns the bits that are left below `limit`."""
        bits = math.log2(limit) - math.log2(largest)
        self.trends.setdefault(module, Trend(RESERVE * math.log2(limit))).add(step, bits)
        return bits

    def find_danger(self, modules: Sequence[str]) -> Forecast | None:
        """Returns the worst forecast among modules that have a new sample, unless it or a worse one was told before."""
        found = [forecast for name in modules if (forecast := self.trends[name].forecast(name)) is not None]
        fresh = [forecast for forecast in found if self.trends[forecast.module].told_at is None]
        standing = min((trend.told_step for trend in self.trends.values() if trend.told_at is not None), default=None)
        for forecast in fresh:
            trend = self.trends[forecast.module]
            trend.told_at, trend.told_step = forecast.bits, _overflow(forecast)
        worst = min(fresh, key=lambda forecast: (_overflow(forecast), forecast.bits), default=None)
        if worst is None or (standing is not None and _overflow(worst) >= standing):
            return None
        return Forecast(worst.module, worst.bits, worst.bits_per_100_steps, worst.overflow_step, len(found))

    def next_look(self, every_n_steps: int, modules: Sequence[str] | None = None) -> int | None:
        """Returns a step before the next regular one at which to look again, `None` if there is no need to.

        Modules are those that have a new sample, all by default: an old one, of a module that overflowed or runs now and
        then, would ask for a look at every step."""
        trends = self.trends if modules is None else modules
        looks = [self.trends[name].next_look(every_n_steps) for name in trends]
        return min((look for look in looks if look is not None), default=None)

    def state_dict(self) -> dict[str, Any]:
        """Returns what survives a checkpoint, as JSON values."""
        return {
            name: {
                "reserve": trend.reserve,
                "samples": [list(sample) for sample in trend.samples],
                "told_at": trend.told_at,
                "told_step": trend.told_step if math.isfinite(trend.told_step) else None,
            }
            for name, trend in self.trends.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what [`Headroom.state_dict`] returned."""
        self.trends = {}
        for name, saved in state.items():
            trend = self.trends[name] = Trend(float(saved["reserve"]))
            trend.samples.extend((int(step), float(bits)) for step, bits in saved["samples"])
            trend.told_at = saved["told_at"]
            trend.told_step = math.inf if saved["told_step"] is None else float(saved["told_step"])


def _overflow(forecast: Forecast) -> float:
    return math.inf if forecast.overflow_step is None else forecast.overflow_step
