"""How the rows of a dataset that TRL has prepared relate to those of the dataset that the user passed in."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np

from .trainer_protocol import HostTrainer


@dataclass(frozen=True)
class PreparedRows:
    """The rows of a prepared dataset.

    Args:
        user_rows (`np.ndarray`, *optional*):
            For each of them the row of the user's dataset; `None` if it is the same number.
        num_given (`int`):
            The number of rows that the user passed in, if `user_rows` is known.
        removed (`list[int]`):
            Those of them that TRL has removed because truncation left nothing to learn from in them.
        is_rebuilt (`bool`):
            Whether they are rows of the prepared dataset because those of the user's cannot be known.
    """

    user_rows: np.ndarray | None = None
    num_given: int = 0
    is_rebuilt: bool = False
    removed: list[int] = field(default_factory=list)

    def name(self, rows: list[int] | None) -> list[int] | None:
        """Returns the user's rows for rows of the prepared dataset."""
        return rows if rows is None or self.user_rows is None else self.user_rows[rows].tolist()


def find_prepared_rows(trainer: HostTrainer) -> PreparedRows:
    """Finds the user's rows: TRL tokenizes row by row into a new table, then filters and shuffles by an index on it.

    Can go when TRL keeps the row numbers.
    """
    attributes, dataset = vars(trainer), trainer.train_dataset
    is_prepared = attributes.get("_skip_prepare_dataset", attributes.get("_is_vision_dataset")) is False
    if not is_prepared or not hasattr(dataset, "_indices"):
        return PreparedRows()
    known: Any = trainer.args
    columns = set(dataset.column_names)
    if getattr(known, "packing", False) or not columns.intersection(("input_ids", "prompt_ids")):
        return PreparedRows(is_rebuilt=True)
    if (
        known.max_length is None and "prompt_ids" not in columns
    ):  # nothing was filtered, and an index may be the user's own
        return PreparedRows(is_rebuilt=bool(known.shuffle_dataset))
    if dataset._indices is None:
        return PreparedRows(is_rebuilt="ref_chosen_logps" in columns)  # these were joined to a copy of the table
    rows = dataset._indices.column(0).to_numpy()
    return PreparedRows(rows, dataset._data.num_rows, removed=_find_removed(dataset, rows, known.max_length))


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


def find_training_data(trainer: HostTrainer) -> tuple[Any, Callable[[list[Any]], Any]]:
    """Returns the dataset and the collator as the training dataloader uses them: without columns that the model does not take.

    Can go when the Trainer says what its dataloader collates.
    """
    columns = vars(trainer).get("_signature_columns")
    try:
        if isinstance(trainer.train_dataset, datasets.Dataset):
            return trainer._remove_unused_columns(trainer.train_dataset), trainer.data_collator
        return trainer.train_dataset, trainer._get_collator_with_removed_columns(trainer.data_collator)
    finally:
        trainer._signature_columns = columns  # the Trainer finds them anew when it trains
