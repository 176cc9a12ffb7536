"""The command line of the recipes: TRL's own flags and YAML files, with presets below them.

Which value holds: a flag, else the file of `--config`, else the preset, else what the embedded task needs, else TRL's default.
One exception: the embedded model starts from nothing, where a preset's learning rate, meant for pretrained models, would
teach it nothing in a minute; it keeps its own unless a flag or the file says otherwise.
"""

import argparse
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from transformers.utils import is_torch_bf16_gpu_available
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from ...errors import ArgumentError
from ..preset import read_preset, read_yaml

OWN_OF_EMBEDDED = ("learning_rate",)
PRECISIONS = ("bf16", "fp16")


@dataclass
class RecipeArguments:
    """What a recipe takes besides the arguments of TRL's scripts."""

    preset: str | None = field(default=None, metadata={"help": "balanced or ultra_conservative: arguments that hold."})
    compare: bool = field(
        default=False,
        metadata={"help": "Plant a failure, run stock and guarded on it, below --output_dir, and print both."},
    )


@dataclass(frozen=True)
class Kind:
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
class Plan:
    """A parsed command line: TRL's own objects, what is to be made in code, and what should be said about it."""

    recipe: RecipeArguments
    script: ScriptArguments
    training: Any
    model: ModelConfig
    mixture: DatasetMixtureConfig
    embedded_model: bool
    embedded_data: bool
    notes: list[str]


class _Parser(TrlParser):
    """TRL's parser, which complains in one sentence."""

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith("?") else "."
        raise ArgumentError(f"{message}{end} Run `{self.prog} --help_all` for what it takes.")


def build_parser(kind: Kind) -> TrlParser:
    """Returns the parser of all flags of a kind."""
    types: Any = (RecipeArguments, kind.script, kind.training, ModelConfig, DatasetMixtureConfig)
    return _Parser(types, prog=f"nanguard {kind.name}", allow_abbrev=False)


def parse(words: Sequence[str], kind: Kind) -> Plan:
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
    _set_defaults(parser, config, found.config)
    given, unknown = parser.parse_known_args(rest)
    if unknown:
        parser.error(_name_unknown(unknown[0], parser))
    return _layer(parser, rest, kind, given, config)


def _layer(parser: TrlParser, words: list[str], kind: Kind, given: argparse.Namespace, config: dict[str, Any]) -> Plan:
    """Puts the layers below the flags on top of each other and parses again."""
    no_data = not given.dataset_name and not given.datasets
    no_model = given.model_name_or_path is None
    if no_model and not no_data:
        raise ArgumentError(
            f"--model_name_or_path must be given with a dataset, got --dataset_name {given.dataset_name!r} alone. "
            "Leave out both for the embedded task."
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
        f"the embedded model starts from nothing, so it keeps its {name} of {value}; the preset's {preset[name]} is "
        f"for pretrained models. --{name} sets another."
        for name, value in own.items()
        if name in preset and name not in config and not _is_given(name, words)
    ]
    _set_defaults(parser, {**base, **preset, **own, **config}, "--preset")
    try:
        parsed = parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    except ArgumentError:
        raise
    except (ValueError, TypeError) as error:  # how the host's dataclasses complain about their values
        raise ArgumentError(f"the arguments cannot work together: {_first_line(error)}") from error
    recipe, script, training, model, mixture = parsed[:5]
    return Plan(recipe, script, training, model, mixture, no_model, no_data, notes)


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


def _set_defaults(parser: TrlParser, values: Mapping[str, Any], source: str | None) -> None:
    """Makes values the parser's defaults, each checked as if it had been a flag."""
    actions = {action.dest: action for action in parser._actions}
    for name, value in values.items():
        if name not in actions:
            raise ArgumentError(f"{source}: {_name_unknown(name, parser)}.")
        convert = actions[name].type
        if callable(convert) and isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                convert(str(value))
            except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
                raise ArgumentError(f"{source}: {name} cannot be {value!r} ({_first_line(error)}).") from error
    parser.set_defaults_with_config(**values)


def _set_environment(variables: Any, source: str | None) -> None:
    if not isinstance(variables, dict):
        raise ArgumentError(f"{source}: env must be names and values, got {variables!r}.")
    os.environ.update({str(name): str(value) for name, value in variables.items()})


def _name_unknown(spelled: str, parser: TrlParser) -> str:
    name = spelled.split("=")[0].lstrip("-").replace("-", "_")
    near = difflib.get_close_matches(name, [action.dest for action in parser._actions], 1)
    dashes = "--" if spelled.startswith("-") else ""
    hint = f", did you mean {dashes}{near[0]}?" if near else ""
    return f"{spelled.split('=')[0]} is no argument of {parser.prog}{hint}".rstrip("?") + ("?" if near else "")


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
