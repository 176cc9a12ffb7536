"""The command line of `nanguard sft` and `nanguard grpo`: TRL's flags and YAML files, with presets below them.

Precedence, highest first: flag, file of `--config`, preset, defaults of the built-in task, TRL's default. One exception:
the built-in model is untrained, and a preset's learning rate is too low for it. It keeps its own unless a flag or the
file sets one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import is_torch_bf16_gpu_available
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

from ...errors import ArgumentError
from .command_line import RecipeParser, argument
from .presets import read_preset
from .safe_weights import PICKLE_HELP

PRECISIONS = ("bf16", "fp16")


@dataclass
class RecipeFlags:
    """Flags of a recipe besides those of TRL's scripts."""

    preset: str | None = argument(None, "Arguments that work: balanced or ultra_conservative.")
    compare: bool = argument(
        False, "Plant a failure, run stock and guarded, below --output_dir, and print both outcomes."
    )
    json: bool = argument(False, "Print the result as one JSON object, and everything else on standard error.")
    allow_pickle: bool = argument(False, PICKLE_HELP)


@dataclass(frozen=True)
class RecipeKind:
    """A kind of training: the name of its command and presets, the dataclasses of its arguments, and its guarded trainer."""

    name: str
    script: type
    training: type
    trainer: type
    embedded: Mapping[str, object]  # defaults when neither a model nor data is given, for the small built-in model
    task: Mapping[str, object]  # defaults when a model is given, but no data


@dataclass
class RecipeArguments:
    """A parsed command line: TRL's own objects, whether model and data are the built-in ones, and notes to print."""

    kind: RecipeKind
    flags: RecipeFlags
    script: ScriptArguments
    training: Any
    model: ModelConfig
    mixture: DatasetMixtureConfig
    embedded_model: bool
    embedded_data: bool
    notes: list[str]


def build_parser(kind: RecipeKind) -> RecipeParser:
    """Returns the parser of all flags of a kind."""
    types = (RecipeFlags, kind.script, kind.training, ModelConfig, DatasetMixtureConfig)
    return RecipeParser(types, "--help_all", prog=f"nanguard {kind.name}")


def parse(words: Sequence[str], kind: RecipeKind) -> RecipeArguments:
    """Returns the arguments of a command line."""
    parser = build_parser(kind)
    given, config = parser.read_config(words)
    chosen = {*config, *(word.split("=")[0].lstrip("-").replace("-", "_") for word in words if word.startswith("--"))}
    no_data = given.dataset_name is None and not given.datasets  # an empty name is a mistake
    no_model = given.model_name_or_path is None
    if no_model and not no_data:
        named = "datasets" if given.datasets else f"--dataset_name {given.dataset_name!r}"
        raise ArgumentError(
            f"--model_name_or_path must be given with a dataset, got {named} alone. Leave out both for the built-in task."
        )
    device, notes = find_precision()
    preset = {**read_preset("lora" if kind.name == "sft" and given.use_peft else kind.name, given.preset), **device}
    if chosen & set(PRECISIONS):  # a given precision replaces the other one too
        preset = {name: value for name, value in preset.items() if name not in PRECISIONS}
        notes = []
    base = kind.embedded if no_model else kind.task if no_data else {}
    rate = preset.pop("learning_rate", None) if no_model else None
    if rate is not None and "learning_rate" not in chosen:
        notes.append(
            f"the built-in model is untrained, so it keeps its learning_rate of {base['learning_rate']}; the preset's {rate} "
            "is for pretrained models. Set another with --learning_rate."
        )
    if no_data and not no_model:
        notes.append(
            "no dataset is given, so the model is trained on the built-in task. Name yours with --dataset_name."
        )
    if given.datasets and given.dataset_name is not None:
        notes.append(f"--dataset_name {given.dataset_name} is ignored because datasets is given.")
    parser.set_layer({**base, **preset, **config}, f"--preset {given.preset}")
    flags, script, training, model, mixture = parser.parse_all(words)
    return RecipeArguments(kind, flags, script, training, model, mixture, no_model, no_data, notes)


def find_precision() -> tuple[dict[str, bool], list[str]]:
    """Returns arguments for devices without bfloat16, which TRL and the presets use by default, and notes about them."""
    if not torch.accelerator.is_available():
        return {"use_cpu": True}, []  # without it the host refuses bfloat16 on a CPU
    if is_torch_bf16_gpu_available():
        return {}, []
    note = "this device has no bfloat16, so float16 with a loss scaler is used. For float32: --fp16 false --bf16 false."
    return {"bf16": False, "fp16": True}, [note]
