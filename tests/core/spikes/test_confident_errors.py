"""Losses that stand apart from those of a model that has learned."""

import json
import math
import random

import pytest

from hf_nanguard.core.spikes.confident_errors import LEAST, MIN_SEEN, NUM_KEPT, LearnedLosses, is_denied


def fill(values, usual=0.01, start=2.0):
    learned = LearnedLosses()
    for value in values:
        learned.add(value, usual, start)
    return learned


def usual_losses(count=100):
    rng = random.Random(0)
    return [rng.lognormvariate(math.log(0.01), 1.0) for _ in range(count)]


def test_a_loss_above_a_gap_stands_apart_also_if_there_were_such_before():
    assert fill([*usual_losses(), 1.0]).stands_apart(1.0, 0.01)
    assert fill([*usual_losses(), 0.9, 1.1, 0.7, 0.2, 1.0]).stands_apart(1.0, 0.01)


def test_the_largest_of_losses_of_all_sizes_does_not():
    assert not fill([*usual_losses(), 0.2, 0.3, 0.4, 1.0]).stands_apart(1.0, 0.01)
    assert not fill([*usual_losses(), 0.2, 0.3, 0.2, 0.4, 0.9, 1.1, 1.0]).stands_apart(1.0, 0.01)


def test_one_of_many_has_hardly_any_between():
    many = [0.9, 1.1, 0.7, 1.3, 0.9]
    assert fill([*usual_losses(), *many, 1.0]).is_one_of_many(1.0)
    assert not fill([*usual_losses(), *many[1:], 1.0]).is_one_of_many(1.0)
    assert not fill([*usual_losses(), *many, 0.2, 0.3, 1.0]).is_one_of_many(1.0)


@pytest.mark.parametrize("loss", [1e-6, 0.001, 0.01, 0.03])
def test_usual_losses_never_do(loss):
    assert not fill([*usual_losses(), loss]).stands_apart(loss, 0.01)


def test_a_model_that_has_not_learned_says_nothing():
    assert not fill([*usual_losses(), 1.0], usual=0.3).values
    assert not fill([*usual_losses(), 1.0], usual=None).values
    assert not fill([0.01] * (MIN_SEEN - 1) + [1.0]).stands_apart(1.0, 0.01)
    assert fill([0.01] * MIN_SEEN + [1.0]).stands_apart(1.0, 0.01)


def test_a_class_is_denied_by_odds_beyond_a_guess():
    guess = math.log(4)
    assert is_denied(guess + math.log(10) + 0.01, guess, math.log(10))
    assert not is_denied(guess + math.log(10) - 0.01, guess, math.log(10))
    assert not is_denied(LEAST * 100.0, 100.0, math.log(10))  # a loss that is a sum, or of very many classes


def test_the_losses_survive_a_checkpoint():
    learned, other = fill(usual_losses(2 * NUM_KEPT)), LearnedLosses()
    other.load_state_dict(json.loads(json.dumps(learned.state_dict())))
    assert list(other.values) == list(learned.values)
    assert len(other.values) == NUM_KEPT
