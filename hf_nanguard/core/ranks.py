"""Exchanges small facts between ranks, so that every rank makes the same decision.

Healthy steps need no communication, because the gradient norm is the same on every rank. Facts are exchanged at the start of
a run, after a bad step, and by an online trainer once per generation.

Every exchange of facts begins with the same message: the maximum of one number. A rank that cannot take part because of an
error sends `FAILED` there, and the exchange then raises [`RankError`] on every rank.
"""

import json
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..boundary import RankError

FAILED = 1 << 40  # more than any fact has bytes

T = TypeVar("T")


class Ranks:
    """The processes that train together; `alone` ignores an initialised process group, so that this process decides by itself."""

    def __init__(self, device: torch.device | str = "cpu", alone: bool = False):
        together = not alone and dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0
        self.device = torch.device(device)  # of tensors that are sent; with NCCL the accelerator of this rank
        self.num_exchanges = 0  # begun so far

    def any(self, fact: bool) -> bool:
        """Returns whether a fact is true on any rank, with one small reduction. Every rank must call it."""
        return bool(self._begin(int(fact)))

    def gather(self, fact: T) -> list[T]:
        """Returns the fact of every rank, in rank order. It must be serializable as JSON. Every rank must call it."""
        if self.size == 1:
            return [fact]
        text = json.dumps(fact).encode()
        length = self._begin(len(text))
        mine = torch.frombuffer(bytearray(text.ljust(length)), dtype=torch.uint8).to(self.device)
        parts = [torch.zeros_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        return [json.loads(part.cpu().numpy().tobytes()) for part in parts]

    def reduce_max(self, values: Tensor) -> None:
        """Replaces values by their maximum over ranks, in place, with one message. Every rank must call it; one that has
        failed passes -inf."""
        self.num_exchanges += 1
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)

    def agree(self) -> None:
        """Raises an error if another rank has failed. Every rank must call it, or [`Ranks.fail`]."""
        self._begin(0)

    def fail(self) -> None:
        """Makes the exchange fail that the other ranks are waiting in, or will be."""
        if self.size > 1:
            self._reduce(FAILED)

    def _begin(self, number: int) -> int:
        """Begins an exchange; returns the largest number of all ranks."""
        largest = number if self.size == 1 else self._reduce(number)
        if largest == FAILED:
            raise RankError("another rank has failed")
        return largest

    def _reduce(self, number: int) -> int:
        self.num_exchanges += 1
        largest = torch.tensor([number], device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest.item())
