"""One rank of a hand-written loop under DDP whose loss has a term with a head of its own.

    torchrun --nproc_per_node 2 term_worker.py terms FOLDER CASE...

A case plants a fault in the term of rank 1 at one step, or makes a part of the guard fail on rank 1; every rank writes its
weights' digest and its events.
"""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hf_nanguard.core.rerun.runner as runner_module
import hf_nanguard.core.step.guard as guard_module
from hf_nanguard.core.monitors.activations import ActivationMonitor
from hf_nanguard.core.rerun import loss_mark
from hf_nanguard.core.rerun.micro_batch import AccumulationGroup
from hf_nanguard.core.settings import Policy
from hf_nanguard.core.step.guard import Guard
from tests.distributed.ending import play_cases

BAD_STEP, BAD_PLACE, STEPS = 1, 1, 4
PATIENCE = 60.0
FAULTS = {
    "healthy": lambda out: out.square().mean(),
    "shift": lambda out: out.square().mean() + torch.inf,
    "value": lambda out: out.square().mean() * torch.nan,
    "slope": lambda out: (out * 0).square().sum(-1).sqrt().mean(),
    "absent": lambda out: None,
}
# The loss of rank 1 is NaN, and running it again ends with an error there; the other case is the same without the error.
UNREPEATABLE, SKIPPED = "unrepeatable", "skipped"
# What fails on rank 1, from the bad step on.
BROKEN: dict[str, Callable[[], AbstractContextManager]] = {
    "add_term": lambda: patch.object(AccumulationGroup, "add_term", side_effect=MemoryError),
    "select_finite": lambda: patch.object(guard_module, "select_finite", side_effect=MemoryError),
    "marked_backward": lambda: patch.object(runner_module, "marked_backward", side_effect=MemoryError),
    "hook of the mark": lambda: patch.object(loss_mark, "NAN", "no number"),
    "monitor before its exchange": lambda: patch.object(ActivationMonitor, "end_backward", side_effect=MemoryError),
    "monitor after its exchange": lambda: patch.object(ActivationMonitor, "_record_metrics", side_effect=MemoryError),
}
CASES = (*FAULTS, UNREPEATABLE, SKIPPED, *BROKEN)


class TwoHeads(nn.Module):
    """The second head serves the term only: cut off, it would get no gradient, and DDP would wait for it for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 3)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.body(x).tanh()
        return tuple(head(hidden) for head in self.heads)


def play(case: str) -> dict:
    """Trains with the fault of a case, or, for `absent`, with a zero in place of the term."""
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = DistributedDataParallel(TwoHeads())
    events: list[dict] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    policy = Policy(autopsy=False, on_nonfinite="skip" if case == SKIPPED else "drop", activation_steps=1)
    guard = Guard(model, optimizer, policy, max_grad_norm=1.0, on_event=events.append)

    num_struck = 0

    def loss_fn(batch: tuple) -> Tensor:
        nonlocal num_struck
        x, strikes = batch
        num_struck += strikes
        if case == UNREPEATABLE and strikes and num_struck > 1:
            raise MemoryError
        first, second = model(x)
        if case in (UNREPEATABLE, SKIPPED):
            return first.square().mean() * (torch.nan if strikes else 1.0) + second.square().mean()
        value = FAULTS[case if strikes and case in FAULTS else "healthy"](second)
        value = 0.0 * FAULTS["healthy"](second) if value is None else value
        return guard.term("main", first.square().mean()) + guard.term("aux", value, 0.5, "drop")

    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        places = [(step, place, rank) == (BAD_STEP, BAD_PLACE, 1) for place in range(2)]
        is_broken = case in BROKEN and rank == 1 and step >= BAD_STEP
        with BROKEN[case]() if is_broken else nullcontext():
            guard.step(loss_fn, [(torch.randn(5, 4, generator=generator), strikes) for strikes in places])
    weights = b"".join((parameter.detach() + 0.0).numpy().tobytes() for parameter in model.parameters())
    signals = [[e["signal"], e["action"], e["rank"], e["message"]] for e in events]
    told = [[e["step"], e["micro_step"], e["rank"], e["action"], e["culprit"]["term"]] for e in events]
    return {
        "weights": hashlib.sha256(weights).hexdigest(),
        "events": told,
        "signals": signals,
        "dropped": guard.counter.dropped,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    play_cases(lambda case: {"outcome": "done", **play(case)}, CASES, PATIENCE)
