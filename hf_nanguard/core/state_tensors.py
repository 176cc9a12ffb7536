"""What a run keeps that must be finite: trainable parameters, optimizer state, and the buffers a checkpoint holds.

Left out: frozen weights, which no update changes and which may be masks of -inf; buffers that are not saved; what is stored in
integers or in 8-bit floats. In buffers infinities are healthy (masks, the empty ranges of observers) and only NaN is bad.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .finite import local
from .torch_private import is_saved

# 8-bit floats have no kernel for a norm.
WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class Watched:
    """A tensor, whom it belongs to, and whether infinities in it are healthy."""

    tensor: Tensor
    owner: str
    state: str | None = None
    may_be_inf: bool = False
    is_shard: bool = False

    @property
    def name(self) -> str:
        """The name of the parameter or buffer, and that of the state after a slash."""
        return self.owner if self.state is None else f"{self.owner}/{self.state}"

    def is_bad(self, largest: float) -> bool:
        """Returns whether a largest magnitude tells of a bad entry."""
        return math.isnan(largest) or (math.isinf(largest) and not self.may_be_inf)


def is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor of this rank is made of floats that can be computed with, and of no other tensors."""
    return tensor.dtype in WIDE and not hasattr(tensor, "__tensor_flatten__")


def name_saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers that a checkpoint holds."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if is_saved(module, name.rpartition(".")[2]):
                yield name, buffer


def list_watched(
    named: list[tuple[str, Tensor]], optimizer: Any, buffers: Iterable[tuple[str, Tensor]]
) -> Iterator[Watched]:
    """Yields what is looked at: parameters, then optimizer state, then buffers."""
    names = {parameter: name for name, parameter in named}
    groups = [] if optimizer is None else optimizer.param_groups
    for at, group in enumerate(groups):  # master copies may be known to the optimizer only
        for index, parameter in enumerate(group["params"]):
            names.setdefault(parameter, f"parameter {index} of group {at}")
    for parameter, name in names.items():
        if parameter.requires_grad:
            yield from _take_apart(parameter, name)
    for key, state in {} if optimizer is None else dict(optimizer.state).items():
        owner = names.get(key, "unknown parameter") if isinstance(key, Tensor) else str(key)
        for path, tensor in _find_tensors(state):
            yield from _take_apart(tensor, owner, path)
    for name, buffer in buffers:
        yield from _take_apart(buffer, name, may_be_inf=True)


def _find_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in the state of a parameter: LBFGS keeps lists of them, others dictionaries."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _find_tensors(item, f"{path}.{key}" if path else str(key))


def _take_apart(
    tensor: Tensor, owner: str, state: str | None = None, may_be_inf: bool = False, is_shard: bool = False
) -> Iterator[Watched]:
    """Yields the float tensors of which a tensor is made; a quantised one shows a bad block by its scale."""
    part = local(tensor)
    is_shard = is_shard or (part is not tensor and not tensor.is_sparse)
    if part.is_meta or not part.numel():
        return
    if hasattr(part, "__tensor_flatten__"):  # a subclass that wraps others, for which there may be no norm
        for name in part.__tensor_flatten__()[0]:
            inner = None if state is None else f"{state}.{name}"
            yield from _take_apart(getattr(part, name), owner, inner, may_be_inf, is_shard)
    elif is_plain(part):
        yield Watched(part, owner, state, may_be_inf, is_shard)
