"""Lists the tensors of a run that must be finite: trainable parameters, optimizer state, and the buffers of a checkpoint.

Not included are frozen weights, which no update changes and which may be masks of -inf, buffers that are not saved, integers
and 8-bit floats. In buffers, infinities are allowed (masks, the empty ranges of observers) and only NaN is bad.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .finite import local
from .torch_private import inner_tensors, is_saved

# 8-bit floats have no kernel for a norm.
WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class StateTensor:
    """A tensor, the parameter or buffer it belongs to, and whether infinities are allowed in it."""

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
        """Returns whether the tensor has a bad entry, given its largest magnitude."""
        return math.isnan(largest) or (math.isinf(largest) and not self.may_be_inf)


def is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor on this rank is no wrapper of other tensors and has a dtype that norms support."""
    return tensor.dtype in WIDE and not inner_tensors(tensor)


def name_saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers that are saved in a checkpoint."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if is_saved(module, name.rpartition(".")[2]):
                yield name, buffer


def list_state_tensors(
    named: list[tuple[str, Tensor]], optimizer: torch.optim.Optimizer | None, buffers: Iterable[tuple[str, Tensor]]
) -> Iterator[StateTensor]:
    """Yields the tensors to check: parameters, then optimizer state, then buffers."""
    names = {parameter: name for name, parameter in named}
    groups = [] if optimizer is None else optimizer.param_groups
    for at, group in enumerate(groups):  # only the optimizer may have master copies
        for index, parameter in enumerate(group["params"]):
            names.setdefault(parameter, f"parameter {index} of group {at}")
    for parameter, name in names.items():
        if parameter.requires_grad:
            yield from _list_plain_parts(parameter, name)
    for key, state in {} if optimizer is None else dict(optimizer.state).items():
        owner = names.get(key, "unknown parameter") if isinstance(key, Tensor) else str(key)
        for path, tensor in _find_tensors(state):
            yield from _list_plain_parts(tensor, owner, path)
    for name, buffer in buffers:
        yield from _list_plain_parts(buffer, name, may_be_inf=True)


def _find_tensors(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in the state of a parameter: LBFGS keeps lists of them, others dictionaries."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _find_tensors(item, f"{path}.{key}" if path else str(key))


def _list_plain_parts(
    tensor: Tensor, owner: str, state: str | None = None, may_be_inf: bool = False, is_shard: bool = False
) -> Iterator[StateTensor]:
    """Yields the plain float tensors inside a tensor; a bad block of a quantised one shows in its scale."""
    part = local(tensor)
    is_shard = is_shard or (part is not tensor and not tensor.is_sparse)
    if part.is_meta or not part.numel():
        return
    if wrapped := inner_tensors(part):  # a wrapper may not support norms
        for name, each in wrapped.items():
            inner = None if state is None else f"{state}.{name}"
            yield from _list_plain_parts(each, owner, inner, may_be_inf, is_shard)
    elif is_plain(part):
        yield StateTensor(part, owner, state, may_be_inf, is_shard)
