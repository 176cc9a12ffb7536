"""One update of some entries of a parameter, done on copies of them by an optimizer of the same class.

The optimizer and the parameter are only read. An optimizer whose constructor or state is not known here may raise anything;
callers catch that.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..finite import local

# The settings of a parameter group, or the state of a parameter, as torch types them.
Settings: TypeAlias = dict[str, Any]


def copy_settings(optimizer: Optimizer, parameter: Tensor) -> Settings | None:
    """Returns the settings of the group that holds a parameter, `None` if there is none."""
    for group in optimizer.param_groups:
        if any(p is parameter for p in group["params"]):
            return {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return None


def copy_entries(tensor: Tensor, entries: Tensor) -> Tensor:
    """Returns some entries of the part of a tensor on this rank."""
    return local(tensor).detach().reshape(-1)[entries]


def copy_state(
    optimizer: Optimizer, parameter: Tensor, entries: Tensor, settings: Settings, change: Callable[[Tensor], Tensor]
) -> Settings:
    """Returns the optimizer state of some entries of a parameter, given as positions in its flattened part on this rank.

    Fused and capturable optimizers (`settings`) keep scalars on the device. `change` is applied to every tensor that has a
    number for each entry, e.g. a cast.
    """
    shape = local(parameter).shape
    on_device = settings.get("fused") or settings.get("capturable")

    def copy(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        if not value.ndim or local(value).shape != shape:
            return value.detach().clone().to(entries.device if on_device else value.device)
        return change(copy_entries(value, entries))

    return {key: copy(value) for key, value in optimizer.state.get(parameter, {}).items()}


def step_copy(optimizer: Optimizer, weights: Tensor, gradient: Tensor, state: Settings, settings: Settings) -> Tensor:
    """Steps a new optimizer of the same class over a copy of weights and returns the weights after the step."""
    copied = nn.Parameter(weights.clone())
    copied.grad = gradient
    make: Any = type(optimizer)  # every class but the base needs only the parameters
    clone = make([copied])
    clone.param_groups[0].update(settings)
    clone.state[copied] = state
    with torch.enable_grad():  # as in a training loop
        clone.step()
    return copied.detach()
