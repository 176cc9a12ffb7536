"""The command line of a recipe on the plain `Trainer`: dataclasses, `--config`, presets, errors in one sentence.

Which value holds: a flag, else the file of `--config`, else the preset, else the recipe's own default, else the host's.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from transformers import HfArgumentParser

from ..errors import ArgumentError
from .preset import list_presets, read_preset, read_yaml


class _Parser(HfArgumentParser):
    """The host's parser, which complains in one sentence."""

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith("?") else "."
        raise ArgumentError(f"{message}{end} Run `python {self.prog} --help` for what it takes.")


def _speaks() -> bool:
    """Returns whether this is not one of a launcher's other ranks, which would say the same."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def one_sentence() -> Iterator[None]:
    """Ends the process with exit code 2 and one sentence if a setting cannot work; a launcher's first rank says it."""
    try:
        yield
    except ArgumentError as error:
        if _speaks():
            print(error, file=sys.stderr)
        sys.exit(2)


def parse_arguments(
    types: Sequence[Any],
    argv: Sequence[str] | None,
    defaults: Mapping[str, Any],
    description: str | None = None,
    kind: str | None = None,
    leave_alone: Callable[[argparse.Namespace], Sequence[str]] = lambda given: (),
) -> tuple[Any, ...]:
    """Parses a command line into dataclasses.

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
    parser = _Parser(types, description=description, formatter_class=style, allow_abbrev=False)
    parser.add_argument("--config", help="A YAML file of arguments; flags win over it.")
    if kind is not None:
        parser.add_argument("--preset", help=f"Arguments that hold: {', '.join(list_presets(kind))}.")
    words = list(sys.argv[1:] if argv is None else argv)
    given, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(f"{unknown[0]} is no argument of this recipe")
    _set_defaults(parser, defaults, "defaults")
    if kind is not None and given.preset is not None:
        values = read_preset(kind, given.preset)
        kept = [name for name in leave_alone(given) if values.pop(name, None) is not None]
        if kept and _speaks():
            print(f"The preset is for pretrained models; the one made here keeps its own {', '.join(kept)}.")
        _set_defaults(parser, values, f"--preset {given.preset}")
    if given.config is not None:
        _set_defaults(parser, read_yaml(given.config), f"--config {given.config}")
    try:
        *parsed, _ = parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    except ArgumentError:
        raise
    except (TypeError, ValueError) as error:  # how the host's dataclasses complain about their values
        raise ArgumentError(" ".join(str(error).split())) from error
    return tuple(parsed)


def _set_defaults(parser: HfArgumentParser, values: Mapping[str, Any], source: str) -> None:
    known = vars(parser.parse_known_args([])[0])
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ArgumentError(f"{source}: {unknown[0]} is no argument of this recipe. See --help for those there are.")
    parser.set_defaults(**values)
