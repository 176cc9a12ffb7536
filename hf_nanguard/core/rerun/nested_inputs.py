"""Tensors nested in mappings, sequences and dataclasses: found, named and changed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def list_parts(value: Any) -> Iterable[tuple[Any, Any]]:
    """Returns keys and values of a mapping, list, tuple or dataclass; nothing for anything else."""
    if isinstance(value, Mapping):  # first, because a `ModelOutput` is a dataclass, too
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if is_dataclass(value) and not isinstance(value, type):
        return vars(value).items() if hasattr(value, "__dict__") else _list_slots(value)
    return ()


def _list_slots(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name)) for field in fields(value) if hasattr(value, field.name)]


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors inside nested values, in order."""
    if isinstance(value, Tensor):
        yield value
    for _, part in list_parts(value):
        yield from find_tensors(part)


def name_tensors(value: Any, prefix: str = "") -> dict[str, Tensor]:
    """Returns the tensors inside nested values by a dotted name; a lone tensor is called `input`."""
    if isinstance(value, Tensor):
        return {prefix or "input": value}
    found: dict[str, Tensor] = {}
    for key, part in list_parts(value):
        found |= name_tensors(part, f"{prefix}.{key}" if prefix else str(key))
    return found


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns a copy of nested values with every tensor changed. A dataclass without tensors, e.g. a config, stays itself."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, Mapping) and next(find_tensors(value), None) is None:
        return value
    return map_parts(value, lambda part: map_tensors(part, change))


def map_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a container of the same type with every part changed; a value that is no container is returned as it is."""
    if isinstance(value, (list, tuple)):
        parts = [change(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    changed = {key: change(part) for key, part in list_parts(value)}
    if isinstance(value, Mapping):
        result: Any = copy(value)
        for key, part in changed.items():
            result[key] = part
        return result
    if not changed:
        return value
    result = copy(value)
    for name, part in changed.items():
        object.__setattr__(result, name, part)  # a frozen dataclass, too
    return result
