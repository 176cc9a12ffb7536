"""The forecast hears of overflows that come, and of nothing else.

Measured over 120 series of each kind (sampled every 10 and every 50 steps, scatter up to a quarter of a bit): announced at
least 20 steps ahead: steady growth 95 and 100 %, accelerating 93 and 97 %, setting in half way 90 and 80 %, growth by the
same amount each step 98 and 99 %. Announced although healthy, with 4 to 6 bits left in the end: none of 120 of each of the
seven kinds. With 2 to 4 bits left, that is inside the reserve: up to 2 % of those that are level or level off smoothly, up to
8 % of those that overshoot, and about half of those whose steady fall ends all of a sudden, which no forecast can know.
"""

import json
import math
import random

import pytest

from hf_nanguard.core.monitors.overflow_forecast import (
    FEW_BITS,
    MIN_SPAN,
    RECENT,
    RECOVERY,
    WINDOW,
    Headroom,
    Trend,
    fit_line,
    foresee_loss,
)

LIMIT = 65504.0
TOTAL = 1000


def _largest(bits, limit=LIMIT):
    return limit * 2.0**-bits


def _follow(series, period, steps=TOTAL):
    """Returns the step of the first announcement and that of the overflow, `None` for what did not come."""
    headroom, closer, told = Headroom(), None, None
    for step in range(steps):
        bits = series(step)
        if bits <= 0:
            return told, step
        if (step + 1) % period == 0 or step == 0 or (closer is not None and step >= closer):
            headroom.add(step, "block", _largest(bits), LIMIT)
            if headroom.find_danger(["block"]) is not None and told is None:
                told = step
            closer = headroom.next_check(period, ["block"])
    return told, None


def _sick(kind, rng, period):
    """Bits that are used up at a random step."""
    end, start, scatter = rng.uniform(3 * period, 900), rng.uniform(4, 10), rng.uniform(0, 0.25)
    curves = {
        "steady": lambda step: start * (1 - step / end),
        "accelerating": lambda step: start * (1 - (step / end) ** 2),
        "late": lambda step: start * min(1, 2 * (1 - step / end)),
        "by the same amount": lambda step: -math.log2(2**-start + (1 - 2**-start) * step / end),
    }
    return lambda step: bits + rng.gauss(0, scatter) if (bits := curves[kind](step)) > 0 else bits


def _healthy(kind, rng, lowest, highest):
    """Bits that settle between `lowest` and `highest`, with scatter and a spike now and then."""
    level, start, pace = rng.uniform(lowest, highest), rng.uniform(8, 14), rng.uniform(20, 300)
    warm_up, swing, scatter = rng.uniform(20, 400), rng.uniform(0.2, 0.8), rng.uniform(0, 0.3)
    walk = [level + 1]
    for _ in range(TOTAL):
        walk.append(min(max(walk[-1] + rng.gauss(0, 0.03), level - 0.5), level + 6))
    curves = {
        "level": lambda step: level,
        "levelling off": lambda step: level + (start - level) * math.exp(-step / pace),
        "warm-up": lambda step: level + (start - level) * max(0, 1 - step / warm_up),
        "decay": lambda step: level + 0.5 * math.sin(math.pi * step / TOTAL),
        "wave": lambda step: level + swing * math.sin(2 * math.pi * step / (5 * pace)),
        "overshoot": lambda step: (
            level + (start - level) * math.exp(-step / pace) - swing * math.exp(-((step / pace - 3) ** 2))
        ),
        "random walk": lambda step: walk[step],
    }

    def bits(step):
        spike = rng.uniform(1, 4) if rng.random() < 0.003 else 0
        return max(0.01, curves[kind](step) + rng.gauss(0, scatter) - spike)

    return bits


@pytest.mark.parametrize("period", [10, 50])
@pytest.mark.parametrize("kind", ["steady", "accelerating", "late", "by the same amount"])
def test_four_of_five_overflows_are_announced_twenty_steps_ahead(kind, period):
    rng = random.Random(f"{kind}{period}")
    runs = [_follow(_sick(kind, rng, period), period) for _ in range(100)]
    ahead = [end - told if told is not None else -1 for told, end in runs if end is not None]
    assert len(ahead) >= 90
    assert sum(steps >= 20 for steps in ahead) >= 0.8 * len(ahead)


