"""Command lines of recipes: dataclasses as in the scripts of transformers and TRL, with `--config` and `--preset`.

Precedence, highest first: flag, file of `--config`, preset, default of the recipe, default of transformers or TRL. One
exception: a model that is built in code is untrained, and a preset's learning rate is too low for it. It keeps its own
unless a flag or the file sets one. Bad arguments are reported in one sentence.
"""

import argparse
import difflib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import torch
from transformers import HfArgumentParser, TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available

from ...command_errors import reword
from ...errors import ArgumentError
from ...plain_text import format_value
from ...yaml_file import read_yaml
from ..output_folder import make_folder
from .presets import read_preset

PRECISIONS = ("bf16", "fp16")


def argument(default: object, help: str) -> Any:
    """Returns a field of a dataclass of arguments."""
    return field(default=default, metadata={"help": help})


@dataclass
class RecipeFlags:
    preset: str | None = argument(None, "Arguments that work: balanced or ultra_conservative.")
    compare: bool = argument(
        False, "Plant a failure, run stock and guarded, below --output_dir, and print both outcomes."
    )
    json: bool = argument(False, "Print the result as one JSON object, and everything else on standard error.")


class RecipeParser(HfArgumentParser):
    """Parser of a recipe's dataclasses, with [`RecipeFlags`] before them.

    Args:
        types: The dataclasses; one of them is a class of training arguments.
        kind: The kind of training whose presets `--preset` takes, a folder of `configs/`.
        defaults: The recipe's own defaults; with `--dataset_name`, those for a model that is built in code.
        data_defaults: With `--dataset_name`, defaults for a model of the user's on the built-in data.
        kept: Arguments that a preset does not change for a model that is built in code.
        prog: The command in errors, by default the script.
    """

    def __init__(
        self,
        types: Sequence[object],
        kind: str,
        defaults: Mapping[str, object],
        data_defaults: Mapping[str, object] = MappingProxyType({}),
        kept: Sequence[str] = ("learning_rate",),
        prog: str | None = None,
        description: str | None = None,
    ):
        layout = argparse.RawDescriptionHelpFormatter if description else argparse.ArgumentDefaultsHelpFormatter
        dataclasses: list[Any] = [RecipeFlags, *types]
        super().__init__(dataclasses, allow_abbrev=False, prog=prog, description=description, formatter_class=layout)
        self.kind, self.defaults, self.data_defaults, self.kept = kind, defaults, data_defaults, kept
        self.help_flag = "--help_all" if prog else "--help"
        self.notes: list[str] = []  # on what was parsed, to be printed
        self.add_argument("--config", help="YAML file of arguments; flags take precedence over it.")

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{_end(reword(message))} Run `{self.prog} {self.help_flag}` to list the arguments.")

    def parse(self, words: Sequence[str] | None = None) -> list[Any]:
        """Returns an object for each dataclass, and makes the output folder. `words` are those of the process by default."""
        words = list(sys.argv[1:] if words is None else words)
        given, config = self._read_config(words)
        chosen = {
            *config,
            *(word.split("=")[0].lstrip("-").replace("-", "_") for word in words if word.startswith("--")),
        }
        self.notes = []
        layer = self._merge(given, chosen)
        self._set_layer({**layer, **config}, f"--preset {given.preset}")
        parsed = self._build(words)
        for arguments in parsed:
            if isinstance(arguments, TrainingArguments):
                _check_numbers(arguments)
                _check_output(arguments)
        return parsed

    def _merge(self, given: argparse.Namespace, chosen: set[str]) -> dict[str, object]:
        """Returns the recipe's defaults with the preset above them, as this device can run them."""
        values = vars(given)
        is_built_in = values.get("model_name_or_path") is None
        defaults = self._find_defaults(values, is_built_in)
        kind = "lora" if self.kind == "sft" and values.get("use_peft") else self.kind
        preset = read_preset(kind, given.preset)
        if chosen & set(PRECISIONS):  # a given precision replaces the other one too
            preset = {name: value for name, value in preset.items() if name not in PRECISIONS}
        kept = {name: preset.pop(name) for name in self.kept if is_built_in and name in preset}
        layer = {"use_cpu": not torch.accelerator.is_available(), **defaults, **preset}
        wants_bf16 = layer.get("bf16", self.get_default("bf16")) is not False  # TRL's default, None, is bfloat16
        if wants_bf16 and not chosen & set(PRECISIONS) and not layer["use_cpu"] and not is_torch_bf16_gpu_available():
            layer |= {"bf16": False, "fp16": True}
            self.notes.append(
                "this device has no bfloat16, so float16 with a loss scaler is used. For float32: --fp16 false --bf16 false."
            )
        for name, value in kept.items():
            if name not in chosen:
                own = layer.get(name, self.get_default(name))
                self.notes.append(
                    f"the built-in model is untrained, so it keeps its {name} of {own}; the preset's {value} is for "
                    f"pretrained models. Set another with --{name}."
                )
        return layer

    def _find_defaults(self, values: Mapping[str, object], is_built_in: bool) -> Mapping[str, object]:
        """Returns the recipe's defaults for what is built in, after a check that the user's data come with a model."""
        if "dataset_name" not in values:
            return self.defaults
        name, mixture = values["dataset_name"], values.get("datasets")
        no_data = name is None and not mixture  # an empty name is a mistake
        if is_built_in and not no_data:
            named = "datasets" if mixture else f"--dataset_name {name!r}"
            raise ArgumentError(
                f"--model_name_or_path must be given with a dataset, got {named} alone. Leave out both for the built-in task."
            )
        if no_data and not is_built_in:
            self.notes.append(
                "no dataset is given, so the model is trained on the built-in task. Name yours with --dataset_name."
            )
        if mixture and name is not None:
            self.notes.append(f"--dataset_name {name} is ignored because datasets is given.")
        return self.defaults if is_built_in else self.data_defaults if no_data else {}

    def _read_config(self, words: list[str]) -> tuple[argparse.Namespace, dict[str, object]]:
        """Returns the flags, with the values of the `--config` file below them, and those values."""
        given, unknown = self.parse_known_args(words)
        if unknown:
            self.error(self._format_unknown(unknown[0]))
        path = given.config
        config = {} if path is None else read_yaml(path)
        _set_variables(config.pop("env", {}), f"{path}: env")
        self._set_layer(config, f"--config {path}")
        return self.parse_args(words), config

    def _set_layer(self, values: Mapping[str, object], source: str) -> None:
        """Makes values the defaults of their flags, after the checks that a flag would get. Errors name `source`."""
        actions = {action.dest: action for action in self._actions}
        hints = {name: hint for kind in self.dataclass_types for name, hint in get_type_hints(kind).items()}
        layer = {}
        for name, value in values.items():
            if name not in actions:
                raise ArgumentError(_end(f"{source}: {self._format_unknown(name)}"))
            try:
                layer[name] = _convert(value, actions[name], hints.get(name, Any))
            except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
                raise ArgumentError(f"{source}: {name} cannot be {format_value(value)} ({_format(error)}).") from error
        self.set_defaults(**layer)

    def _build(self, words: list[str]) -> list[Any]:
        try:
            *parsed, _ = self.parse_args_into_dataclasses(words, look_for_args_file=False)
        except ArgumentError:
            raise
        except (ImportError, OSError, TypeError, ValueError) as error:  # raised by the host's dataclasses
            raise ArgumentError(_end(_format(error))) from error
        return parsed

    def _format_unknown(self, spelled: str) -> str:
        word = spelled.split("=")[0]
        known = [action.dest for action in self._actions]
        near = difflib.get_close_matches(word.lstrip("-").replace("-", "_"), known, 1)
        dashes = "--" if spelled.startswith("-") else ""
        return f"{word} is no argument of {self.prog}" + (f", did you mean {dashes}{near[0]}?" if near else "")


