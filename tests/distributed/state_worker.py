"""One rank of a loop whose weights and optimizer state are watched, sharded by FSDP2 or replicated.

python -m torch.distributed.run --nproc_per_node 2 tests/distributed/state_worker.py state <folder> [<case> ...]
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_nanguard.core.finite import local
from hf_nanguard.core.journal import Journal
from hf_nanguard.core.monitors.weight_updates import UpdateMonitor
from hf_nanguard.core.monitors.weights import WeightMonitor
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.core.settings import Policy
from hf_nanguard.core.step.decision import Escalation
from hf_nanguard.core.step.rewind_to_snapshot import Recovery
from tests.distributed.ending import play_cases

PATIENCE = 30
NUM_STEPS = 6
BAD_STEP = 2
CULPRIT = 1  # the rank on which faults are planted


@dataclass(frozen=True)
class Case:
    """A loop, and what is planted after the update of step 2 on rank 1 alone.

    Args:
        name (`str`):
            Unique.
        sharded (`bool`):
            By FSDP2, else every rank has all.
        plant (`str`, *optional*):
            `weight` or `moment`.
        dtype, lr:
            Of the weights.
        signal (`str`, *optional*):
            The one event there must be.
    """

    name: str
    sharded: bool = True
    plant: str | None = None
    dtype: torch.dtype = torch.float32
    lr: float = 1e-2
    signal: str | None = None


CASES = {
    case.name: case
    for case in (
        Case("healthy"),
        Case("healthy-bf16", dtype=torch.bfloat16),
        Case("healthy-replicated", sharded=False),
        Case("weight", plant="weight", signal="param_nonfinite"),
        Case("moment", plant="moment", signal="optimizer_nonfinite"),
        Case("weight-replicated", sharded=False, plant="weight", signal="param_nonfinite"),
        Case("rounding", dtype=torch.bfloat16, lr=1e-8, signal="update_stalled"),
    )
}


def make_parts(case: Case) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(case.dtype)
    if case.sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=case.lr)


def plant(case: Case, model: Any, optimizer: Any) -> None:
    weight = model[0].weight
    if case.plant == "weight":
        local(weight.data)[1, 2] = float("nan")
    if case.plant == "moment":
        local(optimizer.state[weight]["exp_avg"])[3] = float("nan")


def play(case: Case) -> dict[str, Any]:
    model, optimizer = make_parts(case)
    events: list[dict[str, Any]] = []
    ranks = Ranks()
    journal = Journal(ranks, events.append)
    weights = WeightMonitor(model, journal, 1, optimizer=optimizer)
    recovery = Recovery(Policy(), journal, Escalation(1), lambda: False)
    updates = UpdateMonitor(model, journal, 1, optimizer=optimizer)
    rows, reason = [], None
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(10 * step + (ranks.rank if case.sharded else 0))
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator).to(case.dtype)).float().square().mean().backward()
        updates.before_update(step)
        optimizer.step()
        updates.after_update(step)
        rows.append(updates.metrics())
        if step == BAD_STEP and ranks.rank == CULPRIT:
            plant(case, model, optimizer)
        failure = weights.after_update(step)
        if failure is not None:
            reason = recovery.resolve(failure, step)
            break
    return {"outcome": "finished", "reason": reason, "events": events, "rows": rows}


if __name__ == "__main__":
    play_cases(lambda name: play(CASES[name]), CASES, PATIENCE)
