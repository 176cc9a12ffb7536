"""Marks a non-finite loss in the gradients, so that the norm makes every rank decide alike, without a message.

A loss may be NaN although all of its gradients are finite (a mean over no tokens), and only its own rank knows. The mark
is selected on the device: a finite loss leaves every bit of its gradients as it was.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ...boundary import Boundary
from ..finite import local

NAN = float("nan")
NUM_CARRIERS = 16  # parameters that may carry the mark; a backward pass need not reach all of them


@contextmanager
def marked_backward(parameters: Sequence[nn.Parameter], loss: Tensor, boundary: Boundary) -> Iterator[None]:
    """Turns the first small gradient of the backward pass inside into NaN if the loss is not finite.

    The gradient is changed before it is accumulated, so DDP reduces the changed one. A parameter that the pass does not
    reach still gets no gradient. An error of the mark leaves the gradient as it is.
    """
    finite = torch.isfinite(loss.detach()).all()
    is_marked = False

    def mark(gradient: Tensor) -> Tensor | None:
        nonlocal is_marked
        if is_marked or gradient.layout is not torch.strided:
            return None
        is_marked = True
        return torch.where(finite.to(gradient.device), gradient, NAN)

    with ExitStack() as hooks:
        for parameter in sorted(parameters, key=Tensor.numel)[:NUM_CARRIERS]:
            hooks.enter_context(parameter.register_hook(boundary.wrapped("loss mark", mark)))
        yield


@torch.no_grad()
def mark_shard(parameters: Sequence[nn.Parameter], losses: Sequence[Tensor]) -> None:
    """Writes NaN into one entry of a sharded gradient if a loss of this rank is not finite; the norm adds up all shards."""
    shards = (local(parameter.grad) for parameter in parameters if parameter.grad is not None)
    entry = next((shard.view(-1)[:1] for shard in shards if shard.numel()), None)
    if entry is not None and losses:
        finite = torch.stack([torch.isfinite(loss).all().to(entry.device) for loss in losses]).all()
        entry.copy_(torch.where(finite, entry, NAN))
