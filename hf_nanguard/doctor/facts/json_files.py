"""Reads JSON files of a model or checkpoint, which may be missing, large or damaged."""

import json
from pathlib import Path

from ...safe_files import read_file

MAX_BYTES = 64 * 2**20


def read_json(path: Path) -> object:
    """Returns what a JSON file contains, `None` if there is none that can be read."""
    try:
        return json.loads(read_file(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
