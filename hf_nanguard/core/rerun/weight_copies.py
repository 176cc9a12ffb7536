"""Copies of the weights that a trainer or a callback keeps (an EMA, a reference model that follows), as a part of a snapshot.

They are searched for in attributes, lists and dictionaries, each time a snapshot is taken, because many are built late. A module, or
a list or dictionary of tensors, is a copy if most trained parameters have a tensor of their shape in it. Only `__dict__` is looked
at, so no code of others runs. The search stops after `MAX_OBJECTS` objects or `MAX_DEPTH` levels. It costs no host read; each copy
that is found costs its size in host memory.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...own_fields import own_fields
from ..finite import shard_of
from .host_copy import HostCopy, copy_tensor, has_fields, restore_tensor

MAX_OBJECTS, MAX_DEPTH = 5_000, 4
MAX_ITEMS = 10_000  # of a list or dictionary; longer ones are data
OURS = __name__.partition(".")[0] + "."
MIRRORED = 0.5  # share of the trained parameters whose shapes a copy has

PLAIN = (str, bytes, int, float, type(None))

Path = tuple[Any, ...]  # an owner, then the names of attributes, keys and indices that lead from it to a holder


@dataclass(frozen=True)
class Holder:
    """What holds tensors, how it was reached, and the tensors by key."""

    name: str
    path: Path
    value: object
    tensors: dict[object, Tensor]


@dataclass(eq=False, repr=False)
class WeightCopies:
    """The copies of the weights of a model that somebody keeps."""

    model: nn.Module
    find_owners: Callable[[], Mapping[str, object]]  # returns where to search: objects by name
    ignored: Collection[str]  # names of what is not searched, as `owner.attribute`
    tell: Callable[[str], None]  # of each name that holds as much as the model and is not known to be a copy
    reported: set[str] = field(default_factory=set, init=False)

    def find(self) -> list[Holder]:
        """Returns the copies there are now."""
        parameters = list(self.model.parameters())
        own = {id(tensor) for tensor in (*parameters, *self.model.buffers())}
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        shapes, size = Counter(parameter.shape for parameter in trained), sum(map(Tensor.numel, trained))
        found = []
        for holder in self._search():
            tensors = list(holder.tensors.values())
            if not shapes or any(id(tensor) in own for tensor in tensors):
                continue
            if (shapes & Counter(tensor.shape for tensor in tensors)).total() >= MIRRORED * len(trained):
                found.append(holder)
                continue
            num_floats = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
            if not isinstance(holder.value, nn.Module) and num_floats >= MIRRORED * size:
                self._tell(holder.name)
        return found

    def _tell(self, name: str) -> None:
        if name not in self.reported:
            self.reported.add(name)
            self.tell(name)

    def _search(self) -> Iterator[Holder]:
        """Yields what holds tensors, each once, level by level."""
        seen: set[int] = set()
        open_: list[tuple[str, object, Path]] = [(name, owner, (owner,)) for name, owner in self.find_owners().items()]
        for number, (name, value, path) in enumerate(open_):
            if number >= MAX_OBJECTS:
                return
            if id(value) in seen or type(value).__module__.startswith(OURS):  # snapshots hold copies too
                continue
            seen.add(id(value))
            if tensors := _list_tensors(value):
                yield Holder(name, path, value, tensors)
            elif len(path) <= MAX_DEPTH and not isinstance(value, nn.Module):
                open_ += [
                    (f"{name}.{key}", item, (*path, key))
                    for key, item in _list_items(value)
                    if not isinstance(item, PLAIN) and f"{name}.{key}" not in self.ignored
                ]

    def num_bytes(self) -> int:
        """Returns how much host memory the copies of now need on this rank."""
        parts = [shard_of(tensor) for holder in self.find() for tensor in holder.tensors.values()]
        return sum(part.numel() * part.element_size() for part in parts)

    def copy(self, reused: Any) -> list["SavedHolder"]:
        before = {saved.name: saved.copies for saved in reused or ()}
        saved = []
        for each in self.find():
            old, module = before.get(each.name, {}), each.value if isinstance(each.value, nn.Module) else None
            copies = {key: copy_tensor(tensor, old.get(key)) for key, tensor in each.tensors.items()}
            saved.append(SavedHolder(each.name, each.path, module, type(each.value), copies))
        return saved

    def restore(self, saved: list["SavedHolder"], step: int) -> None:
        for each in saved:
            each.restore()


@dataclass(frozen=True)
class SavedHolder:
    """Copies of what a holder held. A module is kept itself; lists, dictionaries and tensors may be replaced in every step, so
    they are looked up where they are by then, and not kept alive."""

    name: str
    path: Path
    module: nn.Module | None
    kind: type[object]
    copies: dict[Any, HostCopy]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the values back, in place where there is a tensor of that shape."""
        now = self.module if self.module is not None else _walk(*self.path)
        live = _list_tensors(now)
        values = {name: restore_tensor(live.get(name), copied) for name, copied in self.copies.items()}
        if isinstance(now, dict) or (isinstance(now, list) and len(now) >= len(values)):
            for name, value in values.items():
                now[name] = value
            return
        container, key = _open(_walk(*self.path[:-1])), self.path[-1]
        if isinstance(container, dict) or (isinstance(container, list) and key < len(container)):
            container[key] = self._build(values)

    def _build(self, values: dict[object, Tensor]) -> object:
        if self.module is not None:
            return self.module
        if issubclass(self.kind, Tensor):
            return values[None]
        return (
            values if issubclass(self.kind, dict) else (list if issubclass(self.kind, list) else tuple)(values.values())
        )


def _walk(owner: object, *keys: object) -> object:
    """Returns what a path leads to now, `None` if it leads nowhere any more."""
    for key in keys:
        owner = dict(_list_items(owner)).get(key)
    return owner


def _open(value: object) -> object:
    """Returns the container whose items are those of a value: itself, or its attributes."""
    return own_fields(value) if has_fields(value) else value


def _list_tensors(value: object) -> dict[object, Tensor]:
    """Returns the tensors that a module, a list, a tuple or a dictionary holds directly."""
    if isinstance(value, nn.Module):
        return {**dict(value.named_parameters()), **dict(value.named_buffers())}
    if isinstance(value, Tensor):
        return {None: value}
    items = _list_items(value) if isinstance(value, (dict, list, tuple)) else []
    return {key: item for key, item in items if isinstance(item, Tensor)}


def _list_items(value: object) -> list[tuple[object, object]]:
    """Returns the items of a container or the attributes of an object, with their keys."""
    items = _open(value)
    if not isinstance(items, (dict, list, tuple)) or len(items) > MAX_ITEMS:
        return []
    return list(items.items()) if isinstance(items, dict) else list(enumerate(items))
