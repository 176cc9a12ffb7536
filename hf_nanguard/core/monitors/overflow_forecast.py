"""Forecasts when the outputs of a module will exceed the limit of their dtype, from the bits (powers of two) that are left.

Growth that ends in an overflow is exponential or faster, so in bits it is a line or bends downwards. The line is fitted by
Theil-Sen (the median of all pairwise slopes), which one outlier does not move and which allows any spacing of samples.

Healthy runs must never cause a warning, so a forecast is reported only if all of this holds: there are `MIN_SAMPLES` samples;
few bits are left (`RESERVE` of the dtype's bits above 1: 3.2 of float16's 16; healthy runs keep more); at least two bits were
lost over the samples, clearly more than their scatter; if the loss slows down, what it is still going to take is more than
what is left, because growth that levels off is healthy; and the overflow is not much further ahead than the samples reach
back. A module that has less than one bit left twice in a row is also reported. While danger is possible but not certain,
checks are more frequent.

It cannot distinguish growth that will stop suddenly, for example with the warm-up of the learning rate, from growth that continues: if
that happens inside the reserve, it warns. It does not see overflows that take fewer steps than a few samples. At one bit per
eight steps or faster it mostly warns less than twenty steps ahead; an earlier warning would lie outside of the reserve.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from statistics import median

from ..event import JsonObject

MAD_TO_SIGMA = 1.4826
WINDOW = 16
RECENT = 5
MIN_SAMPLES = 4
RESERVE = 0.2
MIN_LOSS = 2.0  # bits over the window
MIN_SIGMAS = 4.0
MARGIN = 1.5  # if growth levels off, what it is still going to take must be this many times what is left
MAX_REACH = 2.0  # how far ahead a forecast may reach, in spans of the window
MIN_SPAN = 100  # steps that a full window reaches back, however frequent checks are
FEW_BITS = 1.0
CLOSE_STEPS = 10  # the longest period of checks while a module may be in danger
FAR = 3.0  # reserves beyond which no module may be in danger
CLOSE_CHECKS = 8  # how many checks to make before the bits are used up at the latest pace
RECOVERY = 2.0  # bits that a module must regain before it is reported again

Sample = tuple[int, float]


@dataclass(frozen=True)
class Forecast:
    """The expected overflow of a module."""

    module: str
    bits: float  # that are left now
    bits_per_100_steps: float  # negative while they shrink
    overflow_step: int | None  # when none will be left, `None` if few are left but they do not shrink
    num_modules: int = 1  # that are in danger; this is the worst

    @property
    def overflow(self) -> float:
        """The step of the overflow, inf if none is expected."""
        return math.inf if self.overflow_step is None else self.overflow_step


def fit_line(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Returns the slope of a robust line through samples, its height at the last one, and their scatter about it."""
    now = samples[-1][0]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(samples, 2) if b[0] > a[0]]
    slope = median(slopes) if slopes else 0.0
    levelled = [bits + slope * (now - step) for step, bits in samples]
    height = median(levelled)
    return slope, height, MAD_TO_SIGMA * median(abs(value - height) for value in levelled)


def extrapolate_loss(samples: Sequence[Sample]) -> float:
    """Returns how many more bits will be lost if the loss keeps slowing down as it did; inf if it does not slow down."""
    half = len(samples) // 2
    early, late = samples[: half + 1], samples[half:]
    before, after = fit_line(early)[0], fit_line(late)[0]
    if after >= 0 or before >= after:
        return 0.0 if after >= 0 else math.inf
    early_middle, late_middle = (part[0][0] + part[-1][0] for part in (early, late))
    decay = 2 * math.log(before / after) / (late_middle - early_middle)
    return -after * math.exp(-decay * (samples[-1][0] - late_middle / 2)) / decay


