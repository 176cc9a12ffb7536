"""Which dataset rows a micro-batch consists of.

Map-style datasets: recorded from the batch sampler and looked up by position in the epoch, so shuffling, workers, sharding
over ranks and a resume in mid-epoch are handled. Iterable datasets have no row numbers: a single process that reads them in
order counts samples, otherwise the rows are not known.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..compat.accelerate import recorded_batches

ROWS = "nanguard_rows"
"""The key under which rows travel with completions, which RL trainers shuffle and split."""


class RowRecord:
    """The rows of every batch of the current epoch, on this rank."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.position = 0
        self.known = False
        self.stream_batch_size: int | None = None
        self._is_recorded = False

    @contextmanager
    def recording(self, dataloader: object, num_processes: int, position: int = 0) -> Iterator[None]:
        """Records the rows of an epoch inside the block.

        Args:
            dataloader (`DataLoader`):
                The prepared training dataloader. Any other iterable of batches has no rows.
            num_processes (`int`):
                How many processes share it.
            position (`int`, *optional*, defaults to `0`):
                The first batch; not 0 after a resume in mid-epoch.
        """
        self.batches, self.position, self._is_recorded = [], position, False
        self.known, self.stream_batch_size = False, None
        if not isinstance(dataloader, DataLoader):
            yield
            return
        if isinstance(dataloader.dataset, IterableDataset):  # its batch sampler yields None for rows
            counted = num_processes == 1 and dataloader.num_workers == 0
            self.stream_batch_size = dataloader.batch_size if counted else None
            yield
            return
        with recorded_batches(dataloader, self._begin_pass) as self.known:
            yield

    def _begin_pass(self) -> list[list[int]]:
        """Returns where a pass over the batches is recorded: the first one of an epoch is the trainer's own."""
        if self._is_recorded:
            return []
        self._is_recorded = True
        return self.batches

    def next(self, batch: Any, num_samples: int | None = None) -> list[int] | None:
        """Returns the rows of the next batch, `None` if they cannot be known.

        Args:
            batch (`Any`):
                The batch.
            num_samples (`int`, *optional*):
                How many samples it had, if some have been removed.
        """
        position, self.position = self.position, self.position + 1
        if self.stream_batch_size is not None:
            first = position * self.stream_batch_size
            size = _size(batch) if num_samples is None else num_samples
            return list(range(first, first + int(min(size, self.stream_batch_size))))
        return self.batches[position] if self.known and position < len(self.batches) else None


def _size(batch: Any) -> int | float:
    """Returns how many samples a batch has (the last of a stream may be short), infinite if that is not known."""
    if isinstance(batch, Mapping):
        return next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim), math.inf)
    return len(batch) if isinstance(batch, list) else math.inf
