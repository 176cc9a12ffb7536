"""What `nanguard run` can run, each as Python itself would: a script, a module, a command that is a Python entry point."""

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
from types import CodeType, ModuleType
from typing import Any

from ..errors import ArgumentError

WAY_OUT = "It takes a .py file, -m and a module, or a command that is written in Python, such as trl."


@dataclass(frozen=True)
class Target:
    """A program that can be run in this process.

    Args:
        argv (`list[str]`):
            What it will see as `sys.argv`.
        folder (`str`, *optional*):
            What it will see as `sys.path[0]`.
        run (`Callable`):
            Runs it as `__main__`.
    """

    argv: list[str]
    folder: str | None
    run: Callable[[], None]

    def execute(self) -> None:
        """Runs it; `sys.argv`, `sys.path` and `__main__` are its own meanwhile."""
        argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
        sys.argv = self.argv
        if self.folder is not None and not sys.flags.safe_path:
            sys.path[0] = self.folder
        try:
            self.run()
        finally:
            sys.argv, sys.path[:] = argv, path
            sys.modules["__main__"] = main


def find_target(words: Sequence[str]) -> Target:
    """Returns what a command line names.

    Raises:
        `ArgumentError`: it names nothing that can be run here.
    """
    if not words:
        raise ArgumentError(f"nanguard run must be given what to run. {WAY_OUT}")
    name, rest = words[0], list(words[1:])
    if name == "-m":
        if not rest:
            raise ArgumentError("-m must be given a module. For example nanguard run -m my_package.train.")
        return _find_module(rest[0], rest[1:])
    if os.path.isfile(name):
        return _find_script(name, rest)
    if os.sep not in name and not name.endswith(".py"):
        found = entry_points(group="console_scripts", name=name)
        if found:
            entry, path = next(iter(found)), shutil.which(name)
            folder = None if path is None else os.path.dirname(path)
            return Target([path or name, *rest], folder, lambda: sys.exit(entry.load()()))
        path = shutil.which(name)
        if path is not None:
            return _find_script(path, rest)
    raise ArgumentError(f"nanguard run must be given something that exists, got {name!r}. {WAY_OUT}")


def _find_script(path: str, arguments: list[str]) -> Target:
    if not path.endswith((".py", ".pyw")):
        with open(path, "rb") as file:
            first = file.readline(200)
        if os.path.realpath(path) == os.path.realpath(sys.executable):
            raise ArgumentError(
                f"nanguard run is the interpreter itself, got {path!r}. Leave it out: nanguard run script.py."
            )
        if not (first.startswith(b"#!") and b"python" in first):
            raise ArgumentError(f"nanguard run must be given something in Python, got {path!r}. {WAY_OUT}")
    full = os.path.abspath(path)

    def run() -> None:
        with io.open_code(full) as file:
            source = file.read()
        _run_as_main(lambda: compile(source, full, "exec", dont_inherit=True), full, SourceFileLoader("__main__", full))

    return Target([path, *arguments], os.path.dirname(os.path.realpath(path)), run)


def _find_module(name: str, arguments: list[str]) -> Target:
    with _first_on_path(os.getcwd()):
        spec = _find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None or spec.origin is None:
        raise ArgumentError(
            f"-m must be given a module that can be run, got {name!r}. Is it installed, or in this folder?"
        )
    code_of: Any = spec.loader

    def run() -> None:
        _run_as_main(lambda: code_of.get_code(spec.name), str(spec.origin), code_of, spec)

    return Target([spec.origin, *arguments], os.getcwd(), run)


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{name}.".startswith(f"{error.name}."):
            raise ArgumentError(f"-m {name} needs {error.name}, which is not installed.") from error
        return None
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # what `python -m` tells in a sentence too
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ArgumentError(f"-m must be given a module that can be found, got {name!r} ({reason}).") from error


@contextmanager
def _first_on_path(folder: str) -> Iterator[None]:
    before = list(sys.path)
    if not sys.flags.safe_path:
        sys.path[0] = folder
    try:
        yield
    finally:
        sys.path[:] = before


def _run_as_main(compile_code: Callable[[], CodeType], file: str, loader: Any, spec: ModuleSpec | None = None) -> None:
    """Runs code as the main module of this process, as `python file` (or `python -m`) does."""
    module = ModuleType("__main__")
    package = None if spec is None else spec.parent
    cached = None if spec is None else spec.cached
    vars(module).update(__file__=file, __loader__=loader, __spec__=spec, __package__=package, __cached__=cached)
    vars(module).update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    exec(compile_code(), vars(module))
