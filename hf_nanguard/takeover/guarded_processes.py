"""Processes of `nanguard run`: the script, launched ranks and spawned workers guard their trainers, each by itself.

The environment puts `startup/` first on `PYTHONPATH`, so that Python imports its `sitecustomize` when a process starts, and
contains the settings of the guard.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.settings import PREFIX, check_settings
from ..errors import ArgumentError
from ..plain_text import printable
from .hidden_frames import hide_in_tracebacks
from .startup.sitecustomize import VARIABLE
from .startup.sitecustomize import say as write_line
from .takeover import Takeover

STARTUP = str(Path(__file__).parent / "startup")


def say(sentence: str) -> None:
    """Prints a message to the user on standard error, because standard output belongs to the script."""
    write_line(printable(sentence))


def build_environment(
    environment: Mapping[str, str], settings: Mapping[str, object], full_traceback: bool
) -> dict[str, str]:
    """Returns an environment in which Python processes guard their trainers, if this process becomes the first of them."""
    folders = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", STARTUP)]
    passed = {"settings": dict(settings), "full_traceback": full_traceback}
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join([STARTUP, *folders]),
        VARIABLE: f"{os.getpid()} {json.dumps(passed)}",
    }


def take_over(passed: str) -> Takeover:
    """Guards the trainers of this process until it ends. `passed` is the content of the environment variable."""
    settings, full_traceback = read_passed(passed)
    takeover = Takeover(settings, say)
    takeover.__enter__()
    if not full_traceback:
        hide_in_tracebacks(say)
    return takeover


def read_passed(passed: str) -> tuple[dict[str, Any], bool]:
    """Returns the settings and whether to show full tracebacks. A variable that was tampered with is an [`ArgumentError`]."""
    try:
        values = json.loads(passed.partition(" ")[2])
        settings = values["settings"]
        check_settings({name.removeprefix(PREFIX): value for name, value in settings.items()}, PREFIX)
        return settings, values["full_traceback"] is True
    except ArgumentError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{VARIABLE} is not what nanguard run has set") from error
