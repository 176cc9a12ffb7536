"""How the rows of a dataset that TRL has prepared relate to those of the dataset that the user passed in."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from glob import iglob
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from ...boundary import Boundary
from .trainer_protocol import HostTrainer

MAX_PATHS = 10_000  # that are looked at for the files of a dataset


def is_hf_dataset(dataset: object) -> bool:
    """Returns whether this is a `datasets.Dataset`. That library is optional: who has such a dataset has loaded it.

    Can go when transformers requires datasets.
    """
    library = sys.modules.get("datasets")
    return library is not None and isinstance(dataset, library.Dataset)


def is_hf_stream(dataset: object) -> bool:
    """Returns whether this is a `datasets.IterableDataset`. Can go together with [`is_hf_dataset`]."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(dataset, library.IterableDataset)


def count_loaded_rows(dataset: Any) -> int | None:
    """Returns how many rows the files of a dataset had, `None` if that is not known. What packs, merges or filters rows changes
    their number, but not this record of it.

    Can go when datasets keeps the row numbers.
    """
    splits = dataset.info.splits if is_hf_dataset(dataset) else None
    loaded = None if splits is None else splits.get(str(dataset.split))
    return None if loaded is None else loaded.num_examples


def find_files(dataset: Any) -> list[str]:
    """Returns the files that a dataset was loaded from, if it has a record of them: those of datasets before 5 do.

    Can go when datasets keeps the row numbers.
    """
    dataset = _unwrap(dataset)
    return list(dataset.info.download_checksums or ()) if is_hf_dataset(dataset) else []


def record_files(dataset: Any, sources: Iterable[str]) -> None:
    """Puts the files that a dataset was loaded from into its record, unless it has one. A source is a file, a pattern of files, a
    folder, or something else, such as a dataset of the hub, which has no file on this machine. Nothing is recorded if there are
    too many to look at, as where a source is a home folder.

    Can go together with [`find_files`].
    """
    dataset = _unwrap(dataset)
    if is_hf_dataset(dataset) and not dataset.info.download_checksums:
        found = list(islice((path for source in sources for path in _list_paths(source)), MAX_PATHS))
        if len(found) < MAX_PATHS:
            dataset.info.download_checksums = {path: {} for path in sorted(found) if Path(path).is_file()}


def _list_paths(source: str) -> Iterator[str]:
    """Yields what may be the files of a source; links to folders are not followed below it."""
    if Path(source).is_file():
        yield source
    elif Path(source).is_dir():
        for folder, inside, names in os.walk(source):
            inside[:] = [name for name in inside if not name.startswith(".")]
            yield from (os.path.join(folder, name) for name in [*inside, *names] if not name.startswith("."))
    else:
        yield from iglob(source, recursive=True)


def keep_merged_files(boundary: Boundary) -> Callable[[], None]:
    """Lets a dataset that is made of several keep the record of their files, which datasets drops; returns what undoes that.

    Can go together with [`find_files`].
    """
    undo, module = ExitStack(), sys.modules.get("datasets.combine")
    # Only where they are called: elsewhere a fingerprint is made of the function.
    for name in () if module is None else MERGES:
        wrapped = boundary.overriding("files of merged datasets", _merge_with_files, vars(module)[name])
        undo.enter_context(patch.object(module, name, wrapped))
    return undo.close


def _merge_with_files(host: Callable[..., Any], /, datasets: list[Any], *args: object, **kwargs: object) -> Any:
    merged = host(datasets, *args, **kwargs)
    recorded = [each.info.download_checksums for each in datasets if each.info.download_checksums]
    if recorded and not merged.info.download_checksums:
        merged.info.download_checksums = {file: size for each in recorded for file, size in each.items()}
    return merged


def _unwrap(dataset: object) -> object:
    """Returns the dataset inside those of a framework. Can go together with [`find_files`]."""
    while not is_hf_dataset(dataset) and (inner := getattr(dataset, "dataset", None)) is not None:
        dataset = inner
    return dataset


MERGES = ("_concatenate_map_style_datasets", "_interleave_map_style_datasets")
# The last words of the names of columns that identify a row.
ID_WORDS = {"id", "uid", "uuid", "guid", "idx", "index", "key", "path", "file", "filename", "url"}


@dataclass(frozen=True)
class PreparedRows:
    """The rows of a prepared dataset."""

    user_rows: np.ndarray | None = None  # for each the row of the user's dataset; `None`: the same number
    num_given: int = 0  # rows that the user passed in, if `user_rows` is known
    is_rebuilt: bool = False  # whether they are named as prepared, because the user's are not known
    removed: list[int] = field(default_factory=list)  # by TRL, of the rows of the user: truncation left nothing in them

    def name(self, rows: list[int] | None) -> list[int] | None:
        """Returns the user's rows for rows of the prepared dataset."""
        return rows if rows is None or self.user_rows is None else self.user_rows[rows].tolist()


