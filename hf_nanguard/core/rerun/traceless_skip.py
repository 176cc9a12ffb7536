"""Skips that leave no trace: parameters, moments, step counts, schedule and loss scale stay as they were.

Multiplying an update by zero, or zeroing gradients, is not a skip: 0 * NaN is NaN, and Adam moves the weights by
momentum and decay. With `.grad = None` every torch optimizer leaves the parameter out.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..torch_private import copy_scale, restore_scale, restore_unscaled


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """Makes the next `optimizer.step()` a no-op for these parameters."""
    for parameter in parameters:
        parameter.grad = None


def show_zero_gradients(parameters: Iterable[Tensor]) -> None:
    """Gives parameters without a gradient one of zeros, for code of the user's that reads them between a skip and the next step.
    Only where something else keeps the optimizer from stepping."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def forget_unscale(scaler: torch.amp.GradScaler) -> None:
    """Lets `unscale_` run again in this step, for gradients that were computed again."""
    restore_unscaled(scaler, {})


class ScalerState:
    """The loss scale before a step, so that a skipped step neither increases nor halves it."""

    def __init__(self, scaler: torch.amp.GradScaler):
        self.scaler = scaler
        self.scale, self.growth = copy_scale(scaler)

    def restore(self) -> None:
        """Puts scale and growth counter back and ends the step for every optimizer."""
        restore_scale(self.scaler, self.scale, self.growth)
        forget_unscale(self.scaler)
