"""Shared by the commands: the type of their parsers, ranges of integers, and the import of what they run."""

import argparse
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TypeAlias

from ...errors import ArgumentError
from .slow_stages import slow_imports

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def between(lowest: int, highest: int) -> Callable[[str], int]:
    """Returns an argparse type: an integer in a range."""

    def integer(text: str) -> int:
        if not (text.isascii() and text.isdigit() and lowest <= int(text) <= highest):
            raise argparse.ArgumentTypeError(f"must be an integer from {lowest} to {highest}, got {text!r}")
        return int(text)

    return integer


@contextmanager
def needs_trl(command: str) -> Iterator[None]:
    """Says which library a command needs if an import inside the context fails, and what takes so long."""
    try:
        with slow_imports():
            yield
    except ModuleNotFoundError as error:
        names = "trl datasets" if error.name in ("trl", "datasets") else error.name
        raise ArgumentError(f"nanguard {command} needs {error.name}. Run pip install {names}.") from error


def load_recipe(command: str, name: str) -> SimpleNamespace:
    """Returns what the script `recipes/<name>.py` defines; recipes are beside the presets."""
    from ...examples.recipe.presets import find_configs

    with needs_trl(command):
        return SimpleNamespace(**runpy.run_path(str(find_configs().parent / "recipes" / f"{name}.py")))
