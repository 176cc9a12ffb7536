"""Iterators that a loss reads: nothing can put them back, so they refuse to be read while a micro-batch runs again.

By that the micro-batch counts as one that cannot be run again: its step is skipped, and the iterator is where it would be
without the guard. Iterators are searched in the attributes of trainer and modules, and in closures, globals and objects behind
functions of the user's; not in those of installed packages. The search stops after `MAX_PLACES` variables or `MAX_LEVELS`
levels. It costs nothing on a healthy step.
"""

import io
import os
import sysconfig
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from ...own_fields import own_fields

MAX_PLACES, MAX_LEVELS = 50_000, 4
MAX_ITEMS = 1000  # of a list or dictionary; longer ones are data
CONTAINERS = (dict, list, OrderedDict, defaultdict)
PACKAGES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
OURS = __file__.removesuffix(os.path.join("core", "rerun", os.path.basename(__file__)))


class UnrepeatableError(Exception):
    """A micro-batch that runs again reads from an iterator."""


class ClosedIterator:
    """Stands for an iterator that must not be read. Everything else that it has can be used."""

    def __init__(self, iterator: object, name: object):
        self._iterator = iterator
        self._name = name

    def __iter__(self) -> "ClosedIterator":
        return self

    def __next__(self) -> object:
        raise UnrepeatableError(f"it reads from the iterator {self._name}")

    def __getattr__(self, name: str) -> object:
        return getattr(self._iterator, name)


@dataclass(frozen=True)
class Place:
    """A variable: an item of a namespace, list or dictionary, or the content of a cell."""

    holder: MutableMapping[Any, object] | list[object] | CellType
    name: Any

    def read(self) -> object:
        """Returns the value; `None` without one."""
        try:
            return self.holder.cell_contents if isinstance(self.holder, CellType) else self.holder[self.name]
        except (ValueError, LookupError):  # an empty cell, or an item that was removed
            return None

    def write(self, value: object) -> None:
        """Sets the value."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.name] = value


@contextmanager
def closed_iterators(model: nn.Module, *others: object) -> Iterator[None]:
    """Makes the iterators that a loss may read refuse to be read inside the block.

    Args:
        model (`nn.Module`):
            The model.
        *others (`object`):
            What else the loss consists of: functions, methods, and namespaces as `vars` returns them.
    """
    modules = list(model.modules())
    forwards = {type(module).forward for module in modules}
    closed: list[tuple[Place, object, ClosedIterator]] = []
    try:
        for place in _search([*(own_fields(module) for module in modules), *forwards, *others]):
            if _is_iterator(iterator := place.read()):
                stand_in = ClosedIterator(iterator, place.name)
                closed.append((place, iterator, stand_in))
                place.write(stand_in)
        yield
    finally:
        for place, iterator, stand_in in closed:
            if place.read() is stand_in:
                place.write(iterator)


def _is_iterator(value: object) -> bool:
    """Returns whether a value is read by `next`; a file is not, which a loss may write."""
    return hasattr(type(value), "__next__") and not isinstance(value, (io.IOBase, ClosedIterator))


def _search(roots: Iterable[object]) -> list[Place]:
    """Returns the variables behind some functions and namespaces, each once."""
    found: list[Place] = []
    seen: set[int] = set()
    open_ = [(value, 0) for value in roots]
    for value, level in open_:
        if id(value) in seen or level > MAX_LEVELS:
            continue
        seen.add(id(value))
        places = _list_places(value)
        found += places
        if len(found) > MAX_PLACES:
            break
        open_ += [(place.read(), level + 1) for place in places] + [(part, level) for part in _list_parts(value)]
    return found


def _list_parts(value: object) -> list[object]:
    """Returns what a callable consists of."""
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        return [getattr(value, "__wrapped__", None)]
    return [
        method for method in own_fields(type(value)).values() if isinstance(method, FunctionType) and _is_own(method)
    ]


def _list_places(value: Any) -> list[Place]:
    """Returns the items of a container, the variables that a function of the user's uses, the attributes of an object of such a
    class."""
    if type(value) in CONTAINERS and len(value) <= MAX_ITEMS:
        return [Place(value, key) for key in (value if isinstance(value, dict) else range(len(value)))]
    if isinstance(value, FunctionType):
        code, known = value.__code__, value.__globals__
        cells = map(Place, value.__closure__ or (), code.co_freevars)
        return [*cells, *(Place(known, name) for name in _list_names(code) if name in known)] if _is_own(value) else []
    if isinstance(value, (type, Tensor, nn.Module)) or not hasattr(value, "__dict__"):
        return []
    methods = [method for cls in type(value).__mro__ for method in own_fields(cls).values()]
    is_own = any(isinstance(method, FunctionType) and _is_own(method) for method in methods)
    return [Place(own_fields(value), name) for name in own_fields(value)] if is_own else []


def _list_names(code: CodeType) -> list[str]:
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _list_names(constant)]
    return [*code.co_names, *inner]


def _is_own(function: Callable[..., object]) -> bool:
    """Returns whether a function is the user's, not of an installed package or of the guard."""
    return not function.__code__.co_filename.startswith((*PACKAGES, OURS, "<frozen"))
