"""Trace-free skips: parameters, moments, step counts, schedule and loss scale stay as they were.

Multiplying an update by zero, or zeroing gradients, is not a skip: 0 * NaN is NaN, and Adam moves the weights by
momentum and decay. `.grad = None` makes every torch optimizer pass the parameter by.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """Makes the next `optimizer.step()` a no-op for these parameters."""
    for parameter in parameters:
        parameter.grad = None


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer takes a device flag (fused Adam, AdamW, SGD, Adagrad), so no host read is needed."""
    groups = optimizer.param_groups
    return bool(groups) and all(group.get("fused") and not group.get("dampening") for group in groups)


def step_unless(optimizer: Any, bad: Tensor) -> None:
    """Steps a fused optimizer, or leaves everything bit-unchanged where the device flag `bad` is set.

    Args:
        optimizer (`torch.optim.Optimizer`):
            A fused optimizer, see [`can_skip_on_device`].
        bad (`Tensor`):
            A boolean scalar on the device of the parameters; it is never read on the host.
    """
    for group in optimizer.param_groups:
        if group.get("momentum"):  # SGD leaves a buffer that it makes in a skipped step uninitialised
            for parameter in group["params"]:
                if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    optimizer.found_inf = bad.float()
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf


class ScalerState:
    """The loss scale as it was before a step, so that a contained step neither grows nor halves it.

    Args:
        scaler (`torch.amp.GradScaler`):
            The scaler in use.
    """

    def __init__(self, scaler: Any):
        self.scaler = scaler
        self.scale = scaler._scale.clone() if scaler._scale is not None else None
        self.growth = scaler._growth_tracker.clone() if scaler._growth_tracker is not None else None

    def forget_unscale(self) -> None:
        """Lets `unscale_` run again in this step, for gradients that were computed anew."""
        self.scaler._per_optimizer_states.clear()

    def restore(self) -> None:
        """Puts scale and growth tracker back and closes the step for every optimizer."""
        if self.scale is not None:
            self.scaler._scale.copy_(self.scale)
            self.scaler._growth_tracker.copy_(self.growth)
        self.forget_unscale()
