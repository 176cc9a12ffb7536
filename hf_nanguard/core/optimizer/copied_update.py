"""One update of some entries of a parameter, done on copies of them by an optimizer of the same class.

The optimizer and the parameter are only read. An optimizer whose constructor or state is not known here may raise anything;
callers catch that.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..finite import local


def find_group(optimizer: Any, parameter: Tensor) -> dict[str, Any] | None:
    """Returns the parameter group that holds a parameter."""
    return next((group for group in optimizer.param_groups if any(p is parameter for p in group["params"])), None)


def copy_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a parameter group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copy_entries(tensor: Tensor, entries: Tensor) -> Tensor:
    """Returns some entries of the part of a tensor on this rank."""
    return local(tensor).detach().reshape(-1)[entries]


def copy_state(
    optimizer: Any,
    parameter: Tensor,
    entries: Tensor,
    settings: dict[str, Any],
    change: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Any]:
    """Returns the optimizer state of some entries of a parameter.

    Args:
        optimizer (`torch.optim.Optimizer`), parameter (`Tensor`):
            Whose state is copied.
        entries (`Tensor`):
            Positions in the flattened part of the parameter on this rank.
        settings (`dict[str, Any]`):
            The settings of the update: fused and capturable optimizers keep scalars on the device.
        change (`Callable`, *optional*):
            Applied to every tensor that has a number for each entry, e.g. a cast.
    """
    shape = local(parameter).shape
    on_device = settings.get("fused") or settings.get("capturable")

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.ndim or local(value).shape != shape:
            return value.detach().clone().to(entries.device if on_device else value.device)
        part = copy_entries(value, entries)
        return part if change is None else change(part)

    return {key: copy(value) for key, value in optimizer.state.get(parameter, {}).items()}


def step_copy(
    optimizer: Any, weights: Tensor, gradient: Tensor, state: dict[str, Any], settings: dict[str, Any]
) -> Tensor:
    """Steps a new optimizer of the same class over a copy of weights and returns the weights after the step."""
    copied = nn.Parameter(weights.clone())
    copied.grad = gradient
    clone = type(optimizer)([copied])
    clone.param_groups[0].update(settings)
    clone.state[copied] = state
    with torch.enable_grad():  # as in a training loop
        clone.step()
    return copied.detach()
