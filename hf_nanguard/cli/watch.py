"""`nanguard watch`: follows a run that is going on, in the terminal."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from .shared.command_parser import Subparsers

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console, RenderableType

    from ..report.run_curves import Mark

SHOWN_EVENTS = 6
ROW = ("loss", "grad_norm", "learning_rate", "nanguard/skipped_steps", "nanguard/dropped_microbatches", "epoch")
EPILOG = """examples:
  nanguard watch runs/mine
  nanguard watch runs/mine --once      # print where it is now, and end

It only reads the files of the run, and may be started before the run. End it with Ctrl-C.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "watch",
        help="follow a running job in the terminal",
        description="Shows the newest log row of a running job and what the guard does, as it happens.",
        epilog=EPILOG,
    )
    parser.add_argument("run_folder", metavar="RUN", help="the output directory of a run")
    parser.add_argument("--interval", metavar="SECONDS", type=float, default=1.0, help="how often to look (default: 1)")
    parser.add_argument("--once", action="store_true", help="print the current state and end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Follows a run until Ctrl-C."""
    from pathlib import Path

    from ..report.terminal_console import build_console

    if not 0.05 <= arguments.interval <= 3600:
        raise ArgumentError(f"--interval must be from 0.05 to 3600 seconds, got {arguments.interval:g}.")
    folder = Path(arguments.run_folder)
    if not folder.is_dir() and (arguments.once or not folder.parent.is_dir()):
        raise ArgumentError(f"No such folder: {folder}.")
    console = build_console()
    watched = WatchedRun(folder)
    follow = print_lines if arguments.once or not console.is_terminal else show_live
    with suppress(KeyboardInterrupt):  # that is how it ends
        follow(watched, console, arguments.interval, arguments.once)
    return 0


class WatchedRun:
    """What is known of a run so far."""

    def __init__(self, folder: Path):
        from ..report.run_files import RunFiles

        self.folder = folder
        self._files = RunFiles(folder)
        self.row: dict[str, object] = {}
        self.marks: deque[Mark] = deque(maxlen=SHOWN_EVENTS)
        self.num_events = 0
        self.changed = time.monotonic()

    def update(self) -> tuple[list[dict[str, object]], list[Mark]]:
        """Reads what is new; returns log rows and events."""
        from ..report.run_curves import make_mark

        rows, events = self._files.read()
        marks = [make_mark(event) for event in events]
        for row in rows:
            self.row = {**self.row, **row} if row.get("run") == self.row.get("run") else dict(row)
        self.marks.extend(marks)
        self.num_events += len(marks)
        if rows or marks:
            self.changed = time.monotonic()
        return rows, marks


def print_lines(watched: WatchedRun, console: Console, interval: float, once: bool) -> None:
    """Prints a line for each row and each event."""
    from ..report.terminal_console import print_line

    if not once and not watched.folder.is_dir():
        print_line(console, f"waiting for {watched.folder}; end with Ctrl-C")
    while True:
        rows, marks = watched.update()
        if once:
            rows, marks = ([watched.row] if watched.row else []), list(watched.marks)
        for row in rows:
            print_line(console, format_row(row))
        for mark in marks:
            why = f"; {mark.why}" if mark.why else ""
            print_line(console, f"step {mark.step}: {mark.signal} {mark.action}: {mark.message.rstrip('.')}{why}")
        if once:
            if not rows and not marks:
                print_line(console, f"{watched.folder}: nothing logged yet")
            return
        time.sleep(interval)


def format_row(row: Mapping[str, object]) -> str:
    """Returns a log row in one line."""
    values = [f"{name.removeprefix('nanguard/')} {format_value(row[name])}" for name in ROW if name in row]
    return f"step {row.get('step', '?')}: {', '.join(values) or 'no loss in this row'}"


def format_value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_live(watched: WatchedRun, console: Console, interval: float, once: bool) -> None:
    """Shows the newest row and the last events in place, until Ctrl-C."""
    from rich.live import Live

    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            watched.update()
            live.update(build_view(watched), refresh=True)
            time.sleep(interval)


def build_view(watched: WatchedRun) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    seconds = int(time.monotonic() - watched.changed)
    head = Text(f"{watched.folder}  step {watched.row.get('step', '-')}", style="bold")
    head.append(f"  last change {seconds} s ago", style="dim" if seconds < 60 else "yellow")
    values = Table.grid(padding=(0, 3))
    shown = [name for name in ROW if name in watched.row]
    values.add_row(*(Text(name.removeprefix("nanguard/"), style="dim") for name in shown))
    values.add_row(*(format_value(watched.row[name]) for name in shown))
    events = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for mark in watched.marks:
        message = Text(mark.why or mark.message, no_wrap=True, overflow="ellipsis")
        events.add_row(str(mark.step), Text(mark.action, style="yellow"), mark.signal, message)
    title = Text(f"events: {watched.num_events or 'none'}", style="dim")
    return Group(head, values if shown else Text("nothing logged yet"), title, events)
