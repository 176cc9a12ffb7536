"""Module buffers that a forward pass writes (BatchNorm statistics, counters), kept so that a bad batch leaves no trace.

Which buffers those are is learned once, from torch's write counters and their values: everything is kept for the first
group, afterwards only what was seen to change, and the running statistics of normalisation layers. A model without such
buffers pays nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class BufferKeeper:
    """Keeps and restores the buffers that training writes.

    Args:
        model (`nn.Module`):
            The model in training.
    """

    def __init__(self, model: nn.Module):
        self.slots = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.kept: list[tuple[nn.Module, str, Tensor, int, Tensor]] = []
        self.learning = True

    @torch.no_grad()
    def keep(self) -> None:
        """Keeps the values the buffers have now."""
        if self.kept and self.learning:
            self.slots = [slot[:2] for slot in self.kept if _is_written(*slot)]
            self.learning = False
        self.kept = [
            (module, name, buffer, buffer._version, buffer.clone())
            for module, name in self.slots
            if (buffer := module._buffers[name]) is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts every kept buffer back, also one that was replaced by another tensor since."""
        for module, name, buffer, _, value in self.kept:
            if module._buffers[name] is not buffer or not _is_same(buffer, value):
                module._buffers[name] = buffer
                buffer.copy_(value)  # counts as a write, so that what was put back stays known as written

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Restores nothing inside the block."""
        kept, self.kept = self.kept, []
        try:
            yield
        finally:
            self.kept = kept

    @torch.no_grad()
    def restore_where(self, bad: Tensor) -> None:
        """Puts every kept buffer back where the device flag `bad` is set, without a host read once it has learned."""
        for slot in self.kept:
            module, name, buffer, _, value = slot
            current = module._buffers[name]
            if current is not None and (not self.learning or _is_written(*slot)):
                buffer.copy_(torch.where(bad, value, current))
                module._buffers[name] = buffer


def _is_written(module: nn.Module, name: str, buffer: Tensor, version: int, value: Tensor) -> bool:
    # Fused batch norm kernels write their running statistics without counting it, and so does anyone through `.data`.
    if isinstance(module, _NormBase) or module._buffers[name] is not buffer or buffer._version != version:
        return True
    return not _is_same(buffer, value)


def _is_same(buffer: Tensor, value: Tensor) -> bool:
    """Whether all entries are equal, a NaN to a NaN."""
    return torch.equal(buffer, value) or bool(((buffer == value) | ((buffer != buffer) & (value != value))).all())
