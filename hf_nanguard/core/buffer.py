"""Module buffers that a forward pass writes (BatchNorm statistics, counters), kept so that a bad batch leaves no trace.

Which buffers those are is learned from torch's own write counters: everything is kept for the first group, afterwards
only what was seen to change, and the running statistics of normalisation layers. A model without such buffers pays
nothing.
"""

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
            self.slots = [slot[:2] for slot in self.kept if _is_written(*slot[:4])]
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
            module._buffers[name] = buffer
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def _is_written(module: nn.Module, name: str, buffer: Tensor, version: int) -> bool:
    # The fused batch norm kernels write their running statistics without counting it.
    if isinstance(module, _NormBase):
        return True
    return module._buffers[name] is not buffer or buffer._version != version
