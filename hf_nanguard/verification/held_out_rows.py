"""A few rows to evaluate on, held out of any kind of training data."""

import math
from collections.abc import Mapping
from typing import Any

import datasets
from torch.utils.data import Dataset, IterableDataset, Subset

HELD_OUT_SHARE = 0.2


def hold_out(trainer: Any, num_rows: int) -> bool:
    """Gives the trainer a few rows to evaluate on, of its own evaluation data or else of what it trains on; returns
    whether that could be."""
    test, train = trainer.eval_dataset, trainer.train_dataset
    if isinstance(test, Mapping):
        test = next(iter(test.values()), None)
    if test is not None:
        trainer.eval_dataset = test if (parts := _split(test, num_rows)) is None else parts[0]
        return True
    share = int(HELD_OUT_SHARE * _count(train, math.ceil(num_rows / HELD_OUT_SHARE)))
    parts = _split(train, min(num_rows, share))
    if parts is None:
        return False
    trainer.eval_dataset, trainer.train_dataset = parts
    return True


def _count(dataset: Any, enough: int) -> int:
    """Returns how many rows there are; of a stream, which has to be read for that, at most `enough`."""
    return sum(1 for _ in dataset.take(enough)) if isinstance(dataset, datasets.IterableDataset) else _length(dataset)


def _length(dataset: Any) -> int:
    return len(dataset) if isinstance(dataset, datasets.Dataset | list) or _is_map(dataset) else 0


def _is_map(dataset: Any) -> bool:
    return isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset)


def _split(dataset: Any, num_rows: int) -> tuple[Any, Any] | None:
    """Returns the first rows and the others; `None` if it cannot be cut there."""
    if isinstance(dataset, datasets.IterableDataset) and num_rows > 0:
        return dataset.take(num_rows), dataset.skip(num_rows)
    total = _length(dataset)
    if not 0 < num_rows < total:
        return None
    first, others = range(num_rows), range(num_rows, total)
    if isinstance(dataset, datasets.Dataset):
        return dataset.select(first), dataset.select(others)
    return Subset(dataset, list(first)), Subset(dataset, list(others))
