"""Copies of tensors, and of containers and objects that hold tensors, in host memory, and how they are put back in place.

Everything that refers to a live tensor (tied weights, optimizers, DDP) stays valid, because values are written into it. Copies
from an accelerator do not block: they are queued behind what the device computes, into pinned memory, and `wait_for_copies` must
be called before they are read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...own_fields import own_fields
from ..finite import local, shard_of

SEQUENCES = (list, tuple)
MAX_DEPTH = 6  # of containers and objects inside each other


@dataclass(frozen=True)
class HostCopy:
    """The values of a tensor, of the shard on this rank if it is sharded."""

    value: Tensor
    device: torch.device


@dataclass(frozen=True)
class FieldsCopy:
    """The attributes of an object that keeps state of its own."""

    fields: dict[str, object]


@dataclass(frozen=True)
class Reference:
    """A value that is put back as it is, whatever it holds by then."""

    value: object


def copy_tensor(tensor: Tensor, reused: HostCopy | None = None) -> HostCopy:
    """Copies a tensor to the host, into the memory of a copy that is no longer needed if that has the same shape and dtype."""
    part = shard_of(tensor.detach())
    if type(part) is not Tensor or part.layout is not torch.strided:  # e.g. a quantised moment
        return HostCopy(part.to("cpu", copy=True), part.device)
    target = None if reused is None else reused.value
    if target is None or target.shape != part.shape or target.dtype != part.dtype:
        target = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.device.type == "cuda")
    return HostCopy(target.copy_(part, non_blocking=True), part.device)


def wait_for_copies() -> None:
    """Waits until all copies from an accelerator are complete."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@torch.no_grad()
def restore_tensor(live: object, saved: HostCopy) -> Tensor:
    """Writes a copy into a live tensor; returns a new one if there is none of its shape and dtype."""
    if isinstance(live, Tensor) and not live.is_meta:
        part = shard_of(live.detach())
        if part.shape == saved.value.shape and part.dtype == saved.value.dtype:
            part.copy_(saved.value)
            return live
    return saved.value.to(saved.device, copy=True)


def copy_tree(value: Any, reused: Any = None, depth: int = 0) -> Any:
    """Copies the tensors of nested containers and objects to the host; other values are kept as they are."""
    if isinstance(value, Tensor):
        return value if value.is_meta else copy_tensor(value, reused if isinstance(reused, HostCopy) else None)
    before: object
    if depth == MAX_DEPTH:
        return Reference(value)
    if isinstance(value, dict):
        before = reused if isinstance(reused, dict) else {}
        return {key: copy_tree(item, before.get(key), depth + 1) for key, item in value.items()}
    if type(value) in SEQUENCES:
        before = reused if type(reused) is type(value) and len(reused) == len(value) else [None] * len(value)
        return type(value)(copy_tree(item, old, depth + 1) for item, old in zip(value, before, strict=True))
    if has_fields(value):
        before = reused.fields if isinstance(reused, FieldsCopy) else None
        return FieldsCopy(copy_tree(own_fields(value), before, depth + 1))
    return value


def restore_tree(live: Any, saved: Any) -> object:
    """Puts a copy back into what it was taken from; what was added since is removed. Returns what is to be kept in its place."""
    if isinstance(saved, HostCopy):
        return restore_tensor(live, saved)
    if isinstance(saved, dict):
        live = live if isinstance(live, dict) else {}
        for key in [key for key in live if key not in saved]:
            del live[key]
        for key, item in saved.items():
            live[key] = restore_tree(live.get(key), item)
        return live
    if type(saved) in SEQUENCES:
        current = list(live) if type(live) in SEQUENCES else []
        current += [None] * (len(saved) - len(current))
        items = [restore_tree(item, old) for item, old in zip(current, saved, strict=False)]
        if type(live) is not list or type(saved) is not list:
            return type(saved)(items)
        live[:] = items
        return live
    if isinstance(saved, FieldsCopy):
        if has_fields(live):
            restore_tree(own_fields(live), saved.fields)
        return live
    return saved.value if isinstance(saved, Reference) else saved


def has_fields(value: object) -> bool:
    """Returns whether a value is an object whose attributes may be state: no module, optimizer, function or class."""
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Optimizer, type)) and not callable(value)


def count_bytes(tensor: Tensor) -> int:
    """Returns how many bytes a tensor has, on this rank if it is sharded."""
    part = local(tensor)
    return part.numel() * part.element_size()


def find_tensors(value: object, depth: int = 0) -> Iterator[Tensor]:
    """Yields the tensors of nested containers and objects."""
    if isinstance(value, Tensor):
        yield value
        return
    inner: Any = ()
    if depth < MAX_DEPTH and isinstance(value, dict):
        inner = value.values()
    elif depth < MAX_DEPTH and (type(value) in SEQUENCES or has_fields(value)):
        inner = value if type(value) in SEQUENCES else own_fields(value).values()
    for item in inner:
        yield from find_tensors(item, depth + 1)


class OptimizerState:
    """The state of an optimizer, with state that it keeps in containers and objects, and the settings of its groups."""

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer

    def copy(self, reused: tuple[dict, list] | None) -> tuple[dict, list]:
        before = {} if reused is None else reused[0]
        groups = [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]
        return copy_tree(dict(self.optimizer.state), before), copy_tree(groups)

    def restore(self, saved: tuple[dict, list], step: int) -> None:
        state, groups = saved
        restore_tree(self.optimizer.state, state)
        for group, settings in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: restore_tree(group.get(key), value) for key, value in settings.items()})
