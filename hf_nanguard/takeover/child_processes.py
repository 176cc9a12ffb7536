"""Child processes of `nanguard run`: launched ranks and spawned workers guard their trainers too.

The parent puts `startup/` first on their `PYTHONPATH`, so that Python imports its `sitecustomize` when it starts, and
passes on the settings of the guard in an environment variable.
"""

import atexit
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..plain_text import printable
from .takeover import Takeover

STARTUP = str(Path(__file__).parent / "startup")
# JSON: the settings, and the folders in which a process that builds a trainer makes a file.
VARIABLE = "HF_NANGUARD_RUN"


def say(sentence: str) -> None:
    """Prints a message to the user on standard error, because standard output belongs to the script."""
    print(f"nanguard: {printable(sentence)}", file=sys.stderr, flush=True)


@contextmanager
def guard_children(settings: Mapping[str, object], variables: Mapping[str, str | None]) -> Iterator[list[str]]:
    """Guards Python processes that are started inside the context, with these settings and environment variables.

    A variable that is `None` is removed. Yields the folders for [`mark_built`]: the first belongs to this run, the others to
    runs that it is part of.
    """
    before, process = dict(os.environ), os.getpid()
    folder = tempfile.mkdtemp(prefix="nanguard-run-")
    folders = [folder, *(json.loads(before[VARIABLE])["folders"] if VARIABLE in before else [])]
    added = {
        **variables,
        "PYTHONPATH": os.pathsep.join([STARTUP, *filter(None, [before.get("PYTHONPATH")])]),
        VARIABLE: json.dumps({"settings": dict(settings), "folders": folders}),
    }
    _set_environment(added)
    try:
        yield folders
    finally:
        _set_environment({name: before.get(name) for name in added})
        if os.getpid() == process:  # a script may fork and end both
            shutil.rmtree(folder, ignore_errors=True)


def _set_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def mark_built(folders: Sequence[str]) -> None:
    """Records that this process has built a trainer."""
    for folder in folders:
        if os.path.isdir(folder):
            Path(folder, str(os.getpid())).touch()


def take_over_child() -> None:
    """Guards the trainers of a process that `nanguard run` has started, until the process ends."""
    if VARIABLE in os.environ:
        passed = json.loads(os.environ[VARIABLE])
        takeover = Takeover(passed["settings"], say, lambda: mark_built(passed["folders"]))
        atexit.register(takeover.report_events)
        takeover.__enter__()
