"""Whose data it was: samples by replay, tokens by shape."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_nanguard.core.autopsy.evidence.blamed_samples import find_blame, find_raising, map_positions
from hf_nanguard.core.autopsy.trace.origin import Origin
from hf_nanguard.core.rng import RngState
from hf_nanguard.core.vocabulary import Cause

from ..suspects import make_specimen


class Batch:
    """Samples of which some are bad, alone or together; it writes down what was run."""

    def __init__(
        self, size, culprits=(), together=(), rows=None, error=None, lonely=False, others_pass=False, in_place=False
    ):
        self.num_samples = self.num_entries = size
        self.culprits, self.together = set(culprits), set(together)
        self.rows = rows
        self.others_pass = others_pass
        self.fields = {"input_ids": torch.zeros(size, 5, dtype=torch.long)}
        self.error = error
        self.documents = None
        self.is_replaceable = in_place
        self.lonely = lonely  # whether a batch of one is bad in a way of its own
        self.runs = []

    def run(self, samples):
        if self.error is not None:
            raise self.error
        self.runs.append(list(samples))
        bad = self.culprits & set(samples) or (self.together and self.together <= set(samples))
        return SimpleNamespace(healthy=not (bad or (self.lonely and len(set(samples)) == 1)))

    def find_origin(self, samples):
        return _origin() if self.culprits & set(samples) else replace(_origin(), source="loss.py:7")


def _origin(positions=(), shape=()):
    return Origin("forward", "nan", Cause.UNKNOWN, positions=tuple(positions), shape=tuple(shape))


def always():
    return True


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 33), st.booleans(), st.data())
def test_exactly_the_bad_samples_are_found(size, in_place, data):
    culprits = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    seen = data.draw(st.sets(st.integers(0, size - 1)))
    batch = Batch(size, culprits, in_place=in_place)
    blame = find_blame(batch, _origin([(s, 0) for s in seen], (size, 5, 7)), always)
    assert blame.samples == sorted(culprits)
    assert blame.scope == ("every_sample" if len(culprits) == size else "samples")


@pytest.mark.parametrize("size", [8, 32])
def test_one_culprit_costs_as_many_runs_as_the_batch_has_bits(size):
    batch = Batch(size, {size - 3})
    find_blame(batch, _origin(), always)
    assert len(batch.runs) <= 2 * size.bit_length()
    assert sum(map(len, batch.runs)) <= 2 * size
    batch = Batch(size, {size - 3}, in_place=True)
    find_blame(batch, _origin(), always)
    assert {len(run) for run in batch.runs} == {size}
    assert len(batch.runs) <= 2 * size.bit_length() + 1  # one more for the batch without it


def test_where_it_was_seen_is_looked_at_first():
    batch = Batch(16, {9})
    assert find_blame(batch, _origin([(9, 2)], (16, 5, 7)), always).samples == [9]
    assert batch.runs == [[9], [s for s in range(16) if s != 9]]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("seen", [[], [(1, 0)], [(1, 0), (6, 0)]])
def test_samples_that_are_bad_only_together_are_the_batch(seen, in_place):
    blame = find_blame(Batch(8, together={1, 6}, in_place=in_place), _origin(seen, (8, 5, 7)), always)
    assert blame.scope == "batch"
    assert blame.samples is None or {1, 6} <= set(blame.samples)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_sample_that_is_bad_for_being_alone_is_not_blamed(size, in_place):
    blame = find_blame(Batch(size, {1}, lonely=True, in_place=in_place), _origin(), always)
    assert (blame.scope, blame.samples) == ("samples", [1])
    batch = Batch(size, together={0, 1}, lonely=True, in_place=in_place)
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


@pytest.mark.parametrize(
    ("phase", "others_pass", "scope"),
    [("forward", False, "only_sample"), ("forward", True, "samples"), ("input", False, "samples")],
)
def test_the_only_sample_is_blamed_if_others_pass_or_it_holds_the_bad_value(phase, others_pass, scope):
    batch = Batch(1, {0}, rows=[110], others_pass=others_pass)
    blame = find_blame(batch, replace(_origin(), phase=phase), always)
    assert (blame.scope, blame.samples, blame.rows) == (scope, [0], [110])
    assert batch.runs == []


@pytest.mark.parametrize(
    ("phase", "others_pass", "scope"),
    [("forward", False, "every_sample"), ("forward", True, "samples"), ("input", False, "samples")],
)
def test_all_samples_are_blamed_if_others_pass_or_they_hold_the_bad_values(phase, others_pass, scope):
    batch = Batch(2, {0, 1}, rows=[110, 7], others_pass=others_pass)
    blame = find_blame(batch, replace(_origin(), phase=phase), always)
    assert (blame.scope, blame.samples, blame.rows) == (scope, [0, 1], [110, 7])


# ---- faults that depend on more than the sample: its random numbers, the size of the batch ----

SIZE, WIDTH, CULPRIT = 8, 6, 5


class Dropped(nn.Module):
    """A linear layer behind dropout and, if wanted, a batch norm."""

    def __init__(self, norm: bool = False):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs, and which of the entries were kept."""
        return self.norm(self.linear(x)), self.drop(torch.ones_like(x))


def _find_rng() -> RngState:
    """Returns a random state that drops the first entry of the culprit and of others in the batch, but not if it is alone."""
    drop = nn.Dropout(0.5)
    for seed in range(1000):
        torch.manual_seed(seed)
        state = RngState.capture()
        whole = drop(torch.ones(SIZE, WIDTH))[:, 0] == 0
        state.restore()
        alone = drop(torch.ones(1, WIDTH))[0, 0] == 0
        if whole[CULPRIT] and 2 < whole.sum() < SIZE and not alone:
            return state
    raise AssertionError


