"""The gradients as they are at the end of the backward pass, before anyone clips them.

When a callback is asked, clipping has already spread one NaN over every gradient. So the tap hooks the outputs of the
model's forward; when the backward reaches them it queues a look at the gradients behind everything the engine still
has to do, DDP's and FSDP's reductions included. That is two fused reductions a step, left on the device. What the
forward was called with is held by reference until the step is decided, so that a bad one can be run again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import GradientState
from torch import Tensor, nn

from ...core.finite import magnitudes
from ...core.rerun.nested_inputs import find_tensors
from ...core.rerun.runner import same_on_all_ranks
from ...core.rng import RngState


@dataclass(frozen=True)
class Call:
    """One forward of the model in training: what it was called with, and the random state right before."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rng: RngState


class GradientTap:
    """Measures the gradients of the backward pass that ends an accumulation group.

    Args:
        model (`nn.Module`):
            The model, without DDP wrapper.
        holds_calls (`bool`, *optional*, defaults to `False`):
            Whether to hold what the forward is called with.
    """

    def __init__(self, model: nn.Module, holds_calls: bool = False):
        self.model = model
        self.calls: list[Call] = []
        self.armed = False
        self.queued = False
        self.names: list[str] = []
        self.largest: list[Tensor] = []
        self.norm: Tensor | None = None
        self.losses: list[Tensor] = []
        self.handles = [model.register_forward_hook(self._on_forward)]
        if holds_calls:
            self.handles.append(model.register_forward_pre_hook(self._before_forward, with_kwargs=True))

    def remove(self) -> None:
        """Takes the hooks off the model."""
        for handle in self.handles:
            handle.remove()
        self.calls = []

    def arm(self) -> None:
        """Asks for a measurement of the next group."""
        self.armed, self.queued, self.norm = True, False, None
        self.names, self.largest, self.losses = [], [], []
        self.calls = []

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.armed and torch.is_grad_enabled():
            device = next(module.parameters()).device
            self.calls.append(Call(args, dict(kwargs), RngState.capture(device.type)))

    def _on_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not (self.armed and torch.is_grad_enabled()):
            return
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if isinstance(loss, Tensor):
            self.losses.append(as_scalar(loss.detach()))
        if GradientState().sync_gradients:
            for tensor in find_tensors(output):
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


def as_scalar(loss: Tensor) -> Tensor:
    """Returns a loss as the host trains on it: the mean, if a model has one for each sample or each device."""
    return loss.mean() if loss.numel() > 1 else loss
