"""The folder that a command writes to. Nothing heavy is imported, so that a bad path is reported at once."""

import errno
import os
from pathlib import Path

from ..errors import ArgumentError


def make_folder(flag: str, path: str) -> Path:
    """Makes the folder that a flag names, or raises an `ArgumentError` if it cannot be made or written."""
    try:
        if not path:
            raise FileNotFoundError(errno.ENOENT, "no name")
        os.makedirs(path, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ArgumentError(f"{flag} must be a writable folder, got {path!r} ({error.strerror}).") from error
    return Path(path)