def _make_dropped(loss: Any, norm: bool = False, flagged: tuple[int, ...] = (CULPRIT,), **inputs: Tensor) -> Any:
    """Returns a batch whose loss gets outputs, which rows have lost their first entry, which are flagged, and the inputs."""
    state = _find_rng()
    model = Dropped(norm)
    flags = torch.zeros(SIZE, dtype=torch.bool)
    flags[list(flagged)] = True
    suspect = make_specimen({"x": torch.randn(SIZE, WIDTH), "flags": flags, **inputs}, model, state)

    def run(batch: Any) -> Tensor:
        y, kept = model(batch["x"])
        return loss(y.mean(1), kept[:, 0] == 0, batch["flags"], batch)

    suspect.runner.begin_group(run)
    return suspect


def _blame(suspect: Any) -> tuple[str, list[int] | None]:
    origin = suspect.find_origin()
    assert origin is not None
    blame = find_blame(suspect, origin, always)
    return blame.scope, blame.samples


def log_of_a_row_that_saturates(y, dropped, flags, batch):
    return (y - torch.where(dropped & flags, 0.0, 1.0).log()).mean()


def square_in_half(y, dropped, flags, batch):
    return (y + torch.where(dropped & flags, 300.0, 1.0).half().square()).mean()


def of_a_fixed_size(y, dropped, flags, batch):
    assert len(y) == SIZE
    return (y / torch.where(flags, 0.0, 1.0)).mean()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("loss", [log_of_a_row_that_saturates, square_in_half, of_a_fixed_size])
def test_a_row_that_takes_its_own_random_numbers_or_a_whole_batch_is_found(loss, norm):
    assert _blame(_make_dropped(loss, norm)) == ("samples", [CULPRIT])


def test_a_fault_of_the_random_numbers_alone_is_no_rows():
    def loss(y, dropped, flags, batch):
        return (y - torch.where(dropped, 0.0, 1.0).log()).mean()

    assert _blame(_make_dropped(loss)) == ("every_sample", list(range(SIZE)))


def test_a_row_that_fails_only_as_a_copy_in_the_place_of_another_is_not_blamed():
    _find_rng().restore()
    lucky = int((nn.Dropout(0.5)(torch.ones(SIZE, WIDTH))[:, 0] != 0).nonzero()[0])
    suspect = _make_dropped(log_of_a_row_that_saturates, flagged=(CULPRIT, lucky))
    assert not suspect.run([lucky] * SIZE).healthy
    assert _blame(suspect) == ("samples", [CULPRIT])


def test_what_is_not_one_entry_per_sample_cannot_be_replaced():
    """The patches of all images may lie in one tensor: a copy of the ids of a sample would meet those of another."""

    def loss(y, dropped, flags, batch):
        return y.mean() * batch["patches"].sum()

    patches = torch.full((3 * SIZE,), float("nan"))
    suspect = _make_dropped(loss, patches=patches)
    assert not suspect.is_replaceable
    assert make_specimen({"x": torch.zeros(SIZE, 2), "y": torch.zeros(SIZE), "n": torch.tensor(3)}).is_replaceable
    pairs = make_specimen({"input_ids": torch.zeros(SIZE, 2), "ref": torch.zeros(SIZE // 2)})
    assert not pairs.is_replaceable  # until it is known that a sample is a pair
    pairs.num_samples = SIZE // 2
    assert pairs.is_replaceable


def _refused(culprits, everywhere=False, backward=False):
    """A batch whose loss raises if it holds one of some samples."""

    def loss(batch):
        if everywhere or set(batch["x"][:, 0].tolist()) & {float(c) for c in culprits}:
            raise IndexError("planted")
        return nn.functional.mse_loss(model(batch["x"]), batch["x"])

    model = nn.Linear(2, 2)
    suspect = make_specimen({"x": torch.arange(SIZE).float()[:, None].repeat(1, 2)}, model)
    suspect.runner.loss_fn = loss
    return suspect


@pytest.mark.parametrize("culprits", [[2], [0, SIZE - 1]])
def test_the_samples_for_which_a_loss_raises_are_found(culprits):
    suspect = _refused(culprits)
    assert find_raising(suspect, IndexError, always) == culprits
    assert suspect.num_runs <= 2 * SIZE


@pytest.mark.parametrize(
    ("culprits", "everywhere", "kind", "allowed"),
    [([2], True, IndexError, True), (range(SIZE), False, IndexError, True), ([2], False, KeyError, True),
     ([], False, IndexError, True), ([2], False, IndexError, False)],
)  # fmt: skip
def test_no_sample_is_named_for_an_error_of_all_of_another_kind_or_of_none(culprits, everywhere, kind, allowed):
    assert find_raising(_refused(culprits, everywhere), kind, lambda: allowed) == []


def test_samples_that_are_all_bad_do_not_stand_out_without_a_test():
    everyone = [(sample, 0) for sample in range(4)]
    blame = find_blame(Batch(4), _origin(everyone, (4, 5, 7)), lambda: False)
    assert (blame.scope, blame.samples) == ("untried", None)
    blame = find_blame(Batch(4), _origin(everyone[:3], (4, 5, 7)), lambda: False)
    assert (blame.scope, blame.samples) == ("untried", [0, 1, 2])
