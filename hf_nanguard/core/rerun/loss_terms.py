"""Named terms of a loss: logged by name, blamed if non-finite, and dropped if the user allows it.

A term costs one detach; its value is read with everything else at the end of the step. If a term that may be dropped is not
finite, `torch.where` replaces it with zero, and its gradient is zero, with no host read. That suffices if the derivatives of
the term are finite. If not, 0 * NaN is NaN in its backward; preventing that would need a pass over the inputs of the term in
every step. So that case is left to the redo: the norm is not finite, the micro-batch is run again without the term, and if
its gradients are then finite, only the term is dropped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ON_NONFINITE = ("keep", "drop")


@dataclass(frozen=True)
class Term:
    """One term of the loss of one micro-batch."""

    name: str
    value_dev: Tensor  # its value without weight, detached, on its device
    drops: bool = False  # whether the loss may continue without it
    learns: bool = True  # whether it has a graph
    value: float | None = None  # once it has been read

    @property
    def is_bad(self) -> bool:
        """Whether it was read and is not finite."""
        return self.value is not None and not math.isfinite(self.value)


def select_finite(value: Tensor) -> Tensor:
    """Returns the value, or a zero with a zero gradient if it is not finite, without a host read."""
    return torch.where(torch.isfinite(value), value, torch.zeros_like(value))


class _ZeroTerm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return torch.zeros_like(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def cut_term(value: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Returns a zero in place of a term, with no gradient into the graph of the term.

    The parameters get a gradient of zero. With several ranks they must be all that are trained, because DDP waits for each,
    also for one that only this term uses.
    """
    return _ZeroTerm.apply(value.detach(), *parameters)
