"""Repair of scores: against a float64 reference, in every dtype, looked at and branch-free alike."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_nanguard.core.logits import FOLD_EVERY, NEVER, RowNotes, Tally, bound_scores, repair_scores
from hf_nanguard.testing import INF, NAN, OperationCounter

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIMIT = 6e4  # within float16
ENTRY = st.one_of(
    st.floats(-LIMIT, LIMIT, width=16),
    st.sampled_from([0.0, -0.0, 5.0, 5.0, NAN, INF, -INF, -INF]),
)


@st.composite
def tables(draw, entry=ENTRY):
    vocabulary = draw(st.integers(1, 7))
    rows = draw(st.lists(st.lists(entry, min_size=vocabulary, max_size=vocabulary), min_size=1, max_size=5))
    return torch.tensor(rows, dtype=torch.float64).to(draw(st.sampled_from(DTYPES)))


def reference(row: list[float], end_id: int) -> list[float]:
    """What a row must become, entry by entry."""
    kept = [value if math.isfinite(value) else -INF for value in row]
    if all(value == -INF for value in kept):
        return [0.0 if index == end_id else -INF for index in range(len(row))]
    return kept


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


@settings(deadline=None, max_examples=200)
@given(tables(), st.integers(0, 6), st.booleans())
def test_rows_become_what_the_reference_says(scores, end_id, look):
    end_id %= scores.shape[1]
    before = scores.clone()
    repair = repair_scores(scores, end_id, look=look)
    wanted = torch.tensor([reference(row, end_id) for row in scores.double().tolist()], dtype=torch.float64)
    assert torch.equal(repair.scores.double(), wanted)
    assert repair.scores.dtype == scores.dtype
    assert torch.equal(bits(scores), bits(before)), "the input was written to"
    healthy = (before.isfinite() | (before == -INF)).all(-1) & before.isfinite().any(-1)
    assert torch.equal(bits(repair.scores[healthy]), bits(before[healthy])), "a healthy row changed"


@settings(deadline=None, max_examples=200)
@given(tables(), st.integers(0, 6))
def test_looking_and_not_looking_agree_bit_for_bit(scores, end_id):
    seen, blind = (repair_scores(scores, end_id, look=look) for look in (True, False))
    assert torch.equal(bits(seen.scores), bits(blind.scores))
    changed = repair_scores(scores.clone(), end_id, look=False, in_place=True)
    assert torch.equal(bits(changed.scores), bits(blind.scores))


@settings(deadline=None, max_examples=200)
@given(tables(), st.integers(0, 6))
def test_what_is_drawn_from_is_a_distribution_and_masks_stay(scores, end_id):
    end_id %= scores.shape[1]
    fixed = repair_scores(scores, end_id).scores.float()
    probs = fixed.softmax(-1)
    assert torch.allclose(probs.sum(-1), torch.ones(len(probs)), atol=1e-5)
    ended = ~scores.isfinite().any(-1)
    assert (probs[~ended][~scores[~ended].isfinite()] == 0).all()
    assert (probs[ended][:, end_id] == 1).all()


def test_ties_stay_ties_and_argmax_keeps_its_choice():
    scores = torch.tensor([[3.0, 7.0, 7.0, NAN], [1.0, 1.0, 1.0, 1.0], [7.0, INF, 7.0, -INF]])
    assert repair_scores(scores).scores.argmax(-1).tolist() == [1, 0, 0]
    assert torch.equal(repair_scores(scores).scores[0], torch.tensor([3.0, 7.0, 7.0, -INF]))


def test_healthy_scores_are_returned_themselves():
    scores = torch.randn(4, 9)
    scores[:, ::2] = -INF
    repair = repair_scores(scores)
    assert repair.scores is scores
    assert repair.maxima is None


@pytest.mark.parametrize("edge", [torch.finfo(torch.float32).max, torch.finfo(torch.float32).min, 1e-45])
def test_extreme_finite_rows_are_healthy(edge):
    scores = torch.full((2, 3), edge)
    assert repair_scores(scores).scores is scores
    assert torch.equal(repair_scores(scores, look=False).scores, scores)


def test_ending_wins_over_a_mask_and_an_end_outside_the_vocabulary_is_0():
    scores = torch.tensor([[NAN, -INF, NAN]])
    assert repair_scores(scores, 1).scores.tolist() == [[-INF, 0.0, -INF]]
    for outside in (3, -1):
        assert repair_scores(scores, outside).scores.tolist() == [[0.0, -INF, -INF]]


def test_the_rest_of_an_ended_row_can_be_kept_alive():
    scores = torch.tensor([[NAN, NAN, NAN], [1.0, NAN, -INF]])
    assert repair_scores(scores, 1, rest=-50.0).scores.tolist() == [[-50.0, 0.0, -50.0], [1.0, -INF, -INF]]


def test_slices_and_empty_scores_are_taken():
    table = torch.randn(2, 3, 5)
    table[0, 1, 2] = NAN
    assert repair_scores(table[:, 1, :]).scores[0, 2] == -INF
    empty = torch.empty(0, 5)
    assert repair_scores(empty).scores is empty


@pytest.mark.parametrize("sick", [False, True])
@pytest.mark.parametrize("look", [None, False])
def test_nothing_is_read(sick, look):
    scores = torch.randn(4, 9)
    if sick:
        scores[1, 2] = NAN
        scores[2] = NAN
    tally, notes = Tally(), RowNotes()
    with OperationCounter() as count:
        for step in range(2 * FOLD_EVERY + 3):
            repair = repair_scores(scores, look=look)
            if repair.maxima is not None:
                tally.add(repair.maxima)
                notes.add(step, repair.maxima)
    assert count.ops
    assert count.reads == []
    assert tally.read() == ((2 * FOLD_EVERY + 3,) * 2 if sick else (0, 0))


def test_a_healthy_call_is_one_operation_where_it_can_look():
    scores = torch.randn(4, 9)
    with OperationCounter() as count:
        repair_scores(scores)
    assert count.ops == ["aten.amax.default"]
    with OperationCounter() as count:
        repair_scores(scores, look=False)
    assert len(count.ops) <= 6, count.ops


@settings(deadline=None, max_examples=100)
@given(tables(), st.floats(0.5, 40.0), st.sampled_from([0.0, 1e-8, 1e-3, 0.5]))
def test_always_bounds_floors_and_normalises(scores, clip_value, min_prob):
    fixed = repair_scores(scores).scores
    bounded, _ = bound_scores(fixed, clip_value, min_prob)
    assert bounded.dtype == scores.dtype
    for row, got in zip(fixed.double().tolist(), bounded.double().tolist(), strict=True):
        best = max(row)
        open_ = [max(value, best - 2 * clip_value) for value in row if value != -INF]
        total = sum(math.exp(value - best) for value in open_)
        floored = [max(math.exp(value - best) / total, min_prob) for value in open_]
        wanted = iter([value / sum(floored) for value in floored])
        for value, after in zip(row, got, strict=True):
            if value == -INF:
                assert after == -INF
            else:
                coarse = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 0.3}[scores.dtype]
                assert math.isclose(after, math.log(next(wanted)), rel_tol=1e-2, abs_tol=coarse)


def test_which_rows_were_raised():
    scores = torch.tensor([[0.0, 0.1, -INF], [0.0, -3.9, 0.0], [0.0, -4.1, -4.1], [0.0, -INF, -INF]])
    assert bound_scores(scores, 2.0, 0.0)[1].tolist() == [False, False, True, False]
    assert bound_scores(scores, 40.0, 0.02)[1].tolist() == [False, True, True, False]


@pytest.mark.parametrize("number", [1, FOLD_EVERY, 2 * FOLD_EVERY + 3])
def test_bounded_rows_are_counted(number):
    tally = Tally()
    assert tally.read_bounded() == 0
    for size in range(number):
        tally.add_bounded(torch.tensor([True, True] + [False] * size))
    assert tally.read_bounded() == tally.read_bounded() == 2 * number


def test_counts_are_read_when_asked_for():
    tally = Tally()
    assert tally.read() == (0, 0)
    for size in (2, 5):  # rows may come and go
        scores = torch.zeros(size, 3)
        scores[0, 0] = NAN
        scores[1] = -INF
        tally.add(*repair_scores(scores)[1:])
    assert tally.read() == (2, 2)
    assert tally.read() == (2, 2)


@pytest.mark.parametrize("spacing", [1, FOLD_EVERY // 2, FOLD_EVERY])
def test_the_first_sick_step_of_each_row_is_kept(spacing):
    notes = RowNotes()
    planted = {0: {1: "repaired"}, 3 * spacing: {0: "ended", 1: "ended"}, 4 * spacing: {0: "repaired", 2: "repaired"}}
    for step in range(5 * spacing):
        scores = torch.zeros(4, 3)
        for row, kind in planted.get(step, {}).items():
            scores[row, 0 if kind == "repaired" else slice(None)] = INF
        notes.add(step, *repair_scores(scores, look=False)[1:])
    assert notes.read() == [
        (4 * spacing, 3 * spacing),
        (0, 3 * spacing),
        (4 * spacing, NEVER),
        (NEVER, NEVER),
    ]
    assert not notes.mixed


@pytest.mark.parametrize("folded", [False, True])
def test_drafts_are_taken_back(folded):
    notes = RowNotes()
    sick = repair_scores(torch.tensor([[NAN, 1.0]]))[1:]
    notes.add(2, *sick)
    notes.add(5, *sick)
    if folded:
        notes.read()
    notes.forget_from(3)
    assert notes.read() == [(2, NEVER)]
    notes.forget_from(2)
    assert notes.read() in ([], [(NEVER, NEVER)])


def test_rows_that_change_in_number_are_not_told_apart():
    notes = RowNotes()
    for step, size in enumerate((3, 2)):
        scores = torch.zeros(size, 2)
        scores[1, 0] = NAN
        notes.add(step, *repair_scores(scores)[1:])
    assert notes.read() == [(0, NEVER)]
    assert notes.mixed
