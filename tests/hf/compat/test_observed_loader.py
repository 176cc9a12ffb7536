"""A dataloader is observed without anything of ours in it."""

import importlib

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset
from transformers import Trainer

from hf_nanguard.boundary import Boundary
from hf_nanguard.hf.compat.observed_loader import observed_batches
from tests.trainers import build


class Indices(Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return index


class Observer:
    """Collates to tuples, and turns them back into lists where it receives them."""

    def __init__(self):
        self.passes, self.received = [], []
        self.boundary = Boundary()

    def begin_pass(self):
        self.passes = [*filter(None, self.passes), []]  # an iterator with workers asks twice
        return self.passes[-1]

    def replace(self, batch):
        return batch

    def collate(self, collator):
        return Tupled(collator)

    def receive(self, data):
        assert type(data) is tuple
        self.received.append(list(data))
        return list(data)

    receive_unseen = None  # is not needed


class Tupled:
    def __init__(self, collator):
        self.collator = collator

    def __call__(self, examples):
        return tuple(self.collator(examples))


class OwnIterator(BatchSampler):
    """A batch sampler that is its own iterator."""

    def __init__(self):
        self.batches = [[0, 1], [2, 3]]

    def __iter__(self):
        self.left = iter(self.batches)
        return self

    def __next__(self):
        return next(self.left)

    def __len__(self):
        return 2


class YieldsIterators(OwnIterator):
    """A batch sampler whose batches can be read once."""

    def __next__(self):
        return map(int, next(self.left))


class YieldsTensors(OwnIterator):
    def __next__(self):
        return torch.tensor(next(self.left))


@pytest.fixture
def accelerator(tmp_path):
    return build("plain", tmp_path, guard=False).accelerator


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_pass_is_observed_and_no_other(workers, accelerator):
    loader = accelerator.prepare(
        DataLoader(Indices(), batch_size=2, shuffle=True, num_workers=workers, collate_fn=list)
    )
    observer = Observer()
    with observed_batches(loader, observer) as is_observed:
        assert is_observed
        first, second = list(loader), list(loader)
    assert observer.passes == [first]
    assert observer.received == first
    assert all(sorted(i for batch in found for i in batch) == list(range(7)) for found in (first, second))
    assert list(map(type, loader)) == [list] * 4


@pytest.mark.parametrize(
    "make",
    [OwnIterator, YieldsIterators, YieldsTensors, lambda: BatchSampler(range(4), 2, False), lambda: [[0, 1], [2, 3]]],
)
def test_collator_and_sampler_stay_what_they_are(make):
    observer, sampler = Observer(), make()
    loader = DataLoader(range(4), batch_sampler=sampler, collate_fn=list)
    with observed_batches(loader, observer):
        for batch in loader:
            assert type(batch) is list
            assert loader.batch_sampler is sampler
            assert loader.collate_fn is list
    assert observer.passes == [[[0, 1], [2, 3]]]
    assert observer.received == [[0, 1], [2, 3]]
    assert "_get_iterator" not in vars(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_left_after_a_resume_is_observed(workers, accelerator):
    loader = accelerator.prepare(DataLoader(Indices(), batch_size=2, num_workers=workers, collate_fn=list))
    observer, host = Observer(), importlib.import_module(Trainer.__module__)
    skip = host.skip_first_batches
    with observed_batches(loader, observer, is_resumed=True):
        assert list(host.skip_first_batches(loader, 2)) == [[4, 5], [6]]
    assert observer.passes == [[[4, 5], [6]]]
    assert host.skip_first_batches is skip


def test_workers_that_persist_are_observed_in_every_pass():
    loader = DataLoader(Indices(), batch_size=4, num_workers=1, persistent_workers=True, collate_fn=list)
    observer = Observer()
    for _ in range(2):
        with observed_batches(loader, observer):
            assert list(loader) == [[0, 1, 2, 3], [4, 5, 6]]
    assert observer.passes == [[[0, 1, 2, 3], [4, 5, 6]]] * 2


class OwnIterators(DataLoader):
    def _get_iterator(self):
        return iter([1, 2])


@pytest.mark.parametrize("loader", [DataLoader(range(5), batch_size=None), iter([1]), [1, 2], OwnIterators(range(5))])
def test_batches_that_cannot_be_followed_are_not_observed(loader):
    with observed_batches(loader, Observer()) as is_observed:
        assert not is_observed
