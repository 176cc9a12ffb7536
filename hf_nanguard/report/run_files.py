"""JSONL files of a run: strict JSON, one object per line, each written at once so that a killed run loses nothing."""

import json
import logging
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..core.event import parse_strict
from ..plain_text import text_of
from ..safe_files import append_line, make_folder, open_to_read

logger = logging.getLogger("hf_nanguard")

GUARD_FOLDER = "nanguard"  # below a run's output directory: events, metrics and autopsies
MAX_LINE = 16 * 2**20  # a longer one is read as several, none of which is an object


class JsonlWriter:
    """Appends objects to a file and creates the file and its folder with the first of them.

    Every object carries the id of its run, because several runs may write to one folder. A full or read-only disk, or a path
    that is not a regular file, must not end a run: objects that cannot be written are lost, and the first failure is logged.
    """

    def __init__(self, path: str | Path, run: str | None = None, private: bool = True):
        self.path = Path(path)
        self.run = run or new_run_id()
        self.private = private  # only the owner may read the file, because it contains training data
        self._failed = False

    def __call__(self, item: Mapping[str, object]) -> None:
        """Writes one object. Non-finite floats must be strings (`core.event.strict`)."""
        line = json.dumps({"run": self.run, **item}, allow_nan=False, default=text_of) + "\n"
        try:
            make_folder(self.path.parent)
            append_line(self.path, line.encode("ascii"), self.private)
        except OSError as error:
            if not self._failed:
                why = error.strerror or error
                logger.error("hf_nanguard: cannot write to %s, so some of its lines are lost: %s.", self.path, why)
            self._failed = True


def new_run_id() -> str:
    """Returns an id for one run, without touching any random state of the run."""
    return secrets.token_hex(4)


def events_path(folder: str | Path, rank: int) -> Path:
    """Returns the event file of a rank in the `GUARD_FOLDER` of a run."""
    return Path(folder) / ("events.jsonl" if rank == 0 else f"events-rank{rank}.jsonl")


def read_jsonl(path: str | Path) -> list[dict[str, object]]:
    """Returns the objects of a file. Lines that are incomplete or not strict JSON objects are skipped; their number is
    logged."""
    items, num_skipped = read_lines(path)
    if num_skipped:
        lines = "line" if num_skipped == 1 else "lines"
        logger.warning("hf_nanguard: skipped %d incomplete or invalid %s of %s.", num_skipped, lines, path)
    return items


def read_lines(path: str | Path) -> tuple[list[dict[str, object]], int]:
    """Returns the objects of a file and the number of lines that are something else."""
    items: list[dict[str, object]] = []
    num_skipped = 0
    with open_to_read(Path(path)) as file:
        while line := file.readline(MAX_LINE):
            item = _parse_line(line)
            if item is not None:
                items.append(item)
            elif line.strip():
                num_skipped += 1
    return items, num_skipped


def count_events(events: Iterable[Mapping[str, object]]) -> Counter[str]:
    """Returns how often each signal met each action."""
    return Counter(f"{event.get('signal')} {event.get('action')}" for event in events)


def format_counts(counts: Counter[str]) -> str:
    """Returns counts of events in one line."""
    return ", ".join(f"{number} {kind}" for kind, number in counts.items()) or "none"


def read_events(path: str | Path, every_run: bool = False) -> list[dict[str, object]]:
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


def _read_all(path: Path) -> list[dict[str, object]]:
    return read_jsonl(path) if path.is_file() else []


class Tail:
    """The objects that are appended to a file from now on, without those of earlier runs in the same folder.

    The file need not exist yet.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._num_old = len(self._read())

    def read(self) -> list[dict[str, object]]:
        """Returns the objects appended since then."""
        return self._read()[self._num_old :]

    def _read(self) -> list[dict[str, object]]:
        return read_lines(self.path)[0] if self.path.is_file() else []


class FollowedFile:
    """The objects of a file that is being written, each returned once. Reads only what was appended since the last time.

    A file that became shorter, because somebody began it anew, is read from its start. Objects without one of `texts` are
    counted as invalid.
    """

    def __init__(self, path: str | Path, texts: Sequence[str] = ()):
        self.path = Path(path)
        self.texts = texts
        self._position = 0
        self._rest = b""  # a line that is not complete yet
        self._num_skipped = 0

    @property
    def num_invalid(self) -> int:
        """The number of lines so far that are no such objects in strict JSON; the last may still become one."""
        return self._num_skipped + bool(self._rest.strip())

    def read(self) -> list[dict[str, object]]:
        """Returns the objects that were appended; none if the file is not there, or cannot be read now."""
        items: list[dict[str, object]] = []
        try:
            with open_to_read(self.path) as file:
                if file.seek(0, os.SEEK_END) < self._position:
                    self._position, self._rest = 0, b""
                file.seek(self._position)
                while part := file.readline(MAX_LINE):
                    self._position += len(part)
                    self._rest += part
                    if part.endswith(b"\n") or len(self._rest) >= MAX_LINE:
                        self._take(items)
        except OSError:
            pass  # what was read before counts
        return items

    def _take(self, items: list[dict[str, object]]) -> None:
        """Adds the object of the line that was read, if it is one."""
        line, self._rest = self._rest, b""
        item = _parse_line(line)
        if item is not None and all(isinstance(item.get(name), str) for name in self.texts):
            items.append(item)
        elif line.strip():
            self._num_skipped += 1


class RunFiles:
    """Log rows and events of a run, each returned once, from its output directory or its `nanguard` folder; neither need exist
    yet."""

    def __init__(self, run: str | Path):
        path = Path(run)
        self.folder = path if path.name == GUARD_FOLDER else path / GUARD_FOLDER
        self._metrics = FollowedFile(self.folder / "metrics.jsonl")
        self._events = FollowedFile(events_path(self.folder, 0), ("signal", "action", "message"))

    def read(self) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
        """Returns the rows and the events that were appended since the last call."""
        return self._metrics.read(), self._events.read()

    @property
    def num_invalid(self) -> int:
        """The number of lines of both files that are no rows and events."""
        return self._metrics.num_invalid + self._events.num_invalid


def _parse_line(line: bytes) -> dict[str, object] | None:
    try:
        item = parse_strict(line)
    except ValueError:
        return None
    return item if isinstance(item, dict) else None
