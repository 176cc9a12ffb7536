"""A state of the guard in a checkpoint: written whole, with a checksum, and used only if it is what was written."""

import hashlib
import json
import logging
from pathlib import Path

from ..core.event import JsonObject, parse_strict
from ..safe_files import read_file, write_file

logger = logging.getLogger("hf_nanguard")

CHECKSUM = "checksum"
MAX_BYTES = 64 * 2**20


def write_state(path: Path, state: JsonObject) -> None:
    """Writes a state beside the trainer's, in a checkpoint that is there. A failure is logged: it must not end the run."""
    if not path.parent.is_dir():
        return
    try:
        plain = json.loads(json.dumps(state, allow_nan=False))  # as it will be read
        write_file(path, json.dumps({**plain, CHECKSUM: _checksum(plain)}).encode("ascii"))
    except (OSError, ValueError, TypeError) as error:
        logger.warning("hf_nanguard: %s was not written, so a resumed run begins new statistics: %s", path, error)


def read_state(path: Path) -> JsonObject | None:
    """Returns the state in a file, `None` if there is none. One that is not what `write_state` wrote is logged and left out."""
    try:
        state: object = parse_strict(read_file(path, MAX_BYTES))
        if not isinstance(state, dict) or state.pop(CHECKSUM, None) != _checksum(state):
            raise ValueError("its content does not match its checksum")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        report_unusable(path, error)
        return None
    return state


def report_unusable(path: Path, error: Exception) -> None:
    """Logs that a state is not used."""
    logger.warning("hf_nanguard: %s was not readable (%s), so counts and statistics start anew.", path, error)


def _checksum(state: JsonObject) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True, allow_nan=False).encode("ascii")).hexdigest()
