"""Exchanges small facts between ranks, so that every rank makes the same decision.

Healthy steps need no communication, because the gradient norm is the same on every rank. Facts are exchanged at the start of
a run, after a bad step, and by an online trainer once per generation.
"""

import json
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """The processes that train together.

    Args:
        device (`torch.device`, *optional*, defaults to the CPU):
            The device of the tensors that are communicated; with NCCL this must be the rank's accelerator.
        alone (`bool`, *optional*, defaults to `False`):
            Whether to ignore an initialised process group, so that this process decides alone.
    """

    def __init__(self, device: torch.device | str = "cpu", alone: bool = False):
        together = not alone and dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0
        self.device = torch.device(device)

    def any(self, fact: bool) -> bool:
        """Returns whether a fact is true on any rank, with one small reduction. Every rank must call it."""
        if self.size == 1:
            return fact
        flag = torch.tensor([int(fact)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def gather(self, fact: T) -> list[T]:
        """Returns the fact of every rank, in rank order. It must be serializable as JSON. Every rank must call it."""
        if self.size == 1:
            return [fact]
        payload = torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8).to(self.device)
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([payload.numel()], dtype=torch.int64, device=self.device))
        counts = [int(length) for length in torch.cat(lengths).tolist()]
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=self.device)
        padded[: payload.numel()] = payload
        parts = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [
            json.loads(bytes(part[:count].cpu().numpy().tobytes())) for part, count in zip(parts, counts, strict=True)
        ]
