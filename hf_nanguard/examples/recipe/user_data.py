"""The model and data that the user named, loaded as TRL's scripts do. Errors are one sentence."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, get_dataset

from ...errors import ArgumentError
from ...plain_text import first_line
from ..compare import Options
from .safe_weights import require_safetensors

Rows: TypeAlias = Dataset | IterableDataset

# A missing file or repository, an unknown format, unreadable or missing content, no network.
UNREADABLE = (DatasetNotFoundError, DatasetGenerationError, LookupError, OSError, StopIteration, ValueError)


def find_model_options(model_args: ModelConfig, args: Any, allow_pickle: bool) -> Options:
    """Returns `model_init_kwargs` of TRL's trainers, as its scripts set them, with safetensors only unless pickles are allowed.

    What the user gave there takes precedence over the flags. A model that does not exist is reported now.
    """
    name = str(model_args.model_name_or_path)
    source = _find_source(model_args, args)
    _load(AutoConfig, name, source, "be a folder with a model or the name of one on the hub")
    flags = {"attn_implementation": model_args.attn_implementation, "dtype": model_args.dtype}
    safe = require_safetensors(name, "--model_name_or_path", allow_pickle)
    return {**source, **flags, **safe, **(args.model_init_kwargs or {})}


def load_tokenizer(model_args: ModelConfig, args: object) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of the user's model."""
    source = _find_source(model_args, args)
    return _load(AutoTokenizer, str(model_args.model_name_or_path), source, "come with a tokenizer")


def _find_source(model_args: ModelConfig, args: Any) -> Options:
    return {"revision": model_args.model_revision, "trust_remote_code": args.trust_remote_code}


def _load(auto_class: type[AutoConfig] | type[AutoTokenizer], name: str, source: Options, must: str) -> Any:
    try:
        return auto_class.from_pretrained(name, **source)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--model_name_or_path must {must}, got {name!r} ({first_line(error)}).") from error


def fit_model(model: PreTrainedModel, model_args: ModelConfig) -> PreTrainedModel:
    """Returns the built-in model with the attention and the dtype of the flags."""
    if model_args.attn_implementation is not None:
        model.set_attn_implementation(model_args.attn_implementation)
    return model if model_args.dtype in (None, "auto") else model.to(getattr(torch, model_args.dtype))


def load_rows(
    script: ScriptArguments, mixture: DatasetMixtureConfig, args: TrainingArguments, forms: Sequence[Sequence[str]]
) -> Options:
    """Returns `train_dataset`, and `eval_dataset` if the training arguments evaluate.

    Each must have all columns of one of `forms`.
    """
    name, flag = script.dataset_name, "--dataset_name"
    try:
        if mixture.datasets:
            flag, name = "datasets", ", ".join(str(part.path) for part in mixture.datasets)
            splits = get_dataset(mixture)
        else:
            splits = load_dataset(name, name=script.dataset_config, streaming=script.dataset_streaming)
    except UNREADABLE as error:
        raise ArgumentError(
            f"{flag} must be a folder with data files or the name of a dataset on the hub, got {name!r} "
            f"({first_line(error)})."
        ) from error

    def pick(which: str, split: str) -> Rows:
        if split not in splits:
            known = ", ".join(splits)
            raise ArgumentError(f"--dataset_{which}_split must be one of {known} in dataset {name!r}, got {split!r}.")
        check_columns(splits[split], forms, name)
        return splits[split]

    picked = {"train_dataset": pick("train", script.dataset_train_split)}
    if args.eval_strategy != "no":
        picked["eval_dataset"] = pick("test", script.dataset_test_split)
    return picked


def check_columns(rows: Rows, forms: Sequence[Sequence[str]], name: str | None) -> None:
    """Checks that the dataset has the columns of a form, and a value in each of its rows."""
    columns = rows.column_names
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
