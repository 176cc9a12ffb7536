"""JSONL files of a run: strict JSON, one object per line, flushed at once so that a killed run loses nothing."""

import json
import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("hf_nanguard")

GUARD_FOLDER = "nanguard"  # below a run's output directory: events, metrics and autopsies


class JsonlWriter:
    """Appends objects to a file and creates the file and its folder with the first of them.

    Every object carries the id of its run, because several runs may write to one folder. A full or read-only disk must not
    end a run: objects that cannot be written are lost, and the first failure is logged.
    """

    def __init__(self, path: str | Path, run: str | None = None):
        self.path = Path(path)
        self.run = run or new_run_id()
        self._started = False
        self._failed = False

    def __call__(self, item: Mapping[str, object]) -> None:
        """Writes one object. Non-finite floats must be strings (`core.event.strict`)."""
        line = json.dumps({"run": self.run, **item}, allow_nan=False, default=str) + "\n"
        try:
            if not self._started:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _repair_last_line(self.path)
                self._started = True
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            if not self._failed:
                logger.error("hf_nanguard: cannot write to %s, so some of its lines are lost: %s", self.path, error)
            self._failed = True


def new_run_id() -> str:
    """Returns an id for one run, without touching any random state of the run."""
    return secrets.token_hex(4)


def _repair_last_line(path: Path) -> None:
    """Removes a last line that a crash has truncated; a complete one that lacks its newline gets it."""
    if not path.is_file():
        return
    text = path.read_bytes()
    last = text[text.rfind(b"\n") + 1 :]
    if not last:
        return
    with path.open("r+b") as file:
        file.seek(len(text) - len(last))
        try:
            json.loads(last)
        except ValueError:
            file.truncate()
        else:
            file.write(last + b"\n")


def events_path(folder: str | Path, rank: int) -> Path:
    """Returns the event file of a rank in the `GUARD_FOLDER` of a run."""
    return Path(folder) / ("events.jsonl" if rank == 0 else f"events-rank{rank}.jsonl")


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file. A last line truncated by a crash is left out."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            if number < len(lines) - 1:
                raise


def count_events(events: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Returns how often each signal met each action."""
    return Counter(f"{event['signal']} {event['action']}" for event in events)


def format_counts(counts: Counter[str]) -> str:
    """Returns counts of events in one line."""
    return ", ".join(f"{number} {kind}" for kind, number in counts.items()) or "none"


def read_events(path: str | Path, every_run: bool = False) -> list[dict[str, Any]]:
    """Returns the events of the last run that wrote to a folder.

    Args:
        path (`str` or `Path`):
            An event file, the `nanguard` folder of a run, or the run's output directory.
        every_run (`bool`, *optional*, defaults to `False`):
            Return those of earlier runs too.
    """
    path = Path(path)
    if path.is_dir():
        path = events_path(path / GUARD_FOLDER if (path / GUARD_FOLDER).is_dir() else path, 0)
    events = _read_all(path)
    if every_run or not events:
        return events
    # A run without events is known by its metrics only.
    logged = [row.get("run") for row in _read_all(path.parent / "metrics.jsonl")]
    last = events[-1].get("run")
    last = logged[-1] if last in logged else last
    return [event for event in events if event.get("run") == last]


def _read_all(path: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(path)) if path.is_file() else []


class Tail:
    """The objects that are appended to a file from now on, without those of earlier runs in the same folder.

    The file need not exist yet.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._num_old = len(_read_all(self.path))

    def read(self) -> list[dict[str, Any]]:
        """Returns the objects appended since then."""
        return _read_all(self.path)[self._num_old :]
