"""The terms a loss is made of, each watched, logged and blamed by name.

A term is noted by one detach and read with everything else at the end of the step. One that may be dropped is selected
on the device: if it is not finite, a zero takes its place and a zero gradient goes into it, with no host read. That is
all a healthy step pays, and enough for a term whose own derivatives are finite. Where they are not, 0 * NaN is NaN, and
no selection behind the term can stop it; one before it would cost a pass over its inputs in every step. So that case is
left to the redo: the norm is not finite, the micro-batch is run again without the term, and if that heals it, only the
term is lost.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ON_NONFINITE = ("keep", "drop")


@dataclass(frozen=True)
class Term:
    """One term of the loss of one micro-batch.

    Args:
        name (`str`):
            What it is called.
        value_dev (`Tensor`):
            Its value without weight, detached, on its device.
        drops (`bool`):
            Whether the loss may go on without it.
        learns (`bool`):
            Whether it has a graph.
        value (`float`, *optional*):
            Its value once that has been read.
    """

    name: str
    value_dev: Tensor
    drops: bool = False
    learns: bool = True
    value: float | None = None

    @property
    def is_bad(self) -> bool:
        """Whether it was read and is not finite."""
        return self.value is not None and not math.isfinite(self.value)


def select_finite(value: Tensor) -> Tensor:
    """Returns the value, or a zero that passes a zero gradient on if it is not finite. Nothing is read."""
    return torch.where(torch.isfinite(value), value, torch.zeros_like(value))


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return torch.zeros_like(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def cut_term(value: Tensor, parameters: list[Any]) -> Tensor:
    """Returns a zero in place of a term.

    Args:
        value (`Tensor`):
            The term; nothing goes back into its graph.
        parameters (`list`):
            Those that get a gradient of zero. Among several ranks that must be all of them: DDP waits for each, also for
            one that only this term uses.
    """
    return _Nothing.apply(value.detach(), *parameters)
