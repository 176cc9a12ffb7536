"""`<output_dir>/nanguard/good.json`: the last checkpoint of a run that was read back and found good, written whole or not at all."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from ..core.event import JsonValue, strict
from ..safe_files import make_folder, open_to_read, write_file
from .checkpoint_files import read_json

SCHEMA = 1
FILE = Path("nanguard") / "good.json"  # below the output directory
WHOLE = 2**20  # a file up to this size is hashed as a whole
ENDS = 2**16  # of a larger one, these many bytes at its begin and end are


@dataclass(frozen=True)
class GoodRecord:
    """The last good checkpoint of a run."""

    step: int
    path: str  # its folder, relative to the output directory
    digest: str  # [`digest_folder`] of it
    metric: dict[str, JsonValue] | None  # the metrics that were logged last before it was saved
    accepted: list[str]  # tensors that are not finite by design: they were so before the run


def write_good(run: Path, record: GoodRecord) -> None:
    """Writes the record of a run; raises an `OSError` if that cannot be."""
    make_folder((run / FILE).parent)
    write_file(run / FILE, json.dumps(strict({"schema": SCHEMA, **asdict(record)}), allow_nan=False).encode("ascii"))


def read_good(run: Path) -> GoodRecord | None:
    """Returns the record of a run, `None` if there is none or it cannot be used."""
    try:
        found = read_json(run / FILE)
        record = GoodRecord(**{name: found[name] for name in GoodRecord.__dataclass_fields__})
    except (ValueError, KeyError, TypeError):
        return None
    is_valid = isinstance(record.step, int) and isinstance(record.path, str) and isinstance(record.accepted, list)
    return record if is_valid and all(isinstance(name, str) for name in record.accepted) else None


def digest_folder(folder: Path) -> str:
    """Returns a SHA-256 over the names and sizes of all files, small files as a whole and both ends of large ones.

    It tells another or a truncated file, not a flipped bit in the middle of a large one, and costs next to nothing.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()}\0{size}\0".encode())
        with open_to_read(path) as file:
            digest.update(file.read(size if size <= WHOLE else ENDS))
            if size > WHOLE:
                file.seek(-ENDS, os.SEEK_END)
                digest.update(file.read())
    return digest.hexdigest()