@pytest.mark.parametrize("period", [10, 50])
@pytest.mark.parametrize("kind", ["level", "levelling off", "warm-up", "decay", "wave", "overshoot", "random walk"])
def test_no_healthy_run_is_announced(kind, period):
    rng = random.Random(f"{kind}{period}")
    assert [_follow(_healthy(kind, rng, 4, 6), period) for _ in range(60)] == [(None, None)] * 60


@pytest.mark.parametrize("kind", ["level", "levelling off", "decay", "wave", "random walk"])
def test_hardly_any_that_settles_inside_the_reserve_is_announced(kind):
    rng = random.Random(kind)
    runs = [_follow(_healthy(kind, rng, 2, 4), 50) for _ in range(60)]
    assert sum(told is not None for told, _ in runs) <= 3


@pytest.mark.parametrize("bits_per_step", [0.004, 0.02, 0.1])
def test_the_step_of_the_overflow_is_foretold(bits_per_step):
    """The fewer bits a step, the further ahead; the error stays below a tenth of that, with scatter."""
    rng = random.Random(3)
    end = 8 / bits_per_step
    headroom, period = Headroom(), max(1, round(end / 40))
    for step in range(0, int(end), period):
        bits = 8 - bits_per_step * step
        headroom.add(step, "block", _largest(bits + rng.gauss(0, 0.02)), LIMIT)
        forecast = headroom.find_danger(["block"])
        if forecast is not None:
            break
    assert forecast is not None
    assert abs(forecast.overflow_step - end) <= 0.1 * (end - step)
    assert forecast.bits == pytest.approx(8 - bits_per_step * step, abs=0.1)
    assert forecast.bits_per_100_steps == pytest.approx(-100 * bits_per_step, rel=0.1)


def test_the_line_is_exact_at_any_spacing_and_ignores_an_odd_sample():
    samples = [(step, 9 - 0.05 * step) for step in (0, 3, 4, 10, 31, 32, 50)]
    assert fit_line(samples) == pytest.approx((-0.05, 6.5, 0.0))
    samples[3] = (10, 0.1)
    assert fit_line(samples) == pytest.approx((-0.05, 6.5, 0.0))


def test_a_loss_that_slows_down_has_an_end():
    samples = [(step, 3 + 4 * math.exp(-step / 40)) for step in range(0, 161, 10)]
    assert foresee_loss(samples) == pytest.approx(samples[-1][1] - 3, rel=0.25)
    assert foresee_loss([(step, 9 - 0.1 * step) for step in range(0, 80, 8)]) > 1e3
    assert foresee_loss([(step, 9 - 0.001 * step**2) for step in range(0, 80, 8)]) == math.inf
    assert foresee_loss([(step, 3.0) for step in range(8)]) == 0.0


def _feed(headroom, *rows, start=0):
    """Adds rows of bits, a module each, ten steps apart; returns the announcements by step."""
    told = {}
    for step, bits in enumerate(zip(*rows, strict=True), start):
        names = [f"block.{index}" for index in range(len(bits))]
        for name, value in zip(names, bits, strict=True):
            headroom.add(10 * step, name, _largest(value), LIMIT)
        forecast = headroom.find_danger(names)
        if forecast is not None:
            told[10 * step] = forecast
    return told


FALL = [6.0, 5.5, 5.0, 4.5, 4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.2]


def test_it_speaks_once_and_again_only_after_a_recovery():
    headroom = Headroom()
    [(step, forecast)] = _feed(headroom, FALL).items()
    assert (forecast.module, forecast.num_modules) == ("block.0", 1)
    assert step == 70  # the second sample in a row inside the reserve
    assert forecast.overflow_step == 120
    level = forecast.bits
    nearly = [level + RECOVERY - 0.1] * 5
    assert _feed(headroom, [*nearly, *FALL[5:]], start=11) == {}
    recovered = [level + RECOVERY + 0.1] * 20
    assert len(_feed(headroom, [*recovered, *FALL[3:]], start=30)) == 1


def test_of_several_in_danger_at_once_the_worst_is_named():
    slower = [6.0 - 0.45 * index for index in range(11)]
    [forecast] = _feed(Headroom(), slower, FALL, [9.0] * 11).values()
    assert forecast.module == "block.1"
    assert forecast.overflow_step < 130


