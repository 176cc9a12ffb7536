"""`nanguard report`: what happened in a run, as text and as a picture."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..plain_text import printable
from ..report.run_files import GUARD_FOLDER, events_path
from .shared.command_parser import Subparsers

if TYPE_CHECKING:
    from ..report.run_curves import RunCurves

EPILOG = """examples:
  nanguard report runs/mine
  nanguard report runs/mine --output curves.png
  nanguard report runs/mine --json

exit codes: 0, or 2 for bad arguments or a folder without a run
"""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "report",
        help="say what happened in a run, and draw its loss, gradient norm and learning rate",
        description="Prints what happened in a run, and draws its loss, gradient norm and learning rate with skipped, dropped\n"
        "and rewound steps marked.",
        epilog=EPILOG,
    )
    parser.add_argument("run_folder", metavar="RUN", help="the output directory of a run")
    parser.add_argument("--output", metavar="FILE", help="an SVG or PNG file (default: RUN/nanguard/report.svg)")
    parser.add_argument(
        "--json", action="store_true", help="print the numbers as one JSON object, draw only with --output"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draws a run and returns the exit code."""
    from ..report.run_curves import read_curves

    curves = read_curves(arguments.run_folder)
    if arguments.output:
        picture: str | None = draw(curves, Path(arguments.output))
    else:
        picture = None if arguments.json else draw_if_possible(curves)
    print(json.dumps(as_json(curves), allow_nan=False) if arguments.json else format_report(curves, picture or ""))
    return 0


def draw(curves: RunCurves, file: Path) -> str:
    """Draws the picture and returns its path."""
    from ..report.run_plot import draw_run

    draw_run(curves, file)
    return str(file)


def draw_if_possible(curves: RunCurves) -> str:
    """Draws the picture that nobody asked for; returns its path, or why there is none."""
    try:
        return draw(curves, curves.folder / GUARD_FOLDER / "report.svg")
    except ArgumentError as error:
        return f"none. {error}"


def as_json(curves: RunCurves) -> dict:
    """Returns rows and marks as plain values; NaN and inf as strings, as in the files of the run."""
    from ..core.event import strict

    rows = [{"step": step, **values} for step, values in sorted(curves.rows.items())]
    marks = [asdict(mark) for mark in curves.marks]
    return strict({"run": str(curves.folder), "actions": curves.count_actions(), "rows": rows, "marks": marks})


def format_report(curves: RunCurves, picture: str) -> str:
    """Returns the lines that are printed: the loss, the events by kind, and where to read more."""
    steps, losses = curves.series("loss")
    folder = curves.folder / GUARD_FOLDER
    lines = [f"{printable(str(curves.folder))}: {len(curves.rows)} logged steps"]
    if steps:
        lines[0] += f", loss {losses[0]:.4g} at step {steps[0]} to {losses[-1]:.4g} at step {steps[-1]}"
    lines += [f"  {line}" for line in curves.events] or ["  no events: the guard had nothing to do"]
    if curves.num_invalid:
        lines.append(f"  {curves.num_invalid} lines of its files are incomplete or invalid and were left out")
    places: dict[str, object] = {
        "events": events_path(folder, 0) if curves.events else None,
        "autopsies": find_bundles(folder),
        "picture": picture,
    }
    return "\n".join([*lines, *(f"  {name:<10}{printable(str(place))}" for name, place in places.items() if place)])


def find_bundles(folder: Path) -> Path | None:
    """Returns the folder of the bundles; `None` if there are none."""
    return folder / "autopsy" if (folder / "autopsy").is_dir() else None
