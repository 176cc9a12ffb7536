"""Whose data it was: samples by replay, tokens by shape."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_nanguard.core.autopsy.evidence.blamed_samples import find_blame, map_positions
from hf_nanguard.core.autopsy.trace.origin import Origin
from hf_nanguard.core.vocabulary import Cause


class Batch:
    """Samples of which some are bad, alone or together; it writes down what was run."""

    def __init__(self, size, culprits=(), together=(), rows=None, error=None, lonely=False):
        self.num_samples = self.num_entries = size
        self.culprits, self.together = set(culprits), set(together)
        self.rows = rows
        self.fields = {"input_ids": torch.zeros(size, 5, dtype=torch.long)}
        self.error = error
        self.lonely = lonely  # whether a batch of one is bad in a way of its own
        self.runs = []

    def run(self, samples):
        if self.error is not None:
            raise self.error
        self.runs.append(list(samples))
        bad = self.culprits & set(samples) or (self.together and self.together <= set(samples))
        return SimpleNamespace(healthy=not (bad or (self.lonely and len(samples) == 1)))

    def find_origin(self, samples):
        return _origin() if self.culprits & set(samples) else replace(_origin(), source="loss.py:7")


def _origin(positions=(), shape=()):
    return Origin("forward", "nan", Cause.UNKNOWN, positions=tuple(positions), shape=tuple(shape))


def always():
    return True


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 33), st.data())
def test_exactly_the_bad_samples_are_found(size, data):
    culprits = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    seen = data.draw(st.sets(st.integers(0, size - 1)))
    batch = Batch(size, culprits)
    blame = find_blame(batch, _origin([(s, 0) for s in seen], (size, 5, 7)), always)
    assert blame.samples == sorted(culprits)
    assert blame.scope == ("every_sample" if len(culprits) == size else "samples")


@pytest.mark.parametrize("size", [8, 32])
def test_one_culprit_costs_as_many_runs_as_the_batch_has_bits(size):
    batch = Batch(size, {size - 3})
    find_blame(batch, _origin(), always)
    assert len(batch.runs) <= 2 * size.bit_length()
    assert sum(map(len, batch.runs)) <= 2 * size


def test_where_it_was_seen_is_looked_at_first():
    batch = Batch(16, {9})
    assert find_blame(batch, _origin([(9, 2)], (16, 5, 7)), always).samples == [9]
    assert batch.runs == [[9], [s for s in range(16) if s != 9]]


@pytest.mark.parametrize("seen", [[], [(1, 0)], [(1, 0), (6, 0)]])
def test_samples_that_are_bad_only_together_are_the_batch(seen):
    blame = find_blame(Batch(8, together={1, 6}), _origin(seen, (8, 5, 7)), always)
    assert blame.scope == "batch"
    assert blame.samples is None or {1, 6} <= set(blame.samples)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_sample_that_is_bad_for_being_alone_is_not_blamed(size):
    blame = find_blame(Batch(size, {1}, lonely=True), _origin(), always)
    assert (blame.scope, blame.samples) == ("samples", [1])
    batch = Batch(size, together={0, 1}, lonely=True)
    assert find_blame(batch, _origin(), always).scope == "batch" or size > 2


def test_a_sample_without_which_the_batch_is_healthy_is_blamed_though_alone_it_is_bad_elsewhere():
    batch = Batch(4, {2}, lonely=True)
    batch.find_origin = lambda samples: replace(_origin(), source="loss.py:7")
    assert find_blame(batch, _origin(), always).samples == [2]


def test_rows_follow_the_samples():
    blame = find_blame(Batch(4, {2}, rows=[70, 71, 72, 73]), _origin(), always)
    assert (blame.samples, blame.rows) == ([2], [72])


def test_no_time_tells_what_was_seen_and_says_that_it_was_not_tested():
    batch = Batch(4, {2}, rows=[70, 71, 72, 73])
    blame = find_blame(batch, _origin([(2, 3)], (4, 5, 7)), lambda: False)
    assert (blame.scope, blame.samples, blame.rows, blame.tokens) == ("untried", [2], [72], [[2, 3]])
    assert batch.runs == []


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape"),
        ValueError("Image features and image tokens do not match"),
        AssertionError("4 samples"),
        AttributeError("x"),
        ZeroDivisionError(),
    ],
)
def test_a_batch_that_cannot_be_cut_is_not_tested(error):
    blame = find_blame(Batch(4, {2}, error=error), _origin([(2, 3)], (4, 5, 7)), always)
    assert (blame.scope, blame.samples) == ("untried", [2])


def test_a_single_sample_needs_no_run():
    batch = Batch(1, {0})
    assert find_blame(batch, _origin(), always).samples == [0]
    assert batch.runs == []


@pytest.mark.parametrize(
    ("position", "shape", "expected"),
    [
        ((2, 3), (4, 5, 7), (2, 3)),
        ((2, 3), (4, 5), (2, 3)),
        ((2, 3), (4, 4), (2, 3)),  # shifted labels are one shorter
        ((2,), (4,), (2, None)),
        ((2, 6), (4, 7), (2, None)),
        ((13, 0), (20, 7), (2, 3)),
        ((11, 0), (16, 7), (2, 3)),
        ((2, 1, 3), (4, 2, 5, 5), (2, 3)),
        ((5, 3), (8, 5, 5), (2, 3)),
        ((2, 1, 3), (4, 3, 9, 9), (2, None)),  # an image
    ],
)
def test_sample_and_token_are_read_from_the_shape(position, shape, expected):
    phase = "loss" if len(shape) == 1 else "forward"
    assert map_positions(replace(_origin([position], shape), phase=phase), Batch(4)) == [expected]


def test_a_vector_inside_the_model_is_one_of_features():
    assert map_positions(_origin([(2,)], (4,)), Batch(4)) == []


@pytest.mark.parametrize("shape", [(), (3,), (7, 9)])
def test_a_shape_that_does_not_tell_blames_nobody(shape):
    assert map_positions(_origin([tuple(0 for _ in shape)], shape), Batch(4)) == []


def test_pairs_are_one_sample():
    """A preference trainer puts the rejected halves below the chosen ones."""
    batch = Batch(8)
    batch.num_samples = 4
    assert map_positions(_origin([(6, 1)], (8, 5, 7)), batch) == [(2, 1)]
