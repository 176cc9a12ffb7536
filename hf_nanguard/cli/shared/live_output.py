"""Output of commands that train: a progress bar on a terminal, plain lines elsewhere, and messages of the guard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from ...report.terminal_console import Report


def build_console(stderr: bool = False) -> Console:
    """Returns a console on which nothing can steer the terminal."""
    from ...report.terminal_console import build_console

    return build_console(stderr=stderr)


def print_plain(console: Console, text: str) -> None:
    """Prints a text as one line, however long and whatever is in it."""
    from ...report.terminal_console import print_line

    print_line(console, text)


class _ConsoleHandler(logging.Handler):
    """Prints each message as it is: above the progress bar, if there is one."""

    def __init__(self, console: Console):
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).splitlines():
            print_plain(self.console, line)


@contextmanager
def guard_log(console: Console) -> Iterator[None]:
    """Prints log messages of the guard on the command's console."""
    handler = _ConsoleHandler(console)
    guard_logger = logging.getLogger("hf_nanguard")
    guard_logger.addHandler(handler)
    propagate, guard_logger.propagate = guard_logger.propagate, False
    try:
        yield
    finally:
        guard_logger.removeHandler(handler)
        guard_logger.propagate = propagate


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, int], Report]]:
    """Yields a function that takes the name of a run and its number of steps, and returns the function to report progress."""
    from ...report.terminal_console import TITLE_WIDTH, print_progress

    if not console.is_terminal:
        yield lambda title, total: print_progress(console, title, total)
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn(f"{{task.description:<{TITLE_WIDTH}}}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    with Progress(*columns, console=console) as bars:

        def begin(title: str, total: int) -> Report:
            task = bars.add_task(title, total=total, text="")
            return lambda step, text, is_last: bars.update(task, completed=step, text=text)

        yield begin
