"""Draws the curves of a run as SVG or PNG. Needs matplotlib, which is imported when a plot is drawn."""

import math
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..plain_text import printable
from ..safe_files import write_file
from .run_curves import CURVES, RunCurves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png")
TITLES = {"loss": "loss", "grad_norm": "gradient norm", "learning_rate": "learning rate"}
COLORS = {
    "dropped": "#e0a030", "skipped": "#d9601a", "clipped": "#5b9bd5", "rewound": "#8e44ad", "halted": "#c0392b",
    "refused": "#7f7f7f",
}  # fmt: skip
LOG_RANGE = 50  # a curve that spans more than this factor is drawn on a logarithmic axis
MAX_POINTS = 100  # up to which each row is drawn as a point too


def draw_run(curves: RunCurves, path: Path) -> None:
    """Draws a run to a file whose name ends in `.svg` or `.png`. Another ending, or a file that cannot be written, is an
    `ArgumentError`, and so is a missing matplotlib."""
    if path.suffix not in FORMATS:
        raise ArgumentError(
            f"The picture must be a file that ends in {' or '.join(FORMATS)}, got {printable(str(path))}."
        )
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ArgumentError(f"A picture needs {error.name}. Run pip install matplotlib.") from error
    shown = [name for name in CURVES if any(map(math.isfinite, curves.series(name)[1]))]
    if not shown:
        raise ArgumentError(
            f"{printable(str(curves.folder))} has no logged loss, gradient norm or learning rate to draw."
        )
    figure = Figure(figsize=(9, 1.2 + 2.1 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for panel, name in zip(panels, shown, strict=True):
        _draw_curve(panel, *curves.series(name), TITLES[name])
    figure.align_ylabels(panels)
    _draw_marks(figure, panels, curves)
    panels[-1].set_xlabel("step")
    figure.suptitle(printable(curves.folder.resolve().name, 80), x=0.01, ha="left", fontsize=11, parse_math=False)
    picture, kind = BytesIO(), path.suffix.removeprefix(".")
    with matplotlib.rc_context({"svg.hashsalt": "nanguard"}):  # the same run gives the same file
        figure.savefig(picture, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else None)
    try:
        write_file(path, picture.getvalue())
    except OSError as error:
        raise ArgumentError(f"{printable(str(path))} cannot be written: {error.strerror}.") from error


def _draw_curve(panel: Any, steps: list[int], values: list[float], title: str) -> None:
    finite = [value for value in values if math.isfinite(value)]
    panel.plot(
        steps, values, color="#2c5f8a", linewidth=1.4, marker="." if len(steps) <= MAX_POINTS else None, markersize=4
    )
    if min(finite) > 0 and max(finite) > LOG_RANGE * min(finite) and title != TITLES["learning_rate"]:
        panel.set_yscale("log")
    panel.set_ylabel(title, fontsize=9)
    panel.tick_params(labelsize=8)
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_marks(figure: "Figure", panels: Any, curves: RunCurves) -> None:
    """Draws a line through all panels at each step at which the guard acted, and says in the legend how often it did what."""
    counts = curves.count_actions()
    lines = []
    for action in counts:
        steps = sorted({mark.step for mark in curves.marks if mark.action == action})
        for panel in panels:
            line = panel.vlines(steps, 0, 1, transform=panel.get_xaxis_transform(), color=COLORS[action], linewidth=1.1, alpha=0.75)  # fmt: skip
        lines.append(line)
    labels = [f"{action} ({number})" for action, number in counts.items()]
    if lines:
        figure.legend(lines, labels, loc="outside upper right", ncols=len(lines), fontsize=8, frameon=False)
