"""Python imports this when a child process of `nanguard run` starts: a launcher's rank or a spawned worker.

`nanguard run` puts this folder first on the `PYTHONPATH` of such processes. It hides the `sitecustomize` that the
machine may have, so this file runs that one too.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path


def run_hidden() -> None:
    """Runs the `sitecustomize` that Python would have imported without this one."""
    here = str(Path(__file__).parent)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != here])
    if spec is not None and spec.loader is not None and spec.origin != __file__:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


run_hidden()
if importlib.util.find_spec("hf_nanguard") is not None:  # a child may run another Python
    from hf_nanguard.takeover.child_processes import take_over_child

    take_over_child()
