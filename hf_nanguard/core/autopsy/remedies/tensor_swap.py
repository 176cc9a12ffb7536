"""Replaces weights and inputs with changed copies for the duration of a replay.

No tensor of the model is written. Assigning `.data` would be simpler, but makes torch forget the gradient accumulators that
DDP has hooked; so the modules' tables are changed, and the very same tensors are put back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...rerun.nested_inputs import map_tensors
from ...torch_private import copy_hooks, list_tensor_slots
from ..evidence.suspect_batch import SuspectBatch


@contextmanager
def swapped(suspect: SuspectBatch, model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replaces parameters and buffers with changed copies, a tied one with one copy, and puts the very same tensors back."""
    places = list_tensor_slots(model)
    before = [table[key] for table, key in places]
    changed: dict[int, Tensor] = {}

    def exchange(tensor: Tensor) -> Tensor:
        if id(tensor) not in changed:
            changed[id(tensor)] = _replace(tensor, change)
        return changed[id(tensor)]

    with suspect.runner.buffers.suspended():  # a replay would put the old ones back
        try:
            for (table, key), value in zip(places, before, strict=True):
                table[key] = map_tensors(value, exchange)
            yield
        finally:
            for (table, key), value in zip(places, before, strict=True):
                table[key] = value


def _replace(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        value = change(tensor)
    if value is tensor or not isinstance(tensor, nn.Parameter):
        return value
    parameter = nn.Parameter(value, tensor.requires_grad)
    copy_hooks(tensor, parameter)
    return parameter


def zeros_in(target: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a change that replaces the non-finite entries of one tensor with zero."""
    return lambda tensor: tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) if tensor is target else tensor
