"""Moves a bad checkpoint to where nobody resumes from it, and no upload takes it along."""

from pathlib import Path
from shutil import rmtree

from ..safe_files import write_file
from .checkpoint_files import QUARANTINE, SENTINEL


def quarantine(folder: Path, limit: int | None) -> Path:
    """Moves a checkpoint to `_bad_checkpoints/` beside it, where the newest `limit` stay (all if `None`); returns where it is
    now."""
    place = folder.parent / QUARANTINE
    place.mkdir(exist_ok=True)
    target = next(path for path in _names(place, folder.name) if not path.exists())
    folder.rename(target)
    if limit is not None and limit > 0:
        kept = sorted((path for path in place.iterdir() if path != target), key=lambda path: path.stat().st_mtime)
        for old in kept[: max(len(kept) + 1 - limit, 0)]:
            rmtree(old, ignore_errors=True)
    return target


def mark_incomplete(folder: Path) -> None:
    """Marks a checkpoint that cannot be moved, so that it is not resumed from."""
    write_file(folder / SENTINEL, b"hf_nanguard found this checkpoint to be bad.\n")


def remove_mark(folder: Path) -> None:
    """Removes the mark of a save that is going on: a preemption's own, or that of an earlier save that was interrupted."""
    (folder / SENTINEL).unlink(missing_ok=True)


def _names(place: Path, name: str):
    yield place / name
    number = 1
    while True:
        yield place / f"{name}.{number}"
        number += 1
