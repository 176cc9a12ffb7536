"""A few rows for evaluation, held out of any kind of training data."""

import math
from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset, IterableDataset, Subset
from transformers import Trainer

from ..hf.compat.prepared_dataset import is_hf_dataset, is_hf_stream

HELD_OUT_SHARE = 0.2


def hold_out(trainer: Trainer, num_rows: int) -> bool:
    """Limits the trainer's evaluation data to a few rows, or holds rows out of its training data; returns whether it could."""
    test, train = trainer.eval_dataset, trainer.train_dataset
    if isinstance(test, Mapping):
        test = next(iter(test.values()), None)
    if test is not None:
        trainer.eval_dataset = (_split(test, num_rows) or (test,))[0]
        return True
    share = int(HELD_OUT_SHARE * _count(train, math.ceil(num_rows / HELD_OUT_SHARE)))
    parts = _split(train, min(num_rows, share))
    if parts is None:
        return False
    trainer.eval_dataset, trainer.train_dataset = parts
    return True


def _count(dataset: Any, enough: int = 0) -> int:
    """Returns the number of rows; of a stream, which has to be read to count, at most `enough`."""
    if is_hf_stream(dataset):
        return sum(1 for _ in dataset.take(enough))
    is_map = isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset)
    return len(dataset) if is_map or isinstance(dataset, list) or is_hf_dataset(dataset) else 0


def _split(dataset: Any, num_rows: int) -> tuple[Dataset, Dataset] | None:
    """Returns the first rows and the others; `None` if the dataset cannot be split there."""
    if is_hf_stream(dataset) and num_rows > 0:
        return dataset.take(num_rows), dataset.skip(num_rows)
    total = _count(dataset)
    if not 0 < num_rows < total:
        return None
    first, others = range(num_rows), range(num_rows, total)
    if is_hf_dataset(dataset):
        return dataset.select(first), dataset.select(others)
    return Subset(dataset, list(first)), Subset(dataset, list(others))