def find_prepared_rows(trainer: HostTrainer) -> PreparedRows:
    """Finds the user's rows: TRL tokenizes row by row into a new table, then filters and shuffles by an index on it.

    Can go when TRL keeps the row numbers.
    """
    attributes, dataset = vars(trainer), trainer.train_dataset
    is_prepared = attributes.get("_skip_prepare_dataset", attributes.get("_is_vision_dataset")) is False
    if not is_prepared:
        return PreparedRows()
    if not hasattr(
        dataset, "_indices"
    ):  # a stream, which has been filtered and may have been shuffled or packed on its way
        return PreparedRows(is_rebuilt=is_hf_stream(dataset))
    known: Any = trainer.args
    columns = set(dataset.column_names)
    if getattr(known, "packing", False) or not columns.intersection(("input_ids", "prompt_ids")):
        return PreparedRows(is_rebuilt=True)
    if (
        known.max_length is None and "prompt_ids" not in columns
    ):  # nothing was filtered, and an index may be the user's own
        return PreparedRows(is_rebuilt=bool(getattr(known, "shuffle_dataset", False)))  # SFT of TRL 0.24 has none
    if dataset._indices is None:
        return PreparedRows(is_rebuilt="ref_chosen_logps" in columns)  # these were joined to a copy of the table
    rows = dataset._indices.column(0).to_numpy()
    return PreparedRows(rows, dataset._data.num_rows, removed=_find_removed(dataset, rows, known.max_length))


def find_ids(trainer: HostTrainer, row: int) -> dict[str, str | int]:
    """Returns what columns such as `id`, `doc_id` or `url` say of one of the user's rows, as far as the trainer has kept them.

    Can go when TRL keeps the row numbers: then the user's own dataset has them all.
    """
    dataset, known = trainer.train_dataset, find_prepared_rows(trainer)
    if not is_hf_dataset(dataset) or known.is_rebuilt:
        return {}
    columns = [name for name in dataset.column_names if is_id(name)]
    places = [row] if known.user_rows is None else np.flatnonzero(known.user_rows == row).tolist()
    if not columns or not places or places[0] >= len(dataset):
        return {}
    return pick_ids(dataset.select_columns(columns).with_format(None)[places[0]])


def is_id(column: str) -> bool:
    """Returns whether a column identifies a row, by its name."""
    return column.lower().rsplit("_", 1)[-1] in ID_WORDS


def pick_ids(row: Mapping[str, object]) -> dict[str, str | int]:
    """Returns the values of a row that identify it."""
    return {name: value for name, value in row.items() if is_id(name) and isinstance(value, (str, int))}


def format_ids(ids: Mapping[str, str | int]) -> str:
    """Returns what identifies a row as text."""
    return ", ".join(f"{name}: {value}" for name, value in ids.items())


def count_documents(trainer: HostTrainer, rows: list[int]) -> list[tuple[int, int]]:
    """Returns for rows of a packed dataset how many documents each consists of, nothing if it is not packed.

    Can go when a packed batch says which rows it consists of.
    """
    dataset = trainer.train_dataset
    if "seq_lengths" not in (getattr(dataset, "column_names", None) or ()) or not hasattr(dataset, "_indices"):
        return []
    return [(row, len(lengths)) for row, lengths in zip(rows, dataset[rows]["seq_lengths"], strict=True)]


def _find_removed(dataset: Any, rows: np.ndarray, max_length: int | None) -> list[int]:
    """Returns the rows that TRL's filters remove; the others that are missing were left out by somebody else.

    Can go together with [`find_prepared_rows`].
    """
    table, missing = dataset._data, np.setdiff1d(np.arange(dataset._data.num_rows), rows).tolist()
    if "labels" in dataset.column_names:
        labels = table.column("labels")
        return [row for row in missing if set(labels[row].as_py()) <= {-100}]
    if "prompt_ids" not in dataset.column_names or max_length is None:
        return []
    prompts = table.column("prompt_ids")
    return [row for row in missing if len(prompts[row].as_py()) >= max_length]


def find_training_data(trainer: HostTrainer) -> tuple[object, Callable[[list[object]], object]]:
    """Returns the dataset and the collator as the training dataloader uses them: without columns that the model does not take.

    Can go when the Trainer says what its dataloader collates.
    """
    columns = vars(trainer).get("_signature_columns")
    try:
        if is_hf_dataset(trainer.train_dataset):
            return trainer._remove_unused_columns(trainer.train_dataset), trainer.data_collator
        return trainer.train_dataset, trainer._get_collator_with_removed_columns(trainer.data_collator)
    finally:
        trainer._signature_columns = columns  # the Trainer finds them anew when it trains