def _set_variables(variables: object, source: str) -> None:
    if not isinstance(variables, dict):
        raise ArgumentError(f"{source} must contain names and values, got {format_value(variables)}.")
    for name, value in variables.items():
        try:
            os.environ[str(name)] = str(value)
        except (ValueError, OSError) as error:  # a name with "=", a zero byte, a text that cannot be encoded
            raise ArgumentError(f"{source} cannot set {format_value(name)} ({_format(error)}).") from error


def _format(error: BaseException) -> str:
    return str(error).strip().rstrip(".") or type(error).__name__


def _end(sentence: str) -> str:
    return sentence if sentence.endswith(("?", ".")) else f"{sentence}."


def _convert(value: object, action: argparse.Action, hint: object) -> object:
    """Returns a value of a YAML file as the flag would have parsed it, or raises as the flag would."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None or isinstance(value, list | dict):
        kinds = [get_origin(part) or part for part in parts]
        if type(value) not in kinds and Any not in kinds:
            raise TypeError("it takes one value, or none" if NoneType in kinds else "it takes one value")
        return value
    if value is False and "no" in (action.choices or ()):
        return "no"  # which YAML reads as false
    if isinstance(value, bool) and (bool in parts or action.type is str):
        return value
    if callable(action.type) and isinstance(value, int | float | str):
        value = action.type(str(value))
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"it takes {', '.join(map(str, action.choices))}")
    return [value] if action.nargs == "+" else value


def _check_numbers(args: TrainingArguments) -> None:
    """Checks numbers that the host accepts at first and fails on later."""
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if (number := getattr(args, name)) < 1:
            raise ArgumentError(f"--{name} must be at least 1, got {number}.")
    if args.max_steps < 1 and args.max_steps != -1:
        raise ArgumentError(f"--max_steps must be at least 1, or -1 to train --num_train_epochs, got {args.max_steps}.")
    if not 0 < args.num_train_epochs < math.inf:
        raise ArgumentError(f"--num_train_epochs must be more than 0 and finite, got {args.num_train_epochs}.")
    if not 0 <= args.learning_rate < math.inf:
        raise ArgumentError(f"--learning_rate must be finite and not negative, got {args.learning_rate}.")


def _check_output(args: TrainingArguments) -> None:
    """Makes the output folder, and checks that the checkpoint to resume from exists."""
    folder = make_folder("--output_dir", str(args.output_dir))
    resumed = args.resume_from_checkpoint
    if isinstance(resumed, str) and not os.path.isdir(resumed):
        raise ArgumentError(
            f"--resume_from_checkpoint must be a folder, got {resumed!r}. Checkpoints are in {folder}/checkpoint-<step>."
        )
