"""Models and data that a user names, loaded as TRL's scripts do, with one sentence for what cannot be."""

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from transformers import AutoConfig, AutoTokenizer
from trl import get_dataset, get_peft_config, get_quantization_config

from ...errors import ArgumentError
from .recipe_parser import RecipeArguments

# A missing file or repository, a format nobody knows, content that cannot be read or is not there, no network.
UNREADABLE = (DatasetNotFoundError, DatasetGenerationError, LookupError, OSError, StopIteration, ValueError)


def check_model(plan: RecipeArguments) -> None:
    """Complains about a model that is not there before anything is built."""
    name = str(plan.model.model_name_or_path)
    options = {"revision": plan.model.model_revision, "trust_remote_code": plan.training.trust_remote_code}
    try:
        AutoConfig.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"--model_name_or_path must be a folder with a model or the name of one on the hub, got {name!r} "
            f"({_shorten(error)})."
        ) from error


def load_tokenizer(plan: RecipeArguments) -> Any:
    """Returns the tokenizer of the model that was named."""
    options = {"revision": plan.model.model_revision, "trust_remote_code": plan.training.trust_remote_code}
    name = plan.model.model_name_or_path
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"--model_name_or_path must come with a tokenizer, got {name!r} ({_shorten(error)})."
        ) from error


def load_data(plan: RecipeArguments, forms: Sequence[Sequence[str]]) -> tuple[Any, Any]:
    """Returns the training data that was named, and the evaluation data if there is an evaluation.

    Args:
        plan (`RecipeArguments`):
            The command line.
        forms (`Sequence[Sequence[str]]`):
            Sets of columns, one of which must be there.
    """
    script, name, flag = plan.script, plan.script.dataset_name, "--dataset_name"
    try:
        if plan.mixture.datasets:
            flag = "datasets"
            name = ", ".join(str(part.path) for part in plan.mixture.datasets)
            splits = get_dataset(plan.mixture)
        else:
            splits = load_dataset(name, name=script.dataset_config, streaming=script.dataset_streaming)
    except UNREADABLE as error:
        raise ArgumentError(
            f"{flag} must be a folder with data files or the name of a dataset on the hub, got {name!r} "
            f"({_shorten(error)})."
        ) from error
    train = _pick(splits, script.dataset_train_split, "--dataset_train_split", name)
    evaluates = plan.training.eval_strategy != "no"
    test = _pick(splits, script.dataset_test_split, "--dataset_test_split", name) if evaluates else None
    for rows in (train, test):
        _check_columns(rows, forms, name)
    return train, test


def _pick(splits: Any, split: str, flag: str, name: str | None) -> Any:
    if split not in splits:
        raise ArgumentError(f"{flag} must be one of {', '.join(splits)} in dataset {name!r}, got {split!r}.")
    return splits[split]


def _check_columns(rows: Any, forms: Sequence[Sequence[str]], name: str | None) -> None:
    columns = rows.column_names if rows is not None else None
    if columns is None:  # a stream may not know them yet
        return
    there = [form for form in forms if set(form) <= set(columns)]
    if not there:
        needed = ", or ".join(" and ".join(form) for form in forms)
        raise ArgumentError(
            f"the dataset must have the column {needed}; {name!r} has {', '.join(columns) or 'none'}. Rename its columns."
        )
    if not isinstance(rows, Dataset):
        return
    empty = {column: rows.data.column(column).null_count for form in there for column in form}
    if all(any(empty[column] for column in form) for form in there):
        column = next(column for column in there[0] if empty[column])
        raise ArgumentError(
            f"the dataset must have a {column} in every row; in {name!r} {empty[column]} of {len(rows)} have none. Remove them."
        )


def name_parts(plan: RecipeArguments) -> dict[str, Any]:
    """Returns what the trainer's constructor needs to load the model that was named, as TRL's scripts give it."""
    try:
        return {
            "model": plan.model.model_name_or_path,
            "peft_config": get_peft_config(plan.model),
            "quantization_config": get_quantization_config(plan.model),
        }
    except ValueError as error:  # peft is not installed
        raise ArgumentError(f"--use_peft cannot work: {_shorten(error)}") from error


def set_model_options(plan: RecipeArguments) -> None:
    """Puts the flags about how to load a model where TRL's trainers look for them; what is there already wins."""
    flags = {
        "revision": plan.model.model_revision, "trust_remote_code": plan.training.trust_remote_code,
        "attn_implementation": plan.model.attn_implementation, "dtype": plan.model.dtype,
    }  # fmt: skip
    plan.training.model_init_kwargs = {**flags, **(plan.training.model_init_kwargs or {})}


def fit_model(model: Any, plan: RecipeArguments) -> Any:
    """Returns a model that was made here as the flags want it."""
    options = plan.model
    if options.attn_implementation is not None:
        model.set_attn_implementation(options.attn_implementation)
    return model if options.dtype in (None, "auto") else model.to(getattr(torch, options.dtype))


def _shorten(error: BaseException) -> str:
    """Returns the first sentence of an error, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.split(". ")[0].rstrip(".")
