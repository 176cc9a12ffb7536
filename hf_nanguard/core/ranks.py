"""Agreement across ranks: small facts made known to all, so that every rank takes the same decision.

Used only when something broke (the norm of the gradients is the same on every rank, so healthy steps need no message)
and at the start of a run. An online trainer asks once per generation whether anybody's completions were bad.
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
            Where messages are put; with NCCL this must be the rank's accelerator.
        alone (`bool`, *optional*, defaults to `False`):
            Ignore an initialised process group: this process decides for itself.
    """

    def __init__(self, device: torch.device | str = "cpu", alone: bool = False):
        together = not alone and dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0
        self.device = torch.device(device)

    def any(self, fact: bool) -> bool:
        """Returns whether the fact is true on any rank, by one small reduction. Every rank must call it."""
        if self.size == 1:
            return fact
        flag = torch.tensor([int(fact)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def gather(self, fact: T) -> list[T]:
        """Returns the JSON-able `fact` of every rank, in rank order. Every rank must call it."""
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
