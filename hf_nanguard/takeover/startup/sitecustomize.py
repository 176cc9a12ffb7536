"""Python imports this at the start of every process that a guarded command starts: ranks of a launcher, spawned workers.

Its folder is put first on their `PYTHONPATH` by `nanguard run`, and nowhere else. It hides a `sitecustomize` that the
machine may have, so that one is run from here.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path


def run_hidden() -> None:
    """Runs the `sitecustomize` that would have been imported without this one."""
    here = str(Path(__file__).parent)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != here])
    if spec is not None and spec.loader is not None and spec.origin != __file__:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def take_over() -> None:
    """Guards the trainers of this process, if this Python has the package at all."""
    if importlib.util.find_spec("hf_nanguard") is not None:
        from hf_nanguard.cli.run import take_over_child

        take_over_child()


run_hidden()
take_over()
