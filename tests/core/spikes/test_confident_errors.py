"""Losses that stand apart from those of a model that has learned."""

import json
import math
import random

import pytest

from hf_nanguard.core.spikes.confident_errors import LEAST, MIN_SEEN, NUM_KEPT, DeniedRows, LearnedLosses, is_denied


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
    assert is_denied(guess + math.log(10) + 0.01, guess)
    assert not is_denied(guess + math.log(10) - 0.01, guess)
    assert not is_denied(LEAST * 100.0, 100.0)  # a loss that is a sum, or of very many classes


def visit_again(*changes):
    """Rows 0, 1, ... that were noticed with a loss of 5, and came again."""
    rows = DeniedRows()
    rows.add(dict.fromkeys(range(20), 5.0))
    for row, change in enumerate(changes):
        rows.add({row: 5.0 * change})
    return rows


def test_a_row_is_suspect_when_it_comes_again_with_the_same_loss():
    rows = visit_again()
    assert rows.is_kept(7, 4.8)
    assert not rows.is_kept(7, 2.5)
    assert not rows.is_kept(100, 5.0)
    assert not rows.is_kept(None, 5.0)


def test_rows_of_a_group_that_is_learned_are_not_suspect():
    rows = visit_again(0.9, 0.4, 0.6, 0.5)
    assert not rows.is_kept(7, 5.0)
    assert not rows.are_kept()


def test_rows_are_suspect_at_once_where_others_came_again_with_the_same_loss():
    assert visit_again(1.1, 0.9, 1.0, 0.95).are_kept()
    assert not visit_again(1.1, 0.9, 1.0).are_kept()


def test_rows_that_came_again_survive_a_checkpoint():
    rows, other = visit_again(1.1, 0.5), DeniedRows()
    other.load_state_dict(json.loads(json.dumps(rows.state_dict())))
    assert other.state_dict() == rows.state_dict()


def test_the_losses_survive_a_checkpoint():
    learned, other = fill(usual_losses(2 * NUM_KEPT)), LearnedLosses()
    other.load_state_dict(json.loads(json.dumps(learned.state_dict())))
    assert list(other.values) == list(learned.values)
    assert len(other.values) == NUM_KEPT
