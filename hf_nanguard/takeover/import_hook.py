"""Something is done with a module at the moment it is first imported, and nothing is imported for it."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class Arrival(importlib.abc.MetaPathFinder):
    """Waits, in `sys.meta_path`, for a module and calls `then` with it: once it is there, before anybody else has it.

    Args:
        name (`str`):
            The module, found by Python's own path finder.
        then (`Callable`):
            What is called with it, once.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], None]):
        self.name = name
        self.then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del vars(loader)["exec_module"]
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.then(module)

        vars(loader)["exec_module"] = exec_module
        return spec
