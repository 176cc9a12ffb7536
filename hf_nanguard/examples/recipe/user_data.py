"""The model and data that the user named, loaded as TRL's scripts do. Errors are one sentence."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from trl import ModelConfig, get_dataset, get_peft_config, get_quantization_config

from ...errors import ArgumentError
from ...plain_text import first_line
from ..compare import Options
from ..tasks import sums
from .recipe_parser import RecipeArguments
from .safe_weights import require_safetensors

Rows: TypeAlias = Dataset | IterableDataset

# A missing file or repository, an unknown format, unreadable or missing content, no network.
UNREADABLE = (DatasetNotFoundError, DatasetGenerationError, LookupError, OSError, StopIteration, ValueError)


def load_model(arguments: RecipeArguments, build_model: Callable[[int], PreTrainedModel]) -> Options:
    """Returns the arguments of a trainer's constructor about its model, as TRL's scripts pass them.

    The built-in model is given as a function that builds it. A tokenizer is part of them if the data is built in.
    """
    options, args = arguments.model, arguments.training
    source = {"revision": options.model_revision, "trust_remote_code": args.trust_remote_code}

    def load(auto_class: type[AutoConfig] | type[AutoTokenizer], must: str):
        name = str(options.model_name_or_path)
        try:
            return auto_class.from_pretrained(name, **source)
        except (OSError, ValueError) as error:
            raise ArgumentError(f"--model_name_or_path must {must}, got {name!r} ({first_line(error)}).") from error

    parts: Options = {"model": options.model_name_or_path}
    if arguments.embedded_model:
        parts = {
            "model": lambda: fit_model(build_model(args.seed), options),
            "processing_class": sums.build_tokenizer(),
        }
    else:
        load(AutoConfig, "be a folder with a model or the name of one on the hub")
        # TRL's trainers read these; what the user gave there takes precedence over the flags.
        flags = {"attn_implementation": options.attn_implementation, "dtype": options.dtype}
        allow = arguments.flags.allow_pickle
        safe = require_safetensors(str(options.model_name_or_path), "--model_name_or_path", allow)
        args.model_init_kwargs = {**source, **flags, **safe, **(args.model_init_kwargs or {})}
        if arguments.embedded_data:
            parts["processing_class"] = load(AutoTokenizer, "come with a tokenizer")
    try:
        peft = get_peft_config(options)
        return {**parts, "peft_config": peft, "quantization_config": get_quantization_config(options)}
    except ValueError as error:  # peft is not installed
        raise ArgumentError(f"--use_peft cannot work: {first_line(error)}") from error


def fit_model(model: PreTrainedModel, options: ModelConfig) -> PreTrainedModel:
    """Returns the built-in model with the attention and the dtype of the flags."""
    if options.attn_implementation is not None:
        model.set_attn_implementation(options.attn_implementation)
    return model if options.dtype in (None, "auto") else model.to(getattr(torch, options.dtype))


def load_data(arguments: RecipeArguments, forms: Sequence[Sequence[str]]) -> Options:
    """Returns the training data, and the evaluation data if the training arguments evaluate, as arguments of a trainer.

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

    def pick(which: str) -> Rows:
        split = getattr(script, f"dataset_{which}_split")
        if split not in splits:
            known = ", ".join(splits)
            raise ArgumentError(f"--dataset_{which}_split must be one of {known} in dataset {name!r}, got {split!r}.")
        return splits[split]

    picked = {"train_dataset": pick("train")}
    if arguments.training.eval_strategy != "no":
        picked["eval_dataset"] = pick("test")
    for rows in picked.values():
        check_columns(rows, forms, name)
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
