"""Reads JSON files of a model or checkpoint, which may be missing, large or damaged."""

import json
from pathlib import Path

MAX_BYTES = 64 * 2**20


def read_json(path: Path) -> object:
    """Returns what a JSON file contains, `None` if there is none that can be read."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
