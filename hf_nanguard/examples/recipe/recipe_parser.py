"""The command line of the recipes: TRL's own flags and YAML files, with presets below them.

Which value holds: a flag, else the file of `--config`, else the preset, else what the embedded task needs, else TRL's default.
One exception: the embedded model knows next to nothing, where a preset's learning rate, meant for pretrained models, would
teach it nothing in a minute; it keeps its own unless a flag or the file says otherwise.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.utils import is_torch_bf16_gpu_available
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from ...errors import ArgumentError
from .command_line import RecipeParser
from .presets import read_preset, read_yaml

OWN_OF_EMBEDDED = ("learning_rate",)
PRECISIONS = ("bf16", "fp16")


@dataclass
class RecipeFlags:
    """What a recipe takes besides the arguments of TRL's scripts."""

    preset: str | None = field(default=None, metadata={"help": "balanced or ultra_conservative: arguments that hold."})
    compare: bool = field(
        default=False,
        metadata={"help": "Plant a failure, run stock and guarded on it, below --output_dir, and print both."},
    )
    json: bool = field(
        default=False,
        metadata={"help": "Print what came of it as one JSON object, and everything else on standard error."},
    )


@dataclass(frozen=True)
class RecipeKind:
    """A kind of training.

    Args:
        name (`str`):
            Of its command and its presets.
        script (`type`), training (`type`):
            Dataclasses of its script's and its trainer's arguments.
        embedded (`Mapping`):
            Arguments when there is neither a model nor data, for a small model that knows nothing.
        task (`Mapping`):
            Arguments when there is a model, but no data.
    """

    name: str
    script: type
    training: type
    embedded: Mapping[str, Any]
    task: Mapping[str, Any]


@dataclass
class RecipeArguments:
    """A parsed command line: TRL's own objects, what is to be made in code, and what should be said about it."""

    recipe: RecipeFlags
    script: ScriptArguments
    training: Any
    model: ModelConfig
    mixture: DatasetMixtureConfig
    embedded_model: bool
    embedded_data: bool
    notes: list[str]


class DialectParser(RecipeParser, TrlParser):
    """TRL's parser, as strict as that of every recipe."""

    help_flag = "--help_all"


def build_parser(kind: RecipeKind) -> DialectParser:
    """Returns the parser of all flags of a kind."""
    types: Any = (RecipeFlags, kind.script, kind.training, ModelConfig, DatasetMixtureConfig)
    return DialectParser(types, prog=f"nanguard {kind.name}", allow_abbrev=False)


def parse(words: Sequence[str], kind: RecipeKind) -> RecipeArguments:
    """Returns what a command line asks for.

    Raises:
        `ArgumentError`: an unknown flag, name in a file or preset, or a value that cannot be.
    """
    parser = build_parser(kind)
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.error = parser.error  # type: ignore[method-assign]
    before.add_argument("--config")
    found, rest = before.parse_known_args(list(words))
    config = {} if found.config is None else read_yaml(found.config)
    _set_environment(config.pop("env", {}), found.config)
    parser.set_layer(config, f"--config {found.config}")
    return _layer(parser, rest, kind, parser.read_flags(rest), config)


def _layer(
    parser: DialectParser, words: list[str], kind: RecipeKind, given: argparse.Namespace, config: dict[str, Any]
) -> RecipeArguments:
    """Puts the layers below the flags on top of each other and parses again."""
    no_data = given.dataset_name is None and not given.datasets  # an empty name is a mistake
    no_model = given.model_name_or_path is None
    if no_model and not no_data:
        named = "datasets" if given.datasets else f"--dataset_name {given.dataset_name!r}"
        raise ArgumentError(
            f"--model_name_or_path must be given with a dataset, got {named} alone. Leave out both for the embedded task."
        )
    family = "lora" if kind.name == "sft" and given.use_peft else kind.name
    device, notes = find_precision()
    preset = {**({} if given.preset is None else read_preset(family, given.preset)), **device}
    if any(name in config or _is_given(name, words) for name in PRECISIONS):  # one that is given rules the other out
        preset = {name: value for name, value in preset.items() if name not in PRECISIONS}
        notes = []
    base = dict(kind.embedded) if no_model else dict(kind.task) if no_data else {}
    own = {name: base[name] for name in OWN_OF_EMBEDDED if no_model and name in base}
    notes += [
        f"the embedded model knows next to nothing, so it keeps its {name} of {value}; the preset's {preset[name]} is "
        f"for pretrained models. --{name} sets another."
        for name, value in own.items()
        if name in preset and name not in config and not _is_given(name, words)
    ]
    if given.datasets and given.dataset_name is not None:
        notes.append(f"datasets is used, so --dataset_name {given.dataset_name} is not.")
    parser.set_layer({**base, **preset, **own, **config}, f"--preset {given.preset}")
    recipe, script, training, model, mixture, *_ = parser.parse_all(words)
    return RecipeArguments(recipe, script, training, model, mixture, no_model, no_data, notes)


def find_precision() -> tuple[dict[str, Any], list[str]]:
    """Returns what the device asks for below the flags, where TRL and the presets would take bfloat16, and notes on it."""
    if not torch.accelerator.is_available():
        return {"use_cpu": True}, []  # without it the host refuses bfloat16 on a CPU
    if is_torch_bf16_gpu_available():
        return {}, []
    note = "this device has no bfloat16, so it is float16, with a loss scaler. --fp16 false --bf16 false is float32."
    return {"bf16": False, "fp16": True}, [note]


def _is_given(name: str, words: Sequence[str]) -> bool:
    flags = {f"--{name}", f"--{name.replace('_', '-')}"}
    return any(word.split("=")[0] in flags for word in words)


def _set_environment(variables: Any, source: str | None) -> None:
    if not isinstance(variables, dict):
        raise ArgumentError(f"{source}: env must be names and values, got {variables!r}.")
    os.environ.update({str(name): str(value) for name, value in variables.items()})
