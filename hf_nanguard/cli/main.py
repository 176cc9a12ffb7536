"""The `nanguard` command: parses the command line and calls the command that it names.

Neither this file nor the file of a command imports anything heavy at its head, so that `--help` answers at once.
"""

import argparse
import io
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from .. import __version__
from ..command_errors import reword, suggest
from ..command_exit import exit_code, print_error
from ..errors import ArgumentError
from ..harmless_log import drop_unwritten
from . import completion, demo, doctor, grpo, replay, report, run, scan, sft, watch
from .shared import recipe_command

# Each has `add_parser(subparsers)`, which sets `run`, a function that takes the parsed arguments and returns an exit code.
COMMANDS: tuple[ModuleType, ...] = (doctor, run, sft, grpo, demo, watch, report, replay, scan, completion)
# Commands that parse only some of their arguments here: the others belong to the user's script or to TRL.
SPLITS = {"doctor": doctor.split, "run": run.split, "sft": recipe_command.split, "grpo": recipe_command.split}

PROG = "nanguard "
COMMAND = "command"
REQUIRED = "the following arguments are required: "  # argparse's words
NO_COMMAND = (
    "give a command. `nanguard demo` shows what it does, `nanguard run train.py` guards your script, `nanguard --help` "
    "lists all commands."
)
EPILOG = """examples:
  nanguard demo
  nanguard doctor my.yaml
  nanguard run train.py --learning_rate 1e-4
  nanguard sft --preset balanced
  nanguard replay runs/mine/nanguard/autopsy/step-42
  nanguard scan runs/mine
  nanguard report runs/mine
  source <(nanguard completion bash)

Run `nanguard <command> --help` for the options of a command.
"""


class HelpLayout(argparse.HelpFormatter):
    """Fills paragraphs to the width of the terminal. Those with an indented line, such as examples, stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        is_raw = [part.startswith(" ") or "\n " in part for part in paragraphs]
        filled = [
            part if raw else super(HelpLayout, self)._fill_text(part, width, indent)
            for part, raw in zip(paragraphs, is_raw, strict=True)
        ]
        return "\n\n".join(filled)


class Parser(argparse.ArgumentParser):
    """An argument parser whose help fits the terminal, and whose errors are one message without the usage block."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=HelpLayout, **options)

    def error(self, message: str) -> NoReturn:
        missing = message.removeprefix(REQUIRED)
        if missing == message:
            message = reword(message)
            raise ArgumentError(
                f"{message}{'' if message.endswith('?') else '.'} Run `{self.prog} --help` for its options."
            )
        if missing == COMMAND:
            raise ArgumentError(NO_COMMAND)
        helps = [action.help for action in self._actions if missing in (action.metavar, action.dest)]
        example = next((line.strip() for line in (self.epilog or "").splitlines() if line.startswith("  nanguard")), "")
        example = re.sub(r"\s+#.*", "", example) or f"{self.prog} --help"
        raise ArgumentError(
            f"{self.prog.removeprefix(PROG)} needs {', '.join([missing, *filter(None, helps)])}. For example: {example}"
        )


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="nanguard",
        description="Numerical safety for Hugging Face training: a bad step leaves no trace.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"nanguard {__version__}")
    subparsers = parser.add_subparsers(dest=COMMAND, metavar=COMMAND, required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code: 0, 1 for findings or an output that cannot be written, 2 for bad arguments,
    130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: run_command(words))


def run_command(words: list[str]) -> int:
    """Runs the command that the words name and returns its exit code."""
    others: list[str] = []
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # or a character that its encoding lacks would end the command
    if words and words[0] in SPLITS:
        words, others = SPLITS[words[0]](words)
    try:
        parser = build_parser()
        arguments, unknown = parser.parse_known_args(words)
        if unknown:
            raise ArgumentError(refuse_unknown(arguments.command, unknown, parser))
        arguments.parser, arguments.words = parser, others
        code = arguments.run(arguments)
        if sys.stdout is not None:  # closed before Python started
            sys.stdout.flush()
        return code
    except OSError as error:
        if not is_of_the_output(error):
            raise
        if not isinstance(error, BrokenPipeError):  # else the reader of the output, e.g. head, has seen enough
            print_error(f"the output cannot be written: {error.strerror}.")
        return 1


def is_of_the_output(error: OSError) -> bool:
    """Returns whether an error comes from writing to standard output. What is left to be written is dropped: Python would try again
    at its end, and replace the exit code."""
    output = sys.stdout
    if error.filename is not None or not isinstance(output, io.TextIOWrapper):
        return False
    try:
        output.write(" ")  # of a long text nothing is left after an error
    except OSError:  # without a buffer
        return True
    return drop_unwritten(output)


def refuse_unknown(command: str, unknown: list[str], parser: argparse.ArgumentParser) -> str:
    """Returns the message about words that a command does not know, with the flag that was probably meant."""
    [commands] = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    flag = next((word for word in unknown if word.startswith("-")), "")
    known = [option for action in commands[command]._actions for option in action.option_strings]
    hint = suggest(flag, known) or "."
    return (
        f"nanguard {command} does not know {' '.join(unknown)}{hint} Run `nanguard {command} --help` for its options."
    )


if __name__ == "__main__":
    sys.exit(main())
