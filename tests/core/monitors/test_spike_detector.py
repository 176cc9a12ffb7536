"""The spike detector: never poisoned, sees planted spikes once each, silent on noise."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_nanguard.core.monitors.spike_detector import SpikeDetector
from hf_nanguard.testing import INF, NAN


def window_of(values, **settings_):
    window = SpikeDetector(**settings_)
    for step, value in enumerate(values):
        window.add(step, value)
    return window


def noise(seed, sigma=0.2, count=100, scale=1.0):
    rng = random.Random(seed)
    return [scale * math.exp(rng.gauss(0, sigma)) for _ in range(count)]


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_a_nonfinite_value_changes_nothing(poison):
    values = noise(0)
    clean, poisoned = window_of(values), window_of(values)
    for _ in range(200):
        poisoned.add(0, poison)
    assert poisoned.state_dict() == clean.state_dict()
    assert poisoned.threshold() == clean.threshold()


def test_healthy_steps_after_a_nan_are_still_healthy():
    window = window_of(noise(1))
    window.add(0, NAN)
    assert not any(window.is_spike(value) for value in noise(2))
    assert window.is_spike(60.0)


@pytest.mark.parametrize(("num_seen", "factor"), [(1, 600), (3, 110), (5, 55), (10, 55), (30, 55)])
def test_a_spike_is_seen_from_the_first_values_on(num_seen, factor):
    window = window_of([1.0, 1.05, 0.95, 1.02, 0.98] * 6)
    window = window_of(list(window.values)[:num_seen])
    assert window.is_spike(factor)
    assert not window.is_spike(factor / 2)


def test_a_short_history_is_not_acted_on():
    window = window_of([1.0] * 49)
    assert not window.can_act
    window.add(49, 1.0)
    assert window.can_act


def test_an_episode_is_reported_once():
    window = window_of([1.0, 1.1] * 20)
    found = [window.add(step, value) for step, value in enumerate([80.0, 90.0, 1.0, 1.1, 100.0] + [1.0] * 10 + [110.0])]
    reported = {step: spike.value for step, spike in enumerate(found) if spike}
    assert reported == {0: 80.0, 15: 110.0}
    assert found[0].usual == pytest.approx(1.05, abs=0.06)


def test_a_moderate_spike_is_reported_once_the_values_come_back_and_a_new_level_is_not():
    back = window_of([1.0, 1.02] * 30, ratio=3.0)
    assert [back.add(60, 5.0), back.add(61, 4.0)] == [None, None]
    spike = back.add(62, 1.0)
    assert (spike.step, spike.value) == (60, 5.0)
    stays = window_of([1.0, 1.02] * 30, ratio=3.0)
    assert not any(stays.add(60 + i, 5.0) for i in range(40))
    assert not stays.is_spike(8.0)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("factor", [60.0, 1e3])
def test_a_planted_spike_is_seen_at_every_scale(scale, factor):
    assert window_of(noise(3, scale=scale)).is_spike(factor * scale)


def test_a_spike_that_was_let_in_does_not_blind_the_window():
    window = window_of([*noise(4), 1e6, 1e7, 1e8])
    assert window.is_spike(60.0)


def test_a_flat_history_raises_no_alarm_for_a_small_change():
    window = window_of([1.0] * 100)
    assert not window.is_spike(1.01)
    assert not window.is_spike(49.9)
    assert window.is_spike(50.1)


def test_a_norm_that_grows_after_a_warm_up_is_no_spike():
    warm_up = noise(8, count=20, scale=0.17)
    assert not any(window_of(warm_up).is_spike(value) for value in (0.5, 4.0))
    grown = noise(9, count=12, scale=1.5)
    window = window_of(warm_up + grown)
    assert not window.is_spike(12.0), "70 times the norm of the warm-up"
    assert window.is_spike(150.0)
    assert not window.is_open
    window.add(32, 150.0)
    assert window.is_open


def test_a_history_of_zeros_says_nothing_about_the_first_live_gradient():
    """Groups of equal rewards in RL: norm 0 step after step, then something to learn."""
    window = window_of([0.0] * 80)
    assert not window.is_spike(0.3)


def test_mostly_zeros_with_live_gradients_among_them():
    window = window_of([0.0, 0.0, 0.3] * 30)
    assert not window.is_spike(0.3)


def test_a_level_that_stays_is_the_new_history():
    window = window_of(noise(5) + noise(6, scale=100.0))
    assert not window.is_spike(120.0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.0, 0.9), st.floats(1e-5, 1e5))
def test_silent_on_healthy_noise(seed, sigma, scale):
    window = SpikeDetector()
    for value in noise(seed, sigma, count=200, scale=scale):
        assert not window.is_spike(value)
        assert window.add(0, value) is None


def test_state_makes_the_round_trip():
    window = window_of(noise(7, count=140))
    again = SpikeDetector()
    again.add(0, 3.0)
    again.load_state_dict(json.loads(json.dumps(window.state_dict(), allow_nan=False)))
    assert list(again.values) == list(window.values)
    assert again.threshold() == window.threshold()
    again.add(0, 1.0)
    assert len(again.values) == 100, "the size survives too"


def test_a_poisoned_state_is_cleaned_on_the_way_in():
    window = SpikeDetector()
    window.load_state_dict({"values": [1.0, "nan", NAN, INF, 2.0]})
    assert list(window.values) == [1.0, 2.0]
