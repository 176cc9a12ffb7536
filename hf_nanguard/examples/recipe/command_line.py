"""Command lines of recipes: dataclasses as in the scripts of transformers and TRL, with `--config` and presets.

Precedence, highest first: flag, file of `--config`, preset, default of the recipe, default of transformers or TRL. Bad
arguments are reported in one sentence.
"""

import argparse
import difflib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import torch
from transformers import HfArgumentParser, TrainingArguments

from ...errors import ArgumentError
from ...plain_text import format_value, printable
from ...yaml_file import read_yaml
from ..compare import Outcome
from ..output_folder import make_folder
from .presets import list_presets, read_preset

# Training arguments of recipes on the plain `Trainer`.
COMMON = {
    "max_grad_norm": 0.5,
    "save_strategy": "no",
    "report_to": ["none"],
    "remove_unused_columns": False,
    "dataloader_pin_memory": False,
    "use_cpu": not torch.accelerator.is_available(),  # without it the ranks of a launcher train apart on a CPU
}


def argument(default: object, help: str) -> Any:
    """Returns a field of a dataclass of arguments."""
    return field(default=default, metadata={"help": help})


@dataclass
class CaseArguments:
    """Arguments of a recipe that reproduces a field report with and without the guard; it adds its own `plant`."""

    compare: bool = argument(True, "Run stock and guarded; false runs guarded only.")
    num_rows: int = argument(256, "Rows of training data.")

    def check_rows(self, bad_row: int) -> None:
        """Raises if there are too few rows to contain the planted one."""
        if self.num_rows <= bad_row:
            raise ValueError(f"--num_rows must be more than {bad_row}, got {self.num_rows}.")


class RecipeParser(HfArgumentParser):
    """Parser of dataclasses that takes values from files and presets, and reports an error in one sentence.

    `help_flag` is the flag that lists all flags, named in errors.
    """

    def __init__(
        self, types: Sequence[Any], help_flag: str = "--help", prog: str | None = None, description: str | None = None
    ):
        layout = argparse.RawDescriptionHelpFormatter if description else argparse.ArgumentDefaultsHelpFormatter
        super().__init__(types, allow_abbrev=False, prog=prog, description=description, formatter_class=layout)
        self.help_flag = help_flag
        self.add_argument("--config", help="YAML file of arguments; flags take precedence over it.")

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{_end(message)} Run `{self.prog} {self.help_flag}` to list the arguments.")

    def read_config(self, words: Sequence[str]) -> tuple[argparse.Namespace, dict[str, object]]:
        """Returns the flags, with the values of the `--config` file below them, and those values."""
        given, unknown = self.parse_known_args(list(words))
        if unknown:
            self.error(self._format_unknown(unknown[0]))
        path = given.config
        config = {} if path is None else read_yaml(path)
        _set_variables(config.pop("env", {}), f"{path}: env")
        self.set_layer(config, f"--config {path}")
        return self.parse_args(list(words)), config

    def set_layer(self, values: Mapping[str, object], source: str) -> None:
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

    def parse_all(self, words: Sequence[str]) -> list[Any]:
        """Returns an object for each dataclass."""
        try:
            *parsed, _ = self.parse_args_into_dataclasses(list(words), look_for_args_file=False)
        except ArgumentError:
            raise
        except (ImportError, OSError, TypeError, ValueError) as error:  # raised by the host's dataclasses
            raise ArgumentError(_end(_format(error))) from error
        for arguments in parsed:
            if isinstance(arguments, TrainingArguments):
                _check_numbers(arguments)
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


def is_local_first() -> bool:
    """Returns whether this is the first rank of its machine, which alone prints what all ranks would print."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def check_output(args: TrainingArguments) -> None:
    """Makes the output folder, and checks that the checkpoint to resume from exists."""
    folder = make_folder("--output_dir", str(args.output_dir))
    resumed = args.resume_from_checkpoint
    if isinstance(resumed, str) and not os.path.isdir(resumed):
        raise ArgumentError(
            f"--resume_from_checkpoint must be a folder, got {resumed!r}. Checkpoints are in {folder}/checkpoint-<step>."
        )


def keep_rate(given: argparse.Namespace) -> Sequence[str]:
    """Returns what a preset must not change for a model that is built in code: it starts from random weights."""
    return ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")


def parse_arguments(
    types: Sequence[type],
    argv: Sequence[str] | None,
    defaults: Mapping[str, object],
    description: str | None = None,
    kind: str | None = None,
    find_kept: Callable[[argparse.Namespace], Sequence[str]] = lambda given: (),
) -> list[Any]:
    """Parses the command line of a recipe into one object for each dataclass, and makes the output folder.

    The training arguments are the last of `types`. `kind` is the kind of training whose presets `--preset` takes; without
    it there is no `--preset`. `find_kept` returns, given the flags, the names of arguments that a preset must not change,
    e.g. the learning rate of a model that is trained from scratch.
    """
    parser = RecipeParser(types, description=description)
    if kind is not None:
        parser.add_argument("--preset", help=f"Arguments that work: {', '.join(list_presets(kind))}.")
    words = list(sys.argv[1:] if argv is None else argv)
    given, config = parser.read_config(words)
    preset = {} if kind is None else read_preset(kind, given.preset)
    kept = [name for name in find_kept(given) if preset.pop(name, None) is not None]
    if kept and is_local_first():
        print(f"The preset is for pretrained models; the model built here keeps its own {', '.join(kept)}.")
    parser.set_layer({**defaults, **preset, **config}, "defaults and --preset")
    parsed = parser.parse_all(words)
    check_output(parsed[-1])
    return parsed


def exit_code(run: Callable[[Sequence[str] | None], list[Outcome]], argv: Sequence[str] | None = None) -> int:
    """Runs a recipe and returns 0 if its guarded run succeeded, 1 if not, 2 for bad arguments, 130 for Ctrl-C."""
    try:
        return 0 if run(argv)[-1].is_sound else 1
    except ArgumentError as error:
        if is_local_first():
            print(printable(str(error)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
