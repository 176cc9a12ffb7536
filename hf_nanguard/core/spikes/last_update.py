"""How large the last update of an optimizer was, from the state it left behind.

Adam and its variants: learning rate times the first moment over the root of the second; SGD: learning rate times the momentum.
Other optimizers, and SGD without momentum, leave nothing to tell it from. A few fused passes over weights and moments, only after a
spike whose cause is not in the data.
"""

from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..finite import local, read_host

LARGE_UPDATE = 0.1  # of the size of the weights, in one step
LARGE_RATIO = 100.0  # of a first moment to the root of the second; equal gradients give 1


@dataclass(frozen=True)
class LastUpdate:
    """What the last update did, over all weight matrices."""

    relative: float  # its root mean square over that of the weights, the median of all matrices
    ratio: float | None  # the largest first moment over the root of the second, with Adam

    @property
    def is_large(self) -> bool:
        """Whether one step has moved the weights by a sizable part of themselves."""
        return self.relative > LARGE_UPDATE

    @property
    def is_abnormal(self) -> bool:
        """Whether the two moments contradict each other, or are not finite."""
        return self.ratio is not None and not self.ratio <= LARGE_RATIO


@torch.no_grad()
def measure_last_update(optimizer: Optimizer | None) -> LastUpdate | None:
    """Returns what the last update did, `None` if the optimizer does not keep what that takes."""
    measured: list[tuple[Tensor, Tensor]] = []
    ratios: list[Tensor] = []
    for group in [] if optimizer is None else optimizer.param_groups:
        for parameter in group["params"]:
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            direction = _find_direction(state, group)
            if direction is None or parameter.ndim < 2 or not parameter.numel():
                continue
            if "exp_avg_sq" in state:
                ratios.append(direction.abs().amax())
            weights = local(parameter.detach()).float()
            measured.append((group["lr"] * direction.square().mean().sqrt(), weights.square().mean().sqrt()))
    if not measured:
        return None
    values = read_host([part for pair in measured for part in pair] + ratios)
    sizes, ratios_host = values[: 2 * len(measured)], values[2 * len(measured) :]
    shares = [update / weight for update, weight in zip(sizes[::2], sizes[1::2], strict=True) if weight > 0.0]
    return LastUpdate(median(shares), max(ratios_host, default=None)) if shares else None


def _find_direction(state: dict, group: dict) -> Tensor | None:
    """Returns the last step of a parameter over the learning rate."""
    first, second = state.get("exp_avg"), state.get("exp_avg_sq")
    if isinstance(first, Tensor) and isinstance(second, Tensor) and first.shape == second.shape:
        count = float(state.get("step", 1)) or 1.0
        beta1, beta2 = (float(beta) for beta in group.get("betas", (0.9, 0.999)))
        corrected = local(second).float() / (1 - beta2**count)
        return local(first).float() / (1 - beta1**count) / (corrected.sqrt() + float(group.get("eps", 0.0)))
    momentum = state.get("momentum_buffer")
    return local(momentum).float() if isinstance(momentum, Tensor) else None
