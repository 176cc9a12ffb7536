"""`nanguard report`: draws a run, with the steps at which the guard acted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..plain_text import printable
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
        help="draw loss, gradient norm and learning rate of a run",
        description="Draws loss, gradient norm and learning rate of a run, with skipped, dropped and rewound steps marked.",
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
    from ..report.run_files import GUARD_FOLDER
    from ..report.run_plot import draw_run

    curves = read_curves(arguments.run_folder)
    default = curves.folder / GUARD_FOLDER / "report.svg"
    output = Path(arguments.output) if arguments.output else None if arguments.json else default
    if output is not None:
        draw_run(curves, output)
    print(json.dumps(as_json(curves), allow_nan=False) if arguments.json else format_report(curves, output))
    return 0


def as_json(curves: RunCurves) -> dict:
    """Returns rows and marks as plain values; NaN and inf as strings, as in the files of the run."""
    from ..core.event import strict

    rows = [{"step": step, **values} for step, values in sorted(curves.rows.items())]
    marks = [vars(mark) for mark in curves.marks]
    return strict({"run": str(curves.folder), "actions": curves.count_actions(), "rows": rows, "marks": marks})


def format_report(curves: RunCurves, output: Path | None) -> str:
    """Returns the lines that are printed: what is in the picture, and where it is."""
    steps, losses = curves.series("loss")
    lines = [f"{printable(str(curves.folder))}: {len(curves.rows)} logged steps"]
    if steps:
        lines[0] += f", loss {losses[0]:.4g} at step {steps[0]} to {losses[-1]:.4g} at step {steps[-1]}"
    lines += [f"  {action:<8} {number}" for action, number in curves.count_actions().items()]
    if curves.num_invalid:
        lines.append(f"  {curves.num_invalid} lines of its files are incomplete or invalid and were left out")
    return "\n".join([*lines, f"  picture  {printable(str(output))}"])
