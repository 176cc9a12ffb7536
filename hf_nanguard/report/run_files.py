"""JSONL files of a run: strict JSON, one object a line, flushed at once so that a killed run loses nothing."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger("hf_nanguard")


class JsonlWriter:
    """Appends objects to a file, which is made (with its folder) by the first of them.

    A disk that is full or read-only must not end a run: what cannot be written is lost, and that is said once.

    Args:
        path (`str` or `Path`):
            The file.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._begun = False
        self._failed = False

    def __call__(self, item: dict[str, Any]) -> None:
        """Writes one object; the file is open only meanwhile. Non-finite floats must be strings (`core.event.strict`)."""
        line = json.dumps(item, allow_nan=False, default=str) + "\n"
        try:
            if not self._begun:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _cut_half_line(self.path)
                self._begun = True
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            if not self._failed:
                logger.error("hf_nanguard: %s cannot be written, so lines of it are lost: %s", self.path, error)
            self._failed = True


def _cut_half_line(path: Path) -> None:
    """Takes off a last line that a crash has cut, so that nothing is glued to it; a whole one gets its end."""
    if not path.is_file():
        return
    text = path.read_bytes()
    half = text[text.rfind(b"\n") + 1 :]
    if not half:
        return
    with path.open("r+b") as file:
        file.seek(len(text) - len(half))
        try:
            json.loads(half)
        except ValueError:
            file.truncate()
        else:
            file.write(half + b"\n")


def events_path(directory: str | Path, rank: int) -> Path:
    """Returns the event file of a rank below a run's `nanguard` folder."""
    return Path(directory) / ("events.jsonl" if rank == 0 else f"events-rank{rank}.jsonl")


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file. A last line cut off by a crash is left out."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            if number < len(lines) - 1:
                raise


class Tail:
    """The objects that come to a file from now on; those of earlier runs in the same folder are left out.

    Args:
        path (`str` or `Path`):
            The file, which may not be there yet.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._num_old = len(self._read_all())

    def read(self) -> list[dict[str, Any]]:
        """Returns what has come since."""
        return self._read_all()[self._num_old :]

    def _read_all(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.path)) if self.path.is_file() else []
