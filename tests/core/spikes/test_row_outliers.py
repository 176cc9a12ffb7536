"""Samples that are out of line with others, in logarithms."""

import math
import random

import pytest

from hf_nanguard.core.spikes.row_outliers import MIN_OTHERS, find_bound, find_outliers


def healthy(count, spread, seed=0):
    rng = random.Random(seed)
    return [rng.gauss(0.0, spread) for _ in range(count)]


@pytest.mark.parametrize("spread", [0.05, 0.2, 0.5])
def test_samples_far_above_all_others_are_found_and_no_others(spread):
    samples = healthy(16, spread)
    for place in (3, 11):
        samples[place] = 8.0
    assert find_outliers(samples, []) == [3, 11]


@pytest.mark.parametrize("spread", [0.05, 0.3, 1.0, 1.5])
def test_healthy_samples_are_never_out_of_line(spread):
    for seed in range(300):
        assert find_outliers(healthy(8, spread, seed), healthy(40, spread, 1000 + seed)) == []


def test_hard_samples_that_are_not_alone_are_not_out_of_line():
    others = [0.0] * 30 + [3.0, 3.2]
    assert find_outliers([0.0] * 7 + [3.5], others) == []
    assert find_outliers([0.0] * 7 + [3.5], [0.0] * 32) == [7]


def test_half_of_the_samples_are_no_minority():
    assert find_outliers([0.0] * 4 + [9.0] * 4, []) == []
    assert find_outliers([0.0] * 5 + [9.0] * 3, [0.0]) == [5, 6, 7]


def test_a_single_sample_needs_others_to_compare_with():
    assert find_outliers([9.0], [0.0] * (MIN_OTHERS - 1)) == []
    assert find_outliers([9.0], [0.0] * MIN_OTHERS) == [0]
    assert find_bound([0.0] * (MIN_OTHERS - 1)) is None


def test_three_times_the_others_is_the_least():
    assert find_outliers([0.0] * 20 + [math.log(2.9)], []) == []
    assert find_outliers([0.0] * 20 + [math.log(3.1)], []) == [20]
