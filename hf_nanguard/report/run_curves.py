"""The curves of a run for plots and programs: loss, gradient norm and learning rate by step, and what the guard did."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..core.event_summary import EventKind, EventSummary
from ..errors import ArgumentError
from ..plain_text import printable
from .run_files import GUARD_FOLDER, RunFiles

CURVES = ("loss", "grad_norm", "learning_rate")
MARKED = ("dropped", "skipped", "clipped", "rewound", "halted", "refused")  # actions that a plot shows, mildest first
MAX_MESSAGE = 300
MAX_DRAWN = 1e300  # differences of larger ones overflow


@dataclass(frozen=True)
class Mark:
    """Something the guard did at a step."""

    step: int
    action: str
    signal: str
    message: str
    why: str = ""  # cause, place and remedies, as far as they are known


@dataclass(frozen=True)
class RunCurves:
    """What a run has logged and what the guard did about it."""

    folder: Path  # the output directory
    rows: dict[int, dict[str, float]]  # by step, those of `CURVES` that were logged; NaN and inf are what they are
    marks: list[Mark]  # events in which the guard acted
    events: list[str] = field(default_factory=list)  # all of them, those of the same kind and place in one line
    num_invalid: int = 0  # lines of the files that could not be read

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Returns the steps and values of a curve. A value that cannot be drawn is NaN, which a plot leaves out."""
        found = [(step, row[name]) for step, row in sorted(self.rows.items()) if name in row]
        return [step for step, _ in found], [value if abs(value) <= MAX_DRAWN else math.nan for _, value in found]

    def count_actions(self) -> dict[str, int]:
        """Returns at how many steps the guard did what."""
        steps = {action: {mark.step for mark in self.marks if mark.action == action} for action in MARKED}
        return {action: len(found) for action, found in steps.items() if found}


def read_curves(run: str | Path) -> RunCurves:
    """Reads the files of a run, given its output directory or its `nanguard` folder; an `ArgumentError` if there are none. Of
    steps that a resumed run has run again, only the last time counts."""
    files = RunFiles(run)
    if not files.folder.is_dir():
        raise ArgumentError(
            f"No run of a guarded trainer in {printable(str(run))}: it has no folder {GUARD_FOLDER}. Give the output "
            "directory of a run."
        )
    rows, events = files.read()
    ends = _find_ends(rows)
    kept = [row for row in rows if _step_of(row) < ends.get(str(row.get("run")), math.inf)]
    events = [event for event in events if _step_of(event) < ends.get(str(event.get("run")), math.inf)]
    marks = [make_mark(event) for event in events if event.get("action") in MARKED]
    summary = EventSummary()
    for event in events:
        summary.add(event)
    lines = [printable(line, MAX_MESSAGE) for line in summary.format()]
    return RunCurves(files.folder.parent, _join_rows(kept), marks, lines, files.num_invalid)


def make_mark(event: Mapping[str, object]) -> Mark:
    """Returns what a plot or a table shows of an event, safe to print."""
    action, signal = printable(str(event.get("action"))), printable(str(event.get("signal")))
    step = _step_of(event)
    message, why = str(event.get("message")), EventKind.of(dict(event)).explain()
    return Mark(
        int(step) if math.isfinite(step) else 0,
        action,
        signal,
        printable(message, MAX_MESSAGE),
        printable(why, MAX_MESSAGE),
    )


def read_number(value: object) -> float | None:
    """Returns a logged number; NaN and inf are strings in the files."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None  # type: ignore[arg-type]


def _step_of(item: Mapping[str, object]) -> float:
    step = item.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else math.inf


def _find_ends(rows: Iterable[Mapping[str, object]]) -> dict[str, float]:
    """Returns for each run but the last the step from which a later one has run the same steps again."""
    starts: dict[str, float] = {}
    for row in rows:
        starts.setdefault(str(row.get("run")), _step_of(row))
    runs = list(starts)
    return {run: min(starts[later] for later in runs[index + 1 :]) for index, run in enumerate(runs[:-1])}


def _join_rows(rows: Iterable[Mapping[str, object]]) -> dict[int, dict[str, float]]:
    joined: dict[int, dict[str, float]] = {}
    for row in rows:
        step, values = _step_of(row), {name: read_number(row.get(name)) for name in CURVES}
        if math.isfinite(step):
            joined.setdefault(int(step), {}).update(
                {name: value for name, value in values.items() if value is not None}
            )
    return {step: values for step, values in joined.items() if values}
