"""The gradients as they are at the end of the backward pass, before anyone clips them.

When a callback is asked, clipping has already spread one NaN over every gradient. So the tap hooks the outputs of the
model's forward; when the backward reaches them it queues a look at the gradients behind everything the engine still
has to do, DDP's and FSDP's reductions included. That is two fused reductions a step, left on the device.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.state import GradientState
from torch import Tensor, nn

from ...core.finite import magnitudes
from ...core.runner import same_on_all_ranks


class GradientTap:
    """Measures the gradients of the backward pass that ends an accumulation group.

    Args:
        model (`nn.Module`):
            The model, without DDP wrapper.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.armed = False
        self.queued = False
        self.names: list[str] = []
        self.largest: list[Tensor] = []
        self.norm: Tensor | None = None
        self.losses: list[Tensor] = []
        self.handle = model.register_forward_hook(self._on_forward)

    def remove(self) -> None:
        """Takes the hook off the model."""
        self.handle.remove()

    def arm(self) -> None:
        """Asks for a measurement of the next group."""
        self.armed, self.queued, self.norm = True, False, None
        self.names, self.largest, self.losses = [], [], []

    def _on_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not (self.armed and torch.is_grad_enabled()):
            return
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if isinstance(loss, Tensor):
            self.losses.append(loss.detach())
        if GradientState().sync_gradients:
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._on_backward)

    def _on_backward(self, gradient: Tensor) -> None:
        if not self.queued:
            self.queued = True
            # Twice, so that it runs after the reductions that DDP and FSDP queue while the backward goes on.
            _queue(lambda: _queue(self._measure))

    @torch.no_grad()
    def _measure(self) -> None:
        self.queued = False
        named = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
        gradients = [gradient for _, gradient in named]
        self.names = [name for name, _ in named]
        self.largest = magnitudes(gradients)
        self.norm = same_on_all_ranks(torch.nn.utils.get_total_norm(gradients))

    def named_magnitudes(self) -> list[tuple[str, Tensor]]:
        """Returns the largest magnitude of every gradient, which is NaN or inf where the gradient is."""
        return list(zip(self.names, self.largest, strict=True))


def _queue(callback) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (value for value in output.values() if isinstance(value, Tensor))
    elif isinstance(output, (tuple, list)):
        yield from (value for value in output if isinstance(value, Tensor))
