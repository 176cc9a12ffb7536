"""The `nanguard` command: reads the command line and hands over to the file of the command.

Nothing heavy is imported here or at the head of a command's file, so that `--help` answers at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from .. import __version__
from ..errors import ArgumentError
from . import completion, demo, grpo, replay, run, sft, verify

# Each has `add_parser(subparsers)`, which sets `run`, a function from the parsed arguments to an exit code.
COMMANDS: tuple[ModuleType, ...] = (run, sft, grpo, verify, demo, replay, completion)

EPILOG = """examples:
  nanguard demo
  nanguard run train.py --learning_rate 1e-4
  nanguard sft --preset balanced
  nanguard verify --config my.yaml
  nanguard replay runs/mine/nanguard/autopsy/step-42
  source <(nanguard completion bash)

Run `nanguard <command> --help` for what a command takes.
"""


class Parser(argparse.ArgumentParser):
    """An argument parser that complains in one sentence, without the usage block."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message}. Run `{self.prog} --help` for what it takes.")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = Parser(
        prog="nanguard",
        description="Numerical safety for Hugging Face training: a bad step leaves no trace.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"nanguard {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code: 0, 2 for bad arguments, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    foreign: list[str] = []
    for command in (run, sft, grpo, verify):  # what follows the script, or is TRL's own, is not ours to read
        if words[:1] == [command.__name__.rpartition(".")[2]]:
            words, foreign = command.split(words)
            break
    try:
        parser = build_parser()
        arguments, unknown = parser.parse_known_args(words)
        if unknown:
            name = arguments.command
            raise ArgumentError(
                f"unrecognized arguments: {' '.join(unknown)}. Run `nanguard {name} --help` for what it takes."
            )
        arguments.parser, arguments.words = parser, foreign
        return arguments.run(arguments)
    except ArgumentError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # a launcher's other ranks would say the same
            print(f"nanguard: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        told = str(stop) or "what was written so far is whole"
        print(f"nanguard: stopped by Ctrl-C; {told}.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
