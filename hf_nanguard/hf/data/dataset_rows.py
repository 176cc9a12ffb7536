"""What is known of each batch of an epoch: the dataset rows it consists of, and what its check found.

Map-style datasets: rows are recorded from the batch sampler and looked up by position in the pass, so shuffling, workers,
sharding over ranks and a resume in mid-epoch are handled. Iterable datasets have no row numbers: a single process that reads
them in order counts samples, otherwise the rows are not known.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ...boundary import Boundary
from ..compat.observed_loader import observed_batches
from ..compat.prepared_dataset import PreparedRows
from .checked_collator import BatchCheck, BatchNote, CheckedCollator, NotedBatch
from .row_quarantine import RowQuarantine

ROWS = "nanguard_rows"
"""The key under which rows travel with completions, which RL trainers shuffle and split."""


class BatchRecord:
    """The rows and the notes of every batch of the current epoch, on this rank."""

    def __init__(self, boundary: Boundary, quarantine: RowQuarantine | None = None) -> None:
        self.boundary = boundary
        self.quarantine = quarantine
        self.batches: list[list[Any] | None] = []
        self.notes: list[BatchNote] = []
        self.position = 0
        self.stream_batch_size: int | None = None
        self.prepared = PreparedRows()
        self._check: BatchCheck | None = None
        self._is_observed = False
        self._records_rows = False

    def begin_run(self, prepared: PreparedRows) -> None:
        """Takes how the rows of the trainer's dataset relate to those of the user's."""
        self.prepared = prepared

    @contextmanager
    def recording(
        self, dataloader: object, num_processes: int, position: int = 0, check: BatchCheck | None = None
    ) -> Iterator[None]:
        """Records the batches of an epoch inside the block.

        Only a prepared training dataloader, shared by `num_processes`, has rows. `position` is its first batch: not 0 after a
        resume in mid-epoch. `check` sees each batch where it is collated, or when the trainer gets it if torch does not collate
        it.
        """
        is_stream = isinstance(dataloader, DataLoader) and isinstance(dataloader.dataset, IterableDataset)
        self.batches, self.notes, self._check = [], [], check
        # A stream is read from its beginning to skip batches, while a sampler is asked for the others only.
        self.position = position if is_stream else 0
        counted = is_stream and num_processes == 1 and dataloader.num_workers == 0  # type: ignore[attr-defined]
        self.stream_batch_size = dataloader.batch_size if counted else None  # type: ignore[attr-defined]
        # The batch sampler of a stream yields None for rows.
        self._records_rows = not is_stream and getattr(dataloader, "in_order", True)
        try:
            with observed_batches(dataloader, self, position > 0) as self._is_observed:
                if self.quarantine is not None:
                    self.boundary.call("quarantine", self.quarantine.begin_epoch, self._is_observed and not is_stream)
                yield
        finally:  # what somebody fetches by hand is not checked
            self.batches, self.notes, self._check, self.stream_batch_size = [], [], None, None

    @property
    def are_judged(self) -> bool:
        """Whether labels mean what they do to the losses of the hosts."""
        return self._check is not None and self._check.limits.known

    # ---- as the observer of the dataloader ----

    def begin_pass(self) -> list[Any] | None:
        return self.batches if self._records_rows else None

    def replace(self, batch: object) -> object:
        return batch if self.quarantine is None else self.quarantine.replace(batch)

    def collate(self, collator: Callable[[list], object]) -> Callable[[list], object]:
        return collator if self._check is None else CheckedCollator(collator, self._check)

    def receive(self, data: object) -> object:
        batch, note = data if isinstance(data, NotedBatch) else (data, BatchNote())
        self.notes.append(note)
        return batch

    def receive_unseen(self, data: object) -> object:
        self.notes.append(BatchNote())
        return data.batch if isinstance(data, NotedBatch) else data

    # ---- as the trainer gets the batches ----

    def next(self, batch: object) -> tuple[object, BatchNote, list[int] | None]:
        """Returns the next batch with its note and its rows, which are `None` if they cannot be known. A batch that was not
        checked before is checked now."""
        position, self.position = self.position, self.position + 1
        note = self.notes[position] if self._is_observed and position < len(self.notes) else None
        if note is None:
            batch, note = (batch, BatchNote()) if self._check is None else self._check(batch)
        return batch, note, self._rows(position, _size(batch) if note.num_samples is None else note.num_samples)

    def _rows(self, position: int, size: float) -> list[int] | None:
        if self.stream_batch_size is not None:
            first = position * self.stream_batch_size
            return list(range(first, first + int(min(size, self.stream_batch_size))))
        rows = self.batches[position] if position < len(self.batches) else None
        # Keys of a dataset need not be numbers.
        numbers = [int(row) for row in rows] if rows and all(isinstance(row, Integral) for row in rows) else None
        return self.prepared.name(numbers)


def _size(batch: object) -> int | float:
    """Returns how many samples a batch has (the last of a stream may be short), infinite if that is not known."""
    if isinstance(batch, Mapping):
        return next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim), math.inf)
    return len(batch) if isinstance(batch, list) else math.inf
