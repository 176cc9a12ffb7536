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
from .built_trainers import Takeover
from .hidden_frames import hide_in_tracebacks
from .resumed_training import resume_training
from .run_progress import Progress
from .startup.sitecustomize import VARIABLE
from .startup.sitecustomize import say as write_line

STARTUP = str(Path(__file__).parent / "startup")


def say(sentence: str) -> None:
    """Prints a message to the user on standard error, because standard output belongs to the script."""
    write_line(printable(sentence))


def build_environment(
    environment: Mapping[str, str],
    settings: Mapping[str, object],
    full_traceback: bool,
    progress: Progress | None = None,
    restarted_after: str | None = None,
) -> dict[str, str]:
    """Returns an environment in which Python processes guard their trainers, if this process becomes the first of them.

    With `progress` they also resume from the newest good checkpoint and note there how far they have come; `restarted_after` is why
    they were started again.
    """
    given = environment.get("PYTHONPATH", "")  # an empty item is the current folder, an empty variable is none
    folders = [folder for folder in given.split(os.pathsep) if folder != STARTUP] if given else []
    passed: dict[str, object] = {"settings": dict(settings), "full_traceback": full_traceback}
    if progress is not None:
        passed |= {"progress": progress.folder, "restarted_after": restarted_after}
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join([STARTUP, *folders]),
        VARIABLE: f"{os.getpid()} {json.dumps(passed)}",
    }


def take_over(passed: str) -> Takeover:
    """Guards the trainers of this process until it ends. `passed` is the content of the environment variable."""
    values = read_passed(passed)
    takeover = Takeover(values["settings"], say)
    takeover.__enter__()
    if not values["full_traceback"]:
        hide_in_tracebacks(say)
    if "progress" in values:
        from transformers import Trainer

        resume_training(Trainer, Progress(str(values["progress"])), values.get("restarted_after"), say)
    return takeover


def read_passed(passed: str) -> dict[str, Any]:
    """Returns what [`build_environment`] has passed on. A variable that was tampered with is an [`ArgumentError`]."""
    try:
        values = json.loads(passed.partition(" ")[2])
        settings = {name.removeprefix(PREFIX): value for name, value in values["settings"].items()}
        check_settings(settings, PREFIX)
        return {**values, "full_traceback": values["full_traceback"] is True}
    except ArgumentError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{VARIABLE} is not what nanguard run has set") from error
