"""What commands that train show while they do: a live bar on a terminal, plain lines in a pipe, the guard's own words."""

from __future__ import annotations

import argparse
import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100  # of a pipe
TITLE = 26
PLAIN_LINES = 3  # how often a run is told of in a pipe

# Called with the number of steps done, a few words about them, and whether these are the last.
Report = Callable[[int, str, bool], None]
# Called with the name of a run and its number of steps.
Begin = Callable[[str, int], Report]


def between(lowest: int, highest: int) -> Callable[[str], int]:
    """Returns a type for the parser: an integer in a range."""

    def integer(text: str) -> int:
        if not (text.isascii() and text.isdigit() and lowest <= int(text) <= highest):
            raise argparse.ArgumentTypeError(f"must be an integer from {lowest} to {highest}, got {text!r}")
        return int(text)

    return integer


def make_folder(flag: str, path: str) -> Path:
    """Makes a folder that a flag names, or complains in its name."""
    try:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ArgumentError(
            f"{flag} must be a folder that can be made and written, got {path!r} ({error.strerror}). Choose another one."
        ) from error
    return folder


def build_console(stderr: bool = False) -> Console:
    """Returns a console that is as wide as the terminal, or as a page if there is none."""
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(width=WIDTH, stderr=stderr)


@contextmanager
def guard_log(console: Console) -> Iterator[None]:
    """Shows what the guard says in the command's own console."""
    from rich.logging import RichHandler

    handler = RichHandler(console=console, show_time=False, show_path=False, highlighter=None)
    guard_logger = logging.getLogger("hf_nanguard")
    guard_logger.addHandler(handler)
    propagate, guard_logger.propagate = guard_logger.propagate, False
    try:
        yield
    finally:
        guard_logger.removeHandler(handler)
        guard_logger.propagate = propagate


@contextmanager
def progress(console: Console) -> Iterator[Begin]:
    """Yields a function that begins a run and returns its reporter."""
    if not console.is_terminal:
        yield lambda title, total: _report_plainly(console, title, total)
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn(f"{{task.description:<{TITLE}}}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}"),
    )
    with Progress(*columns, console=console) as bars:

        def begin(title: str, total: int) -> Report:
            task = bars.add_task(title, total=total, words="")
            return lambda step, words, is_last: bars.update(task, completed=step, words=words)

        yield begin


def _report_plainly(console: Console, title: str, total: int) -> Report:
    def report(step: int, words: str, is_last: bool) -> None:
        if step % max(round(total / PLAIN_LINES), 1) == 0 or step == total or is_last:
            console.print(f"{title:<{TITLE}} step {step:>4}/{total}  {words}", highlight=False, markup=False)

    return report
