"""Observes the batches of a dataloader. Only the iterator that torch makes for a pass holds anything of ours: collator and
sampler stay those of the user, for whoever asks the trainer or the dataloader for them."""

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer

from ...boundary import Boundary
from .accelerate import replaced_method


class LoaderObserver(Protocol):
    """What is done with the batches of a pass, behind its boundary."""

    boundary: Boundary

    def begin_pass(self) -> list[object] | None:
        """Returns the list to which what the batch sampler yields is appended, `None` if it is not recorded."""

    def replace(self, batch: object) -> object:
        """Returns what takes the place of what the batch sampler yields."""

    def collate(self, collator: Callable[[list], object]) -> Callable[[list], object]:
        """Returns what collates in place of the user's collator, possibly in a worker process."""

    def receive(self, data: object) -> object:
        """Returns the batch, given what was collated, in the order in which the trainer gets them."""

    def receive_unseen(self, data: object) -> object:
        """Returns the batch alone, after an error in [`LoaderObserver.receive`]."""


class ObservedSampler:
    """The batch sampler as the iterator of a pass sees it; anything but iteration is the sampler's own."""

    def __init__(self, sampler: Any, observer: LoaderObserver):
        self._sampler = sampler
        self._observer = observer

    def __iter__(self) -> Iterator[object]:
        batches = iter(self._sampler)  # now, because a sampler may draw random numbers here
        boundary = self._observer.boundary
        record = boundary.call("batches", self._observer.begin_pass)
        return ObservedIndices(batches, record, self._observer)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> object:
        return getattr(self._sampler, name)


class ObservedIndices:
    """An iterator over the indices of batches that replaces and records them; anything else is the original iterator's own."""

    def __init__(self, batches: Iterator[object], record: list[object] | None, observer: LoaderObserver):
        self._batches = batches
        self._record = record
        self._observer = observer

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        batch = next(self._batches)
        batch = list(batch) if isinstance(batch, Iterator) else batch  # which can be read once
        boundary = self._observer.boundary
        batch = boundary.call("quarantine", self._observer.replace, batch, otherwise=lambda batch: batch)
        if self._record is not None:
            self._record.append(boundary.call("dataset rows", list_rows, batch))
        return batch

    def __getattr__(self, name: str) -> object:
        return getattr(self._batches, name)


def list_rows(batch: object) -> list[object] | None:
    """Returns the rows that a batch sampler yields for a batch, `None` if it yields something else."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch.tolist()
    if not isinstance(batch, Iterable):
        return None
    return [item if (number := find_number(item)) is None else number for item in batch]


def find_number(item: Any) -> int | None:
    """Returns the number that a sampler has given for a row, also as a scalar of numpy or torch; `None` for any other key."""
    try:
        return operator.index(item)
    except TypeError:
        return None


@contextmanager
def observed_batches(dataloader: object, observer: LoaderObserver, is_resumed: bool = False) -> Iterator[bool]:
    """Observes the first pass over a prepared dataloader that begins inside the block: the trainer's own. Yields whether there
    are batches to observe: a loader whose iterators are not torch's, or that has no batches of its own making, is left alone.

    If the run `is_resumed`, the trainer will skip batches, for which accelerate builds another dataloader. Can go when a
    DataLoader has a hook on its batches and tells their indices.
    """
    base: Any = vars(dataloader).get("base_dataloader", dataloader) if isinstance(dataloader, DataLoader) else None
    makes_batches = base is not None and (base.batch_size is not None or base.batch_sampler is not None)
    if not makes_batches or not type(base)._get_iterator.__module__.startswith(("torch.", "torchdata.")):
        yield False
        return
    has_begun = False

    def observe(loader: object) -> object:
        inner = vars(loader).get("base_dataloader", loader)
        override = partial(make_iterator, inner)
        wrap = partial(observer.boundary.overriding, "batches", override)
        stack.enter_context(replaced_method(inner, "_get_iterator", wrap))
        return loader

    def make_iterator(inner: Any, make: Callable[[], object]) -> object:
        nonlocal has_begun
        if has_begun:
            return make()
        has_begun = True
        with ExitStack() as parts:
            parts.enter_context(replaced_method(inner, "collate_fn", observer.collate))
            if inner.batch_sampler is not None:
                sampler: Any = ObservedSampler(inner.batch_sampler, observer)
                parts.enter_context(replaced_method(inner, "batch_sampler", lambda _: sampler))
            return _received(make(), observer)

    with ExitStack() as stack:
        observe(dataloader)
        if is_resumed:
            host = import_module(Trainer.__module__)
            skip = lambda skip, *args, **kwargs: observe(skip(*args, **kwargs))  # noqa: E731
            wrap = partial(observer.boundary.overriding, "batches", skip)
            stack.enter_context(replaced_method(host, "skip_first_batches", wrap))
        yield True


def _received(iterator: Any, observer: LoaderObserver) -> object:
    """Makes the observer receive what an iterator yields. Its class is swapped: an attribute of the iterator that refers to
    it would keep worker processes alive after its last use."""
    original = type(iterator)

    def receive_next(iterator: object) -> object:
        data = original._next_data(iterator)
        return observer.boundary.call("batches", observer.receive, data, otherwise=observer.receive_unseen)

    body = {"_next_data": receive_next, "__module__": original.__module__}
    iterator.__class__ = type(original.__name__, (original,), body)
    return iterator
