"""Command lines of recipes: dataclasses, `--config`, presets, errors in one sentence.

Which value holds: a flag, else the file of `--config`, else the preset, else the recipe's own default, else the host's.
"""

import argparse
import difflib
import errno
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from transformers import HfArgumentParser, TrainingArguments

from ...errors import ArgumentError
from .presets import list_presets, read_preset, read_yaml


class RecipeParser(HfArgumentParser):
    """The host's parser, which complains in one sentence and takes layers of values below the flags."""

    help_flag = "--help"

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{_end(message)} Run `{self.prog} {self.help_flag}` for what it takes.")

    def read_flags(self, words: Sequence[str]) -> argparse.Namespace:
        """Returns the flags; one that nobody knows is an error."""
        given, unknown = self.parse_known_args(list(words))
        if unknown:
            self.error(self.name_unknown(unknown[0]))
        return given

    def set_layer(self, values: Mapping[str, Any], source: str) -> None:
        """Makes values the defaults, each checked as if it had been a flag.

        Args:
            values (`Mapping`):
                By the name of their flag.
            source (`str`):
                Where they come from, for a complaint.
        """
        actions = {action.dest: action for action in self._actions}
        hints = {name: hint for kind in self.dataclass_types for name, hint in get_type_hints(kind).items()}
        layer = {}
        for name, value in values.items():
            if name not in actions:
                raise ArgumentError(_end(f"{source}: {self.name_unknown(name)}"))
            try:
                layer[name] = _convert(value, actions[name], hints.get(name, Any))
            except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
                raise ArgumentError(f"{source}: {name} cannot be {value!r} ({_in_one_line(error)}).") from error
        self.set_defaults(**layer)

    def parse_all(self, words: Sequence[str]) -> tuple[Any, ...]:
        """Returns an object for each dataclass, and one of all other flags if there are any."""
        try:
            parsed = self.parse_args_into_dataclasses(list(words), look_for_args_file=False)
        except ArgumentError:
            raise
        except (ImportError, OSError, TypeError, ValueError) as error:  # how the host's dataclasses complain
            raise ArgumentError(_end(_in_one_line(error))) from error
        for arguments in parsed:
            if isinstance(arguments, TrainingArguments):
                _check_numbers(arguments)
        return parsed

    def name_unknown(self, spelled: str) -> str:
        """Returns that there is no such argument, and the nearest there is."""
        word = spelled.split("=")[0]
        near = difflib.get_close_matches(
            word.lstrip("-").replace("-", "_"), [action.dest for action in self._actions], 1
        )
        dashes = "--" if spelled.startswith("-") else ""
        return f"{word} is no argument of {self.prog}" + (f", did you mean {dashes}{near[0]}?" if near else "")


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _end(sentence: str) -> str:
    return sentence if sentence.endswith(("?", ".")) else f"{sentence}."


def _convert(value: Any, action: argparse.Action, hint: Any) -> Any:
    """Returns a value of a file as the flag would have read it, or complains as the flag would."""
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
    """Complains about numbers that the host takes and fails of later."""
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if (number := vars(args)[name]) < 1:
            raise ArgumentError(f"--{name} must be at least 1, got {number}.")
    if not 0 <= args.learning_rate < math.inf:
        raise ArgumentError(f"--learning_rate must be finite and not negative, got {args.learning_rate}.")


def speaks() -> bool:
    """Returns whether this is not one of a launcher's other ranks, which would say the same."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def one_sentence() -> Iterator[None]:
    """Ends the process with exit code 2 and one sentence if a setting cannot work; a launcher's first rank says it."""
    try:
        yield
    except ArgumentError as error:
        if speaks():
            print(error, file=sys.stderr)
        sys.exit(2)


def check_output(args: TrainingArguments) -> None:
    """Makes the output folder, and checks that there is something to resume from."""
    name = str(args.output_dir)
    try:
        if not name:
            raise FileNotFoundError(errno.ENOENT, "no name")
        os.makedirs(name, exist_ok=True)
        if not os.access(name, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ArgumentError(
            f"--output_dir must be a folder that can be made and written, got {name!r} ({error.strerror}). Choose another "
            "one."
        ) from error
    resumed = args.resume_from_checkpoint
    if isinstance(resumed, str) and not os.path.isdir(resumed):
        raise ArgumentError(
            f"--resume_from_checkpoint must be a folder, got {resumed!r}. Checkpoints are in {name}/checkpoint-<step>."
        )


def parse_arguments(
    types: Sequence[Any],
    argv: Sequence[str] | None,
    defaults: Mapping[str, Any],
    description: str | None = None,
    kind: str | None = None,
    leave_alone: Callable[[argparse.Namespace], Sequence[str]] = lambda given: (),
) -> tuple[Any, ...]:
    """Parses the command line of a recipe on the plain `Trainer` into dataclasses.

    Args:
        types (`Sequence[type]`):
            The dataclasses.
        argv (`Sequence[str]`, *optional*):
            The words after the script's name; those of the process by default.
        defaults (`Mapping`):
            The recipe's own defaults.
        description (`str`, *optional*):
            What `--help` begins with.
        kind (`str`, *optional*):
            Whose presets `--preset` takes; there is none without it.
        leave_alone (`Callable`, *optional*):
            Given the flags, returns the names of what a preset does not set, e.g. rates of a model that starts from
            nothing; that is said.

    Returns:
        `tuple`: one object for each dataclass.

    Raises:
        ArgumentError: if a word, a value or a file cannot be used.

    Example:

    ```python
    script, args = parse_arguments([ScriptArguments, GuardedTrainingArguments], None, {"output_dir": "runs/mine"})
    ```
    """
    style = argparse.RawDescriptionHelpFormatter
    parser = RecipeParser(types, description=description, formatter_class=style, allow_abbrev=False)
    parser.add_argument("--config", help="A YAML file of arguments; flags win over it.")
    if kind is not None:
        parser.add_argument("--preset", help=f"Arguments that hold: {', '.join(list_presets(kind))}.")
    words = list(sys.argv[1:] if argv is None else argv)
    given = parser.read_flags(words)
    parser.set_layer(defaults, "defaults")
    if kind is not None and given.preset is not None:
        values = read_preset(kind, given.preset)
        kept = [name for name in leave_alone(given) if values.pop(name, None) is not None]
        if kept and speaks():
            print(f"The preset is for pretrained models; the one made here keeps its own {', '.join(kept)}.")
        parser.set_layer(values, f"--preset {given.preset}")
    if given.config is not None:
        parser.set_layer(read_yaml(given.config), f"--config {given.config}")
    *parsed, _ = parser.parse_all(words)
    return tuple(parsed)
