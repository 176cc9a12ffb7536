"""How a recipe reads its command line: the host's parser, defaults of the recipe's own, errors in one sentence."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from ..errors import ArgumentError

if TYPE_CHECKING:
    from trl import TrlParser


@contextmanager
def one_sentence() -> Iterator[None]:
    """Ends the process with exit code 2 and one sentence if a setting cannot work; a launcher's first rank says it."""
    try:
        yield
    except ArgumentError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(error, file=sys.stderr)
        sys.exit(2)


def parse_arguments(parser: "TrlParser", argv: Sequence[str] | None, defaults: dict[str, Any]) -> tuple[Any, ...]:
    """Parses a command line, with `--config` for a YAML file, into the dataclasses of a parser.

    Args:
        parser (`TrlParser`):
            The parser.
        argv (`Sequence[str]`, *optional*):
            The words after the script's name; those of the process by default.
        defaults (`dict`):
            The recipe's own defaults; the file wins over them, and a flag over both.

    Returns:
        `tuple`: one object for each dataclass.

    Raises:
        ArgumentError: if a word, a value or the file cannot be used.

    Example:

    ```python
    parser = TrlParser([ScriptArguments, GuardedTrainingArguments])
    script, args = parse_arguments(parser, None, {"output_dir": "runs/mine"})
    ```
    """

    def complain(message: str) -> NoReturn:
        raise ArgumentError(f"{message}. Run `python {parser.prog} --help` for what it takes.")

    words = list(sys.argv[1:] if argv is None else argv)
    if words[-1:] == ["--config"]:
        complain("argument --config: expected one argument")
    parser.error = complain  # type: ignore[method-assign] # the host's prints the whole usage
    parser.set_defaults(**defaults)
    try:
        return parser.parse_args_and_config(words)
    except ArgumentError:
        raise
    except OSError as error:
        raise ArgumentError(
            f"--config must be a YAML file that can be read, got {error.filename!r} ({error.strerror})."
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ArgumentError(f"--config must be a YAML file ({reason}).") from error
    except ValueError as error:  # of a dataclass: a value or a combination that cannot be
        raise ArgumentError(" ".join(str(error).split())) from error
