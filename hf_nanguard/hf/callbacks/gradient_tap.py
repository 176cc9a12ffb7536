"""Measures gradients at the end of the backward pass, before anything clips them.

When the trainer calls a callback, clipping has already spread one NaN over every gradient. So the tap hooks the outputs of the
model's forward; when the backward reaches them, it queues a measurement behind everything the autograd engine still has to
do, including the reductions of DDP and FSDP. That takes two fused reductions a step, which stay on the device.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from accelerate.state import GradientState
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...boundary import Boundary
from ...core.finite import magnitudes
from ...core.rerun.nested_inputs import find_tensors
from ...core.rerun.runner import same_on_all_ranks
from ...core.torch_private import run_after_backward

NOT_TAPPED = "The gradients could not be measured: no output of the model's forward led to the backward pass."


class GradientTap:
    """Measures the gradients of the backward pass that ends an accumulation group. Its hooks pass the `boundary`."""

    def __init__(self, model: nn.Module, boundary: Boundary | None = None):
        self.model = model
        self._behind = partial((boundary or Boundary()).wrapped, "gradient tap")
        self.armed = False  # whether a measurement was requested
        self.queued = False  # whether the backward pass that runs now has queued what follows it
        self.magnitudes: list[tuple[str, Tensor]] = []  # the largest of each gradient, NaN or inf where the gradient is
        self.norm: Tensor | None = None
        self.losses: list[Tensor] = []
        self._handle: RemovableHandle | None = None

    def arm(self) -> None:
        """Requests a measurement of the next accumulation group."""
        self.disarm()
        self.armed, self.norm = True, None
        self.magnitudes, self.losses = [], []
        self._hook_forward()

    def disarm(self) -> None:
        """Ends the measurement; what was measured stays until the next [`GradientTap.arm`]."""
        self.armed = self.queued = False
        self._unhook_forward()

    def _hook_forward(self) -> None:
        """Adds the hook of one forward: after an error in the forward, the loss or the backward none is left."""
        self._handle = self.model.register_forward_hook(self._behind(self._on_forward), always_call=True)

    def _unhook_forward(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def _on_forward(self, module: nn.Module, args: object, output: object) -> None:
        if not torch.is_grad_enabled() and output is not None:
            return
        self._unhook_forward()
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if isinstance(loss, Tensor):
            # As the trainer uses it: the mean, if a model returns one for each sample or device.
            self.losses.append(loss.detach().mean() if loss.numel() > 1 else loss.detach())
        self.queued = False
        after = partial(self._after_backward, GradientState().sync_gradients)
        on_backward = self._behind(partial(self._on_backward, self._behind(after)))
        for tensor in find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(on_backward)

    def _on_backward(self, after: Callable[[], None], gradient: Tensor) -> None:
        if self.armed and not self.queued:
            self.queued = True
            # Queued twice, to run after the reductions that DDP and FSDP queue during the backward.
            run_after_backward(self._behind(partial(run_after_backward, after)))

    def _after_backward(self, ends_group: bool) -> None:
        self.queued = False
        if ends_group:
            self._measure()
        if self.armed and self._handle is None:
            self._hook_forward()

    @torch.no_grad()
    def _measure(self) -> None:
        named = [(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None]
        gradients = [gradient for _, gradient in named]
        self.magnitudes = [(name, each) for (name, _), each in zip(named, magnitudes(gradients), strict=True)]
        self.norm = same_on_all_ranks(torch.nn.utils.get_total_norm(gradients))
