"""Draws the pictures of docs/: a float16 overflow that is forecast, the report of that run, and how an autopsy walks back.

    python benchmarks/docs_pictures.py [--folder docs/images]

The run is the fourth failure of `nanguard demo`: a layer of a float16 model doubles its output every few steps.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.picture import BLUE, GREY, RED, STYLE
from hf_nanguard import read_events
from hf_nanguard.examples.compare import quiet_hosts
from hf_nanguard.examples.demo.scenario_runner import ScenarioRunner
from hf_nanguard.examples.demo.scenarios import run_overflow
from hf_nanguard.report.run_curves import read_curves
from hf_nanguard.report.run_files import GUARD_FOLDER, read_jsonl
from hf_nanguard.report.run_plot import draw_run

HEADROOM = "nanguard/headroom_bits"
# The boxes of the autopsy from input to loss: text, and whether its values are finite.
CHAIN = (
    ("input ids", True), ("model", True), ("log_softmax", True), ("(… * mask).sum(1)\n= 0", True),
    ("… / mask.sum(1)\n0 / 0", False), ("mean", False), ("loss\nNaN", False),
)  # fmt: skip
ORIGIN = 4
GAP = 7  # between two boxes, in characters


def run_demo(folder: Path) -> Path:
    """Runs the scenario and returns the output directory of its guarded run."""
    with quiet_hosts():
        run_overflow(ScenarioRunner(folder, 0, 0, lambda description: None, lambda name, steps: lambda *progress: None))
    return folder / "overflow-guarded"


def draw_headroom(run: Path, file: Path) -> None:
    """Draws the bits that are left before float16 overflows, the step of the forecast and that of the overflow."""
    rows = [row for row in read_jsonl(run / GUARD_FOLDER / "metrics.jsonl") if HEADROOM in row]
    events = read_events(run)
    forecast = next(event for event in events if event["signal"] == "activation_headroom")
    broken = next(event for event in events if event["signal"] == "loss_nonfinite")
    figure, panel = pyplot.subplots(figsize=(7.2, 2.6), layout="constrained")
    points = [(row["step"], row[HEADROOM]) for row in rows if isinstance(row[HEADROOM], (int, float))]
    panel.plot(*zip(*points, strict=True), color=BLUE, linewidth=1.4)
    for event, color, text in ((forecast, BLUE, "forecast"), (broken, RED, "overflow")):
        panel.axvline(event["step"], color=color, linewidth=0.9, linestyle=":")
        height = points[0][1] * (0.8 if event is broken else 0.95)
        label = f"{text} at step {event['step']}"
        panel.annotate(
            label, (event["step"], height), (-5, 0), textcoords="offset points", color=color, fontsize=8, ha="right"
        )
    _finish(figure, panel, "step", "bits before float16 overflows", file)


def draw_walk(file: Path) -> None:
    """Draws how an autopsy walks back from a bad loss to the first operator whose inputs were finite."""
    figure, panel = pyplot.subplots(figsize=(7.2, 1.7), layout="constrained")
    places = list(_center_boxes())
    origin, end = places[ORIGIN], places[-1]
    panel.set(xlim=(0, end + GAP), ylim=(-0.9, 1.1))
    panel.axis("off")
    last: Any = None
    for place, (text, is_finite) in zip(places, CHAIN, strict=True):
        color, width = GREY if is_finite else RED, 2 if place == origin else 1
        box = {"boxstyle": "round,pad=0.4", "facecolor": "none", "edgecolor": color, "linewidth": width}
        shown = panel.text(place, 0, text, ha="center", va="center", fontsize=7, color=color, bbox=box)
        if last is not None:
            ends = {"patchA": last.get_bbox_patch(), "patchB": shown.get_bbox_patch()}
            arrow = {"arrowstyle": "-|>", "color": last.get_color(), **ends}  # that of the value it carries
            panel.annotate("", shown.get_position(), last.get_position(), arrowprops=arrow)
        last = shown
    back = {"arrowstyle": "-|>", "color": RED, "linestyle": "--"}
    panel.annotate("", (origin, 0.6), (end, 0.6), arrowprops=back)
    notes = (
        ((origin + end) / 2, 0.75, "the autopsy walks back along NaN", RED),
        ((places[0] + places[ORIGIN - 1]) / 2, -0.75, "finite, so not blamed", GREY),
        (origin, -0.75, "origin: finite inputs, result NaN", BLUE),
    )
    for place, height, text, color in notes:
        panel.text(place, height, text, ha="center", fontsize=8, color=color)
    figure.savefig(file, transparent=True, metadata={"Date": None})
    pyplot.close(figure)


def _center_boxes() -> Iterator[float]:
    """Yields the center of each box, in characters, with the same gap between all of them."""
    right = 0
    for text, _ in CHAIN:
        width = max(map(len, text.splitlines()))
        yield right + GAP / 2 + width / 2
        right += width + GAP


def _finish(figure: Any, panel: Any, x: str, y: str, file: Path) -> None:
    panel.set(xlabel=x, ylabel=y)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, transparent=True, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Runs the scenario and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("docs/images"), help="where the pictures go")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = run_demo(Path(folder))
        draw_run(read_curves(run), options.folder / "report.svg")
        with matplotlib.rc_context(STYLE):
            draw_headroom(run, options.folder / "headroom.svg")
            draw_walk(options.folder / "autopsy.svg")
    for file in sorted(options.folder.glob("*.svg")):
        print(json.dumps({"file": str(file), "kilobytes": round(file.stat().st_size / 1000)}))


if __name__ == "__main__":
    main()
