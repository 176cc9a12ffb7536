"""What `nanguard run` can run: a script, a module, or a command written in Python, as arguments of the interpreter."""

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from ..errors import ArgumentError

WAY_OUT = "Give a .py file, -m and a module, or a command written in Python, such as trl."


def find_command(words: Sequence[str]) -> list[str]:
    """Returns the arguments of Python that run what a command line names."""
    if not words:
        raise ArgumentError(f"nanguard run needs something to run. {WAY_OUT}")
    name, rest = words[0], list(words[1:])
    if name == "-m":
        if not rest:
            raise ArgumentError("-m needs the name of a module, e.g. nanguard run -m my_package.train.")
        return ["-m", *rest]
    if name == "-" or (os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name)):
        return [name, *rest]  # standard input or a pipe, which can be read only once
    if os.path.isfile(name) or os.path.isfile(os.path.join(name, "__main__.py")):
        check_script(name)
        return [name, *rest]
    if os.sep not in name and not name.endswith(".py"):
        return [*_find_installed(name), *rest]
    raise ArgumentError(f"No such file or command: {name}. {WAY_OUT}")


def check_script(path: str) -> None:
    """Refuses a file that is not a Python script."""
    if os.path.isdir(path) or path.endswith((".py", ".pyw", ".pyc", ".pyz", ".zip")):
        return
    if os.path.realpath(path) == os.path.realpath(sys.executable):
        raise ArgumentError(f"{path} is the Python interpreter. Leave it out: nanguard run script.py.")
    if not is_python(path):
        raise ArgumentError(f"{path} is not a Python script. {WAY_OUT}")


def is_python(path: str) -> bool:
    """Returns whether the first line of a file names Python as its interpreter."""
    with open(path, "rb") as file:
        first = file.readline(200)
    return first.startswith(b"#!") and b"python" in first


def _find_installed(name: str) -> list[str]:
    path = shutil.which(name)
    entry = next(iter(entry_points(group="console_scripts", name=name)), None)
    if entry is not None and (path is None or not is_python(path)):  # on some systems commands are binary files
        function = entry.attr.partition(".")[0]
        return ["-c", f"import sys; from {entry.module} import {function}; sys.exit({entry.attr}())"]
    if path is None:
        raise ArgumentError(f"No such file or command: {name}. {WAY_OUT}")
    check_script(path)
    return [path]
