"""The fingerprint of a dataset: the same for the same rows, another for others, and no code of the user's runs."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from hf_nanguard.hf.data.dataset_fingerprint import find_contents, find_fingerprint

from ...models import token_dataset, token_rows


@pytest.mark.parametrize(
    "build",
    [
        token_dataset, token_rows, lambda number, **k: tuple(token_rows(number, **k)),
        lambda number, seed=0: TensorDataset(torch.randn(number, 3, generator=torch.Generator().manual_seed(seed))),
        lambda number, seed=0: Subset(token_rows(number + 4, seed=seed), range(4, number + 4)),
        lambda number, seed=0: [{"x": torch.full((2,), seed + 0.5, dtype=torch.bfloat16)}] * number,
    ],
    ids=["datasets", "list", "tuple", "tensors", "subset", "bfloat16"],
)  # fmt: skip
def test_it_depends_on_rows_and_their_number(build):
    assert find_fingerprint(build(40)) == find_fingerprint(build(40))
    others = {find_fingerprint(build(40)), find_fingerprint(build(41)), find_fingerprint(build(40, seed=1))}
    assert len(others) == 3


def test_rows_with_names_of_their_own_may_be_in_any_order():
    rows = token_rows(40)
    order = np.random.default_rng(0).permutation(40)
    assert find_fingerprint([rows[i] for i in order], order) == find_fingerprint(rows, np.arange(40))


def test_rows_of_a_dataset_of_the_user_s_are_not_read():
    class Own(Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            raise AssertionError("read")

    assert find_fingerprint(Own()).startswith("5-")


def test_a_transform_does_not_run():
    def transform(rows):
        raise AssertionError("ran")

    assert find_fingerprint(token_dataset(8).with_transform(transform)) == find_fingerprint(token_dataset(8))


def test_streams_have_none():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    assert find_fingerprint(Stream()) is None
    assert find_fingerprint(token_dataset(8).to_iterable_dataset()) is None


class Thing:
    """Has an address in its repr."""


@pytest.mark.parametrize(
    "build",
    [lambda: np.array([Thing(), "x"], dtype=object), lambda: torch.eye(3).to_sparse(), lambda: torch.ones(2, dtype=torch.cfloat)],
    ids=["objects", "sparse", "complex"],
)  # fmt: skip
def test_values_without_plain_bytes_count_by_their_kind(build):
    kept = [build() for _ in range(20)]  # at other addresses than the next
    assert find_fingerprint([{"x": value} for value in kept]) == find_fingerprint([{"x": build()} for _ in range(20)])


def test_the_content_of_single_rows_is_told_by_the_user_s_numbers():
    rows = token_rows(40)
    order = np.random.default_rng(0).permutation(40)[:30]
    there, gone = int(order[7]), int(np.setdiff1d(np.arange(40), order)[0])
    found = find_contents([rows[i] for i in order], [there, gone], order)
    assert found == find_contents(rows, [there, 40])
    assert set(find_contents(rows, range(40)).values()) == {*find_contents(rows[::-1], range(40)).values()}
    assert len({*find_contents(rows, range(40)).values()}) > 20