def test_a_module_speaks_while_another_stands_only_if_it_is_worse():
    later = [bits + 1 for bits in FALL]
    assert [forecast.module for forecast in _feed(Headroom(), FALL, later).values()] == ["block.0"]
    sooner = [9.0] * 6 + [7.0, 5.0, 3.0, 1.0, 0.2]
    slow = [6.0 - 0.3 * index for index in range(11)]
    modules = [forecast.module for forecast in _feed(Headroom(), slow, sooner).values()]
    assert modules[-1] == "block.1"


def test_few_bits_are_told_if_they_are_few_twice():
    few = FEW_BITS - 0.2
    assert _feed(Headroom(), [5.0, 5.0, few, 5.0, few, 5.0, 5.0]) == {}
    [(step, forecast)] = _feed(Headroom(), [few, few, few]).items()
    assert (step, forecast.overflow_step) == (10, None)
    assert forecast.bits == pytest.approx(few)


def test_what_may_be_danger_is_looked_at_more_often():
    headroom = Headroom()
    _feed(headroom, [9.0, 9.0, 9.0])
    assert headroom.next_check(50, ["block.0"]) is None
    _feed(headroom, [6.0, 5.0, 4.5], start=3)
    assert 50 < headroom.next_check(50, ["block.0"]) < 50 + 10  # at this pace the bits last for less than 50 steps
    slow = Headroom()
    _feed(slow, [6.0, 5.7, 5.4])
    assert slow.next_check(50, ["block.0"]) == 20 + 10
    headroom.add(60, "block.0", _largest(FEW_BITS / 2), LIMIT)
    assert headroom.next_check(50, ["block.0"]) == 61
    told = Headroom()
    assert _feed(told, FALL)
    assert told.next_check(50, ["block.0"]) is None  # it has been told: nothing is left to decide


def test_wide_dtypes_have_a_reserve_of_their_own():
    limit = 3.4e38
    headroom, told = Headroom(), []
    for step in range(0, 64):
        assert headroom.add(step, "block", 2.0 ** (2 * step), limit) == pytest.approx(128 - 2 * step, abs=0.01)
        told += [(step, forecast) for forecast in [headroom.find_danger(["block"])] if forecast is not None]
    [(step, forecast)] = told
    assert 50 <= step <= 54
    assert abs(forecast.overflow_step - 64) <= 1


def test_a_rewind_takes_back_what_came_after():
    trend = Trend(3.2)
    for step in (0, 10, 20, 30):
        trend.add(step, 9 - step / 10)
    trend.add(20, 8.0)
    assert list(trend.samples) == [(0, 9.0), (10, 8.0), (20, 8.0)]


@pytest.mark.parametrize("cut", [3, 6, 8, 9])
def test_the_state_survives_a_checkpoint(cut):
    whole = Headroom()
    expected = _feed(whole, FALL)
    first = Headroom()
    told = _feed(first, FALL[:cut])
    second = Headroom()
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert told | _feed(second, FALL[cut:], start=cut) == expected
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(("period", "steps_per_bit"), [(1, 12), (1, 20), (1, 35), (5, 12), (10, 12), (50, 20)])
def test_growth_is_announced_in_time_however_often_one_looks(period, steps_per_bit):
    """A window of the last few steps alone would never see two bits go."""
    rng = random.Random(period * steps_per_bit)
    ahead = []
    for _ in range(20):
        start, onset, scatter = rng.uniform(6, 13), rng.uniform(0, 200), rng.uniform(0, 0.2)

        def series(step, start=start, onset=onset, scatter=scatter):
            bits = start - max(0.0, step - onset) / steps_per_bit
            return bits + rng.gauss(0, scatter) if bits > 0 else bits

        told, end = _follow(series, period)
        ahead.append(end - told if told is not None else -1)
    assert sum(steps >= 20 for steps in ahead) >= 0.8 * len(ahead)


def test_a_window_of_every_step_reaches_back():
    trend = Trend(3.2)
    for step in range(400):
        trend.add(step, 9.0)
        assert len(trend.samples) <= WINDOW
    steps = [step for step, _ in trend.samples]
    assert steps == sorted(steps)
    assert MIN_SPAN * 0.8 <= steps[-1] - steps[0] <= MIN_SPAN
    assert steps[-RECENT:] == [395, 396, 397, 398, 399]
