"""What a forward pass writes to modules, kept so that it can be put back: buffers (BatchNorm statistics), frozen parameters
(a momentum encoder) and plain attributes.

Which ones those are is learned, from torch's write counters and, once, from the values: all buffers and attributes are kept
for the first group, afterwards only those that were written since. A model whose forward writes nothing costs nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..torch_private import StateSlot, is_norm_layer, list_state_slots, write_count
from .kept_attributes import KeptAttributes, keep_module


class BufferKeeper:
    """Keeps and restores the buffers, frozen parameters and attributes of modules that training writes."""

    def __init__(self, model: nn.Module):
        self.slots = list_state_slots(model)
        # Fused batch norm kernels write their running statistics without counting it.
        self.written = {i for i, slot in enumerate(self.slots) if slot.is_buffer and is_norm_layer(slot.module)}
        self.seen: dict[int, tuple[int, int, int]] = {}  # what identifies the tensor of each slot, and its writes
        self.kept: list[tuple[StateSlot, Tensor, Tensor]] = []  # each with the tensor and a copy
        bare = model.module if isinstance(model, (DistributedDataParallel, nn.DataParallel)) else model
        self.modules = list(bare.modules())
        self.writers: set[nn.Module] = set()  # whose attributes were put back
        self.attributes: list[KeptAttributes] = []
        self.num_groups = 0

    @torch.no_grad()
    def keep(self) -> None:
        """Keeps the values of now."""
        first = self.num_groups == 0
        before, self.kept = self.kept, []  # what was kept for another group is not put back if this fails
        attributes, self.attributes = self.attributes, []
        if self.num_groups == 1:
            uncounted = {id(slot) for slot, tensor, value in before if not _is_same(tensor, value)}  # through `.data`
            self.written |= {i for i, slot in enumerate(self.slots) if id(slot) in uncounted}
            self.modules = [k.owner for k in attributes if k.is_changed or k.owner in self.writers]
        self.num_groups += 1
        tensors = {i: tensor for i, slot in enumerate(self.slots) if (tensor := slot.get()) is not None}
        seen, self.seen = self.seen, {i: _identify(tensor) for i, tensor in tensors.items()}
        self.written |= {i for i, mark in self.seen.items() if not first and seen.get(i) != mark}
        chosen = [i for i in tensors if i in self.written or (first and self.slots[i].is_buffer)]
        self.kept = [(self.slots[i], tensors[i], tensors[i].clone()) for i in chosen]
        self.attributes = [keep_module(module) for module in self.modules]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back, also a tensor that was replaced by another one since."""
        for attributes in self.attributes:
            if self.num_groups == 1 and attributes.is_changed:
                self.writers.add(attributes.owner)
            attributes.restore()
        for slot, tensor, value in self.kept:
            if slot.get() is not tensor or not _is_same(tensor, value):
                slot.put(tensor)
                tensor.copy_(value)  # counts as a write, so that it is still known as one that is written

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Makes `restore` do nothing inside the block, while other tensors stand in for the buffers."""
        kept, self.kept, attributes, self.attributes = self.kept, [], self.attributes, []
        try:
            yield
        finally:
            self.kept, self.attributes = kept, attributes


def _identify(tensor: Tensor) -> tuple[int, int, int]:
    address = tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided else 0
    return id(tensor), write_count(tensor), address


def _is_same(buffer: Tensor, value: Tensor) -> bool:
    """Returns whether all entries are equal; NaN equals NaN."""
    return torch.equal(buffer, value) or bool(((buffer == value) | ((buffer != buffer) & (value != value))).all())
