"""A few short rows of a training dataset, and the documents inside them.

Rows go through the trainer's own collator, so they keep the form of the dataset; only their length changes. A row of several
documents keeps its first documents, each shortened.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import set_seed

from ...boundary import attempt
from ...core.rng import RngState
from ...hf.compat.prepared_dataset import is_hf_stream
from .law_result import NotApplicable

NUM_READ = 64  # rows of the dataset that are looked at
MAX_DOCUMENTS = 3
LENGTHS = "seq_lengths"  # TRL's name for the lengths of the documents of a packed row
IDS = "input_ids"
MASKED = -100
ARRAYS = (np.ndarray, torch.Tensor)
Row = dict[str, Any]


def read_rows(dataset: Any) -> list[object]:
    """Returns the first rows of a dataset; a stream is read through a copy of it."""
    if dataset is None:
        raise NotApplicable("the trainer has no training dataset")
    if isinstance(dataset, IterableDataset) or is_hf_stream(dataset):
        rows = attempt(lambda: list(islice(iter(copy.deepcopy(dataset)), NUM_READ)), _refuse_stream)
    else:
        rows = [dataset[i] for i in range(min(len(dataset), NUM_READ))]
    if not rows:
        raise NotApplicable("the training dataset is empty")
    return rows


def _refuse_stream(error: Exception) -> NoReturn:
    raise NotApplicable(f"its stream of training data cannot be copied ({type(error).__name__})") from error


def find_documents(row: object) -> list[tuple[int, int]]:
    """Returns begin and end of each document of a row, by what the row says: lengths, positions or document numbers."""
    if not isinstance(row, Mapping) or not _is_sequence(row.get(IDS)) or _is_nested(row[IDS]):
        return []
    size = len(row[IDS])
    starts = [0]
    if _is_sequence(row.get(LENGTHS)):
        starts = [int(sum(row[LENGTHS][:i])) for i in range(len(row[LENGTHS]))]
    elif _is_sequence(row.get("position_ids")) and len(row["position_ids"]) == size:
        starts = [i for i, position in enumerate(row["position_ids"]) if position == 0]
    else:
        numbers: Sequence[int] = next(
            (
                row[name]
                for name in ("seq_idx", "document_ids", "attention_mask")
                if _is_sequence(row.get(name)) and len(row[name]) == size and max(row[name], default=0) > 1
            ),
            (),
        )
        starts += [i + 1 for i, (a, b) in enumerate(pairwise(numbers)) if a != b and b != 0]
    return list(zip(starts, [*starts[1:], size], strict=True))


def shorten(row: object, limit: int) -> Any:
    """Returns a row whose token fields have at most `limit` entries: the last ones, or of several documents the last ones
    of the first documents. A row with images or the like, whose tokens belong together, is returned as it is."""
    if not isinstance(row, Mapping) or any(_is_nested(value) for value in row.values()):
        return row
    documents = find_documents(row)
    if len(documents) > 1 or LENGTHS in row:
        return _shorten_packed(row, documents[:MAX_DOCUMENTS], limit)
    return {name: _tail(value, limit) for name, value in row.items()}


def _shorten_packed(row: Mapping, documents: list[tuple[int, int]], limit: int) -> Row:
    size, each = len(row[IDS]), max(limit // len(documents), 4)
    spans = [(max(start, stop - each), stop) for start, stop in documents]
    short = dict(row)
    for name, value in row.items():
        if _is_sequence(value) and len(value) == size and name != LENGTHS:
            short[name] = [item for start, stop in spans for item in value[start:stop]]
    if LENGTHS in row:
        short[LENGTHS] = [stop - start for start, stop in spans]
    if "position_ids" in row:  # positions begin anew in each document
        short["position_ids"] = [
            row["position_ids"][first] + at
            for (first, _), (start, stop) in zip(documents, spans, strict=True)
            for at in range(stop - start)
        ]
    return short


def cut_document(row: Row, span: tuple[int, int]) -> Row:
    """Returns a row with one of its documents."""
    if len(find_documents(row)) < 2 or measure(row) == span[1] - span[0]:
        return row
    return _shorten_packed(row, [span], span[1] - span[0])


def choose_rows(rows: list[object], num_rows: int) -> list[object]:
    """Returns rows of different lengths: the shortest, the longest and some between."""
    ordered = sorted(rows, key=measure)
    return [ordered[round(i * (len(ordered) - 1) / max(num_rows - 1, 1))] for i in range(num_rows)]


def vary_lengths(rows: list[object]) -> list[object]:
    """Cuts rows of one length to different lengths; rows of several documents, or without tokens, stay as they are."""
    sizes = {measure(row) for row in rows}
    if len(sizes) > 1 or any(len(find_documents(row)) > 1 for row in rows):
        return rows
    size, num = sizes.pop(), len(rows)
    return [shorten(row, max(size * (num + 1 + i) // (2 * num), 3)) for i, row in enumerate(rows)]


def vary_labels(rows: list[Any]) -> list[object]:
    """Masks some labels of rows of one length, so that their numbers of labels differ anyway."""
    if not all(isinstance(row, Mapping) and isinstance(row.get("labels"), list) for row in rows):
        return rows
    masked = [i * len(row["labels"]) // (2 * len(rows)) for i, row in enumerate(rows)]
    return [{**row, "labels": [MASKED] * n + row["labels"][n:]} for row, n in zip(rows, masked, strict=True)]


def repeatable(collate: Callable[[list[object]], object], seed: int = 0) -> Callable[[list[object]], object]:
    """Returns a collator that draws the same random numbers at each call, and leaves the random state as it was."""

    def call(rows: list[object]) -> object:
        state = RngState.capture("cpu")
        try:
            set_seed(seed)
            return collate(rows)
        finally:
            state.restore()

    return call


def identify(batch: object) -> object:
    """Returns what tells a batch from another one, to be compared with `==`."""
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape), batch.double().sum().item(), batch.flatten()[:64].tolist()
    if isinstance(batch, Mapping):
        return {name: identify(value) for name, value in batch.items()}
    return [identify(each) for each in batch] if isinstance(batch, list | tuple) else repr(batch)


def measure(row: object) -> int:
    """Returns the number of entries in the longest token field of a row."""
    sizes = [len(v) for v in row.values() if _is_sequence(v)] if isinstance(row, Mapping) else []
    return max(sizes, default=0)


def change_document(row: Row, span: tuple[int, int], kept: set[int]) -> Row:
    """Returns a row in which each token of one document is another token of the row, except those to be kept."""
    own = [int(token) for token in row[IDS]]
    tokens = sorted(set(own) - kept)
    if len(tokens) < 2:
        raise NotApplicable("its rows have too few different tokens to change one")
    other = {token: tokens[(i + 1) % len(tokens)] for i, token in enumerate(tokens)}
    start, stop = span
    ids = [other.get(token, token) if start <= i < stop else token for i, token in enumerate(own)]
    return {**row, IDS: torch.tensor(ids) if isinstance(row[IDS], torch.Tensor) else ids}


def _is_sequence(value: object) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, ARRAYS) and value.ndim == 1)


def _is_nested(value: object) -> bool:
    if (isinstance(value, ARRAYS) and value.ndim > 1) or (
        hasattr(value, "size") and hasattr(value, "mode")
    ):  # pixels, a picture
        return True
    return isinstance(value, list) and bool(value) and not isinstance(value[0], int | float | str | bool)


def _tail(value: Any, limit: int) -> object:
    is_long = _is_sequence(value) and len(value) > limit
    return value[len(value) - limit :] if is_long and not isinstance(value[0], str) else value
