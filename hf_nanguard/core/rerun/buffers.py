"""What a forward pass writes to modules, kept so that it can be put back: buffers (BatchNorm statistics) and plain attributes.

Which ones those are is learned once, from torch's write counters and the values: all are kept for the first group,
afterwards only those that changed, and the running statistics of normalization layers. A model whose forward writes nothing
costs nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..torch_private import get_buffer, is_norm_layer, list_buffers, set_buffer, write_count
from .kept_attributes import KeptAttributes, keep_module


class BufferKeeper:
    """Keeps and restores the buffers, and the attributes of modules, that training writes."""

    def __init__(self, model: nn.Module):
        self.slots = [(module, name) for module, name, _ in list_buffers(model)]
        self.kept: list[tuple[nn.Module, str, Tensor, int, Tensor]] = []
        bare = model.module if isinstance(model, (DistributedDataParallel, nn.DataParallel)) else model
        self.modules = list(bare.modules())
        self.attributes: list[KeptAttributes] = []
        self.learning = True

    @torch.no_grad()
    def keep(self) -> None:
        """Keeps the values that the buffers have now."""
        if self.attributes and self.learning:
            self.slots = [slot[:2] for slot in self.kept if _is_written(*slot)]
            self.modules = [kept.owner for kept in self.attributes if kept.is_changed]
            self.learning = False
        self.attributes = [keep_module(module) for module in self.modules]
        self.kept = [
            (module, name, buffer, write_count(buffer), buffer.clone())
            for module, name in self.slots
            if (buffer := get_buffer(module, name)) is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back, also a buffer that was replaced by another tensor since."""
        for kept in self.attributes:
            kept.restore()
        for module, name, buffer, _, value in self.kept:
            if get_buffer(module, name) is not buffer or not _is_same(buffer, value):
                set_buffer(module, name, buffer)
                buffer.copy_(value)  # counts as a write, so that it is still known as a buffer that is written

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Makes `restore` do nothing inside the block, while other tensors stand in for the buffers."""
        kept, self.kept, attributes, self.attributes = self.kept, [], self.attributes, []
        try:
            yield
        finally:
            self.kept, self.attributes = kept, attributes


def _is_written(module: nn.Module, name: str, buffer: Tensor, version: int, value: Tensor) -> bool:
    # Fused batch norm kernels write their running statistics without counting it, as does any write through `.data`.
    if is_norm_layer(module) or get_buffer(module, name) is not buffer or write_count(buffer) != version:
        return True
    return not _is_same(buffer, value)


def _is_same(buffer: Tensor, value: Tensor) -> bool:
    """Returns whether all entries are equal; NaN equals NaN."""
    return torch.equal(buffer, value) or bool(((buffer == value) | ((buffer != buffer) & (value != value))).all())