@dataclass
class Trend:
    """The recent headroom of one module."""

    reserve: float  # bits below which a forecast may be reported
    samples: list[Sample] = field(default_factory=list)
    reported: Forecast | None = None  # until the module recovers

    def add(self, step: int, bits: float) -> None:
        """Adds a sample. One that is not later than the last replaces later ones, as after a rewind."""
        while self.samples and self.samples[-1][0] >= step:
            self.samples.pop()
        if len(self.samples) == WINDOW:
            self._make_room(step)
        self.samples.append((step, bits))
        level = median(bits for _, bits in self.samples[-3:])
        if self.reported is not None and len(self.samples) >= 3 and level >= self.reported.bits + RECOVERY:
            self.reported = None

    def _make_room(self, step: int) -> None:
        """Removes the oldest sample, or one of the most crowded ones while all together span few steps."""
        place, samples = 0, self.samples
        if step - samples[0][0] < MIN_SPAN:
            place = min(range(1, WINDOW - RECENT), key=lambda at: samples[at + 1][0] - samples[at - 1][0])
        del samples[place]

    def steps_left(self) -> float:
        """Returns how long the bits last at the latest pace, however uncertain that is; inf if they do not shrink."""
        slope, height, _ = fit_line(self.samples[-RECENT:])
        return max(height, 0.0) / -slope if slope < 0 else math.inf

    def next_check(self, every_n_steps: int) -> int | None:
        """Returns a step before the next regular check at which another one could decide something."""
        step, bits = self.samples[-1]
        if self.reported is not None:
            return None
        if bits < FEW_BITS:
            return step + 1
        left = self.steps_left()
        if bits >= FAR * self.reserve or left >= 4 * max(every_n_steps, 25):
            return None
        return step + max(1, min(CLOSE_STEPS, every_n_steps // 5, int(left / CLOSE_CHECKS)))

    def forecast(self, module: str) -> Forecast | None:
        """Returns a forecast if it is bad and certain enough to be reported."""
        samples = self.samples
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
            and extrapolate_loss(samples) >= MARGIN * latest_height
            and self.steps_left() <= MAX_REACH * span
        )
        if not certain and not few:
            return None
        # The forecast is the mean of a fit to all samples, which scatter least, and to the later half, which show a bend.
        later, later_height, _ = fit_line(samples[-WINDOW // 2 :])
        pace, left = (slope + later) / 2, max((height + later_height) / 2, 0.0)
        overflow = step + math.ceil(left / -pace) if falls and pace < 0 else None
        return Forecast(module, left if certain else bits, 100 * pace, overflow)

    def report(self, forecast: Forecast) -> None:
        """Notes that the module was reported; it is not reported again before it recovers."""
        self.reported = forecast


class Headroom:
    """Follows the headroom of all monitored modules and reports each one in danger once."""

    def __init__(self) -> None:
        self.trends: dict[str, Trend] = {}

    def add(self, step: int, module: str, largest: float, limit: float) -> float:
        """Adds the largest magnitude of a module's outputs; returns the bits that are left below `limit`."""
        bits = math.log2(limit) - math.log2(largest)
        self.trends.setdefault(module, Trend(RESERVE * math.log2(limit))).add(step, bits)
        return bits

    def find_danger(self, modules: Sequence[str]) -> Forecast | None:
        """Returns the worst forecast of modules with a new sample, unless it or a worse one was reported before."""
        found = [forecast for name in modules if (forecast := self.trends[name].forecast(name)) is not None]
        new = [forecast for forecast in found if self.trends[forecast.module].reported is None]
        known = min((trend.reported.overflow for trend in self.trends.values() if trend.reported), default=None)
        for forecast in new:
            self.trends[forecast.module].report(forecast)
        worst = min(new, key=lambda forecast: (forecast.overflow, forecast.bits), default=None)
        if worst is None or (known is not None and worst.overflow >= known):
            return None
        return replace(worst, num_modules=len(found))

    def next_check(self, every_n_steps: int, modules: Sequence[str]) -> int | None:
        """Returns a step before the next regular check at which another one is needed, `None` if there is no need.

        `modules` are those with a new sample: the old sample of a module that overflowed, or that runs now and then, would
        ask for a check at every step."""
        steps = [self.trends[name].next_check(every_n_steps) for name in modules]
        return min((step for step in steps if step is not None), default=None)

    def state_dict(self) -> JsonObject:
        """Returns the trends of all modules, as JSON values."""
        return {name: asdict(trend) for name, trend in self.trends.items()}

    def load_state_dict(self, state: JsonObject) -> None:
        self.trends = {}
        for name, saved in state.items():
            samples = [(int(step), float(bits)) for step, bits in saved["samples"]]
            reported = None if saved["reported"] is None else Forecast(**saved["reported"])
            self.trends[name] = Trend(float(saved["reserve"]), samples, reported)
