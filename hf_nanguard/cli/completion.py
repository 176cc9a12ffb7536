"""`nanguard completion`: prints a script with which a shell completes commands, options and their values.

The script is complete in itself. The shell does not start Python when it completes a word.
"""

import argparse

import shtab

from .shared.command_parser import Subparsers

EPILOG = """examples:
  source <(nanguard completion bash)                                         # or in ~/.bashrc
  nanguard completion zsh > ~/.zfunc/_nanguard                               # a folder in your fpath
  nanguard completion fish > ~/.config/fish/completions/nanguard.fish
"""
# What a shell offers as the value of an argument, by the argument's name.
PATHS = {
    "script": shtab.FILE,
    "config": shtab.FILE,
    "bundle": shtab.DIRECTORY,
    "checkpoint": shtab.DIRECTORY,
    "output_dir": shtab.DIRECTORY,
    "model_name_or_path": shtab.DIRECTORY,
    "reward_model_name_or_path": shtab.DIRECTORY,
    "dataset_name": shtab.DIRECTORY,
}


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "completion",
        help=f"print a completion script for {', '.join(shtab.SUPPORTED_SHELLS)}",
        description="Prints a script with which a shell completes nanguard's commands, options and their values.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "shell", choices=shtab.SUPPORTED_SHELLS, metavar="SHELL", help=f"one of {', '.join(shtab.SUPPORTED_SHELLS)}"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the script for a shell."""
    mark_paths(arguments.parser)
    print(shtab.complete(arguments.parser, arguments.shell))
    return 0


def mark_paths(parser: argparse.ArgumentParser) -> None:
    """Marks the arguments of a parser and of its commands whose values are files or folders."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                mark_paths(command)
        elif action.dest in PATHS:
            action.complete = PATHS[action.dest]  # type: ignore[attr-defined] # where shtab looks for it
