"""The model and data that the user named, loaded as TRL's scripts do. Errors are one sentence."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import get_dataset, get_peft_config, get_quantization_config

from ...errors import ArgumentError
from ...plain_text import first_line
from ..compare import Options
from .recipe_parser import RecipeArguments

Rows: TypeAlias = Dataset | IterableDataset

# A missing file or repository, an unknown format, unreadable or missing content, no network.
UNREADABLE = (DatasetNotFoundError, DatasetGenerationError, LookupError, OSError, StopIteration, ValueError)


def check_model(arguments: RecipeArguments) -> None:
    """Checks that the model exists before anything is built."""
    _load(AutoConfig, arguments, "be a folder with a model or the name of one on the hub")


def load_tokenizer(arguments: RecipeArguments) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of the model."""
    return _load(AutoTokenizer, arguments, "come with a tokenizer")


def _load(auto_class: type[AutoConfig] | type[AutoTokenizer], arguments: RecipeArguments, must: str):
    name = str(arguments.model.model_name_or_path)
    try:
        return auto_class.from_pretrained(name, **_name_source(arguments))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--model_name_or_path must {must}, got {name!r} ({first_line(error)}).") from error


def _name_source(arguments: RecipeArguments) -> Options:
    return {"revision": arguments.model.model_revision, "trust_remote_code": arguments.training.trust_remote_code}


def load_data(arguments: RecipeArguments, forms: Sequence[Sequence[str]]) -> tuple[Rows, Rows | None]:
    """Returns the training data, and the evaluation data if the training arguments evaluate.

    Each must have all columns of one of `forms`.
    """
    script, name, flag = arguments.script, arguments.script.dataset_name, "--dataset_name"
    try:
        if arguments.mixture.datasets:
            flag = "datasets"
            name = ", ".join(str(part.path) for part in arguments.mixture.datasets)
            splits = get_dataset(arguments.mixture)
        else:
            splits = load_dataset(name, name=script.dataset_config, streaming=script.dataset_streaming)
    except UNREADABLE as error:
        raise ArgumentError(
            f"{flag} must be a folder with data files or the name of a dataset on the hub, got {name!r} "
            f"({first_line(error)})."
        ) from error
    train = _pick(splits, script.dataset_train_split, "--dataset_train_split", name)
    evaluates = arguments.training.eval_strategy != "no"
    test = _pick(splits, script.dataset_test_split, "--dataset_test_split", name) if evaluates else None
    for rows in (train, test):
        _check_columns(rows, forms, name)
    return train, test


def _pick(splits: Mapping[str, Rows], split: str, flag: str, name: str | None) -> Rows:
    if split not in splits:
        raise ArgumentError(f"{flag} must be one of {', '.join(splits)} in dataset {name!r}, got {split!r}.")
    return splits[split]


def _check_columns(rows: Rows | None, forms: Sequence[Sequence[str]], name: str | None) -> None:
    columns = rows.column_names if rows is not None else None
    if columns is None:  # not known yet for some streams
        return
    present = [form for form in forms if set(form) <= set(columns)]
    if not present:
        needed = ", or ".join(" and ".join(form) for form in forms)
        raise ArgumentError(
            f"the dataset must have the column {needed}; {name!r} has {', '.join(columns) or 'none'}. Rename its columns."
        )
    if not isinstance(rows, Dataset):
        return
    empty = {column: rows.data.column(column).null_count for form in present for column in form}
    if all(any(empty[column] for column in form) for form in present):
        column = next(column for column in present[0] if empty[column])
        raise ArgumentError(
            f"the dataset must have a {column} in every row; in {name!r} {empty[column]} of {len(rows)} rows have none. Remove them."
        )


def name_parts(arguments: RecipeArguments) -> Options:
    """Returns the arguments with which a trainer's constructor loads the model, as TRL's scripts pass them."""
    try:
        return {
            "model": arguments.model.model_name_or_path,
            "peft_config": get_peft_config(arguments.model),
            "quantization_config": get_quantization_config(arguments.model),
        }
    except ValueError as error:  # peft is not installed
        raise ArgumentError(f"--use_peft cannot work: {first_line(error)}") from error


def set_model_options(arguments: RecipeArguments) -> None:
    """Puts the flags about loading a model into `model_init_kwargs`, which TRL's trainers read and which take precedence."""
    flags = {"attn_implementation": arguments.model.attn_implementation, "dtype": arguments.model.dtype}
    given = arguments.training.model_init_kwargs or {}
    arguments.training.model_init_kwargs = {**_name_source(arguments), **flags, **given}


def fit_model(model: PreTrainedModel, arguments: RecipeArguments) -> PreTrainedModel:
    """Returns the built-in model with the attention and the dtype of the flags."""
    options = arguments.model
    if options.attn_implementation is not None:
        model.set_attn_implementation(options.attn_implementation)
    return model if options.dtype in (None, "auto") else model.to(getattr(torch, options.dtype))
