"""What `nanguard run` can run, the way Python would run it: a script, a module, or a command written in Python."""

import builtins
import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from ..errors import ArgumentError
from ..plain_text import format_error

WAY_OUT = "Give a .py file, -m and a module, or a command written in Python, such as trl."


@dataclass(frozen=True)
class Target:
    """A program that can be run in this process: its `sys.argv`, its `sys.path[0]`, and what runs it as `__main__`."""

    argv: list[str]
    folder: str | None
    run: Callable[[], None]

    def execute(self) -> None:
        """Runs it with its own `sys.argv`, `sys.path` and `__main__`, and restores ours afterwards."""
        argv, main = sys.argv, sys.modules["__main__"]
        sys.argv = self.argv
        try:
            with _first_on_path(self.folder):
                self.run()
        finally:
            sys.argv, sys.modules["__main__"] = argv, main


def find_target(words: Sequence[str]) -> Target:
    """Returns the program that a command line names."""
    if not words:
        raise ArgumentError(f"nanguard run needs something to run. {WAY_OUT}")
    name, rest = words[0], list(words[1:])
    if name == "-m":
        if not rest:
            raise ArgumentError("-m needs the name of a module, e.g. nanguard run -m my_package.train.")
        return _find_module(rest[0], rest[1:])
    if os.path.isfile(name):
        return _find_script(name, rest)
    if os.sep not in name and not name.endswith(".py"):
        path = shutil.which(name)
        entry = next(iter(entry_points(group="console_scripts", name=name)), None)
        if entry is not None:
            folder = None if path is None else os.path.dirname(path)
            return Target([path or name, *rest], folder, lambda: sys.exit(entry.load()()))
        if path is not None:
            return _find_script(path, rest)
    raise ArgumentError(f"No such file or command: {name}. {WAY_OUT}")


def _find_script(path: str, arguments: list[str]) -> Target:
    if not path.endswith((".py", ".pyw")):
        with open(path, "rb") as file:
            first = file.readline(200)
        if os.path.realpath(path) == os.path.realpath(sys.executable):
            raise ArgumentError(f"{path} is the Python interpreter. Leave it out: nanguard run script.py.")
        if not (first.startswith(b"#!") and b"python" in first):
            raise ArgumentError(f"{path} is not a Python script. {WAY_OUT}")
    loader = SourceFileLoader("__main__", os.path.abspath(path))
    return Target([path, *arguments], os.path.dirname(os.path.realpath(path)), lambda: _run_as_main(loader))


def _find_module(name: str, arguments: list[str]) -> Target:
    with _first_on_path(os.getcwd()):
        spec = _find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None or spec.origin is None:
        raise ArgumentError(f"No module named {name} can be run. Is it installed, or in this folder?")
    return Target([spec.origin, *arguments], os.getcwd(), lambda: _run_as_main(spec.loader, spec))


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{name}.".startswith(f"{error.name}."):
            raise ArgumentError(f"-m {name} needs {error.name}, which is not installed.") from error
        return None
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # `python -m` reports these in one line too
        raise ArgumentError(f"-m {name} cannot be imported: {format_error(error)}.") from error


@contextmanager
def _first_on_path(folder: str | None) -> Iterator[None]:
    before = list(sys.path)
    if folder is not None and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    try:
        yield
    finally:
        sys.path[:] = before


def _run_as_main(loader: Any, spec: ModuleSpec | None = None) -> None:
    """Runs a file, or the module of a spec, as the main module of this process, as `python file` and `python -m` do."""
    module, file = ModuleType("__main__"), str(loader.path if spec is None else spec.origin)
    names = {"__file__": file, "__loader__": loader, "__spec__": spec, "__builtins__": builtins, "__annotations__": {}}
    parts = {"__package__": spec and spec.parent, "__cached__": spec and spec.cached}
    vars(module).update(names, **parts)
    sys.modules["__main__"] = module
    if spec is None:
        with io.open_code(file) as opened:
            code = compile(opened.read(), file, "exec", dont_inherit=True)
    else:
        code = loader.get_code(spec.name)
    exec(code, vars(module))
