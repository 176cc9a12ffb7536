"""JSONL files of a run: strict JSON, one object per line, flushed at once so that a killed run loses nothing."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("hf_nanguard")

GUARD_FOLDER = "nanguard"  # below a run's output directory: events, metrics and autopsies


class JsonlWriter:
    """Appends objects to a file and creates the file and its folder with the first of them.

    A full or read-only disk must not end a run: objects that cannot be written are lost, and the first failure is logged.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._started = False
        self._failed = False

    def __call__(self, item: Mapping[str, object]) -> None:
        """Writes one object. Non-finite floats must be strings (`core.event.strict`)."""
        line = json.dumps(item, allow_nan=False, default=str) + "\n"
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


class Tail:
    """The objects that are appended to a file from now on, without those of earlier runs in the same folder.

    The file need not exist yet.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._num_old = len(self._read_all())

    def read(self) -> list[dict[str, Any]]:
        """Returns the objects appended since then."""
        return self._read_all()[self._num_old :]

    def _read_all(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.path)) if self.path.is_file() else []
