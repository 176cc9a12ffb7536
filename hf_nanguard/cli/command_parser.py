"""Shared by the commands: the type of their parsers, ranges of integers, and the import of what they run."""

import argparse
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TypeAlias

from ..errors import ArgumentError

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def between(lowest: int, highest: int) -> Callable[[str], int]:
    """Returns an argparse type: an integer in a range."""

    def integer(text: str) -> int:
        if not (text.isascii() and text.isdigit() and lowest <= int(text) <= highest):
            raise argparse.ArgumentTypeError(f"must be an integer from {lowest} to {highest}, got {text!r}")
        return int(text)

    return integer


def import_example(command: str, module: str) -> ModuleType:
    """Imports a module of `examples`, or says which library the command needs for that."""
    try:
        return import_module(f"..examples.{module}", __package__)
    except ModuleNotFoundError as error:
        raise ArgumentError(f"nanguard {command} needs {error.name}. Run pip install 'hf-nanguard[trl]'.") from error
