"""One rank of a hand-written loop over a model sharded by FSDP2: plays the cases and writes down what came of each.

python -m torch.distributed.run --nproc_per_node 2 tests/distributed/shard_worker.py shards <folder> [<case> ...]
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_nanguard.core.settings import Policy
from hf_nanguard.core.step.guard import Guard
from hf_nanguard.errors import NonFiniteError
from tests.distributed.ending import play_cases

PATIENCE = 30
NUM_STEPS = 4
BAD_STEP = 1


@dataclass(frozen=True)
class Case:
    """One guarded loop on all ranks.

    Args:
        name (`str`):
            Unique.
        kind (`str`, *optional*):
            What is wrong on the culprit's rank: `loss` (NaN, and so are all gradients), `gradient` (finite loss, NaN in
            the gradients of the first layer), `corner` (a NaN loss whose only bad gradient entry lies in rank 0's shard),
            `constant` (NaN added to the loss, all gradients finite).
        places (`tuple`):
            The (micro-step, rank) of the bad batches in step 1.
        gone (`tuple[int, ...]`):
            The micro-steps of step 1 that the stock loop never has.
        accumulation (`int`):
            Micro-batches of a step.
        policy (`dict`):
            Settings of the guard.
        events (`tuple`):
            Signal, action, micro-step and rank of all events there may be.
        halts (`bool`):
            Whether the run ends in step 1.
        replicated (`bool`):
            Whether each rank has all shards, in a mesh of two dimensions, and gradients are averaged over the replicas (HSDP).
    """

    name: str
    kind: str | None = None
    places: tuple[tuple[int, int], ...] = ()
    gone: tuple[int, ...] = ()
    accumulation: int = 3
    policy: dict[str, Any] = field(default_factory=dict)
    events: tuple[tuple[str, str, int | None, int], ...] = ()
    halts: bool = False
    replicated: bool = False


def make_cases() -> list[Case]:
    """All of them."""
    found = [Case("healthy-3"), Case("healthy-1", accumulation=1)]
    for culprit in (0, 1):
        found += [
            Case(f"loss-{where}-rank{culprit}", "loss", ((micro, culprit),), (micro,),
                 events=(("loss_nonfinite", "dropped", micro, culprit),))
            for micro, where in enumerate(("first", "middle", "last"))
        ]  # fmt: skip
        found += [
            Case(f"gradient-middle-rank{culprit}", "gradient", ((1, culprit),), (1,),
                 events=(("grad_nonfinite", "dropped", 1, 0),)),
            Case(f"loss-single-rank{culprit}", "loss", ((0, culprit),), (0,), 1,
                 events=(("loss_nonfinite", "skipped", 0, culprit),)),
            Case(f"gradient-single-rank{culprit}", "gradient", ((0, culprit),), (0,), 1,
                 events=(("grad_nonfinite", "skipped", 0, 0),)),
            Case(f"corner-rank{culprit}", "corner", ((1, culprit),), (1,),
                 events=(("loss_nonfinite", "dropped", 1, culprit),)),
            Case(f"constant-rank{culprit}", "constant", ((1, culprit),), (1,),
                 events=(("loss_nonfinite", "dropped", 1, culprit),)),
        ]  # fmt: skip
    for culprit in (0, 1):
        found += [
            Case(f"replicated-{kind}-rank{culprit}", kind, ((1, culprit),), (1,), replicated=True,
                 events=(("loss_nonfinite", "dropped", 1, culprit),))
            for kind in ("loss", "constant")
        ]  # fmt: skip
    return [
        *found,
        Case("replicated-healthy", replicated=True),
        Case("two-culprits", "loss", ((0, 0), (2, 1)), (0, 2),
             events=(("loss_nonfinite", "dropped", 0, 0), ("loss_nonfinite", "dropped", 2, 1))),
        Case("loss-all", "loss", ((0, 1), (1, 1), (2, 1)), (0, 1, 2),
             events=tuple(("loss_nonfinite", "skipped", micro, 1) for micro in range(3))),
        Case("skip-loss", "loss", ((1, 1),), (0, 1, 2), policy={"on_nonfinite": "skip"},
             events=(("loss_nonfinite", "skipped", 1, 1),)),
        Case("halt-loss", "loss", ((1, 1),), (0, 1, 2), policy={"on_nonfinite": "halt"}, halts=True,
             events=(("loss_nonfinite", "halted", 1, 1),)),
    ]  # fmt: skip


CASES = {case.name: case for case in make_cases()}


class Net(nn.Module):
    """Two layers with dropout between, and their loss, with or without a fault."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, y: Tensor, fault: str | None) -> Tensor:
        hidden = self.first(x)
        if fault == "gradient":
            hidden.register_hook(lambda gradient: gradient * float("nan"))
        loss = ((self.last(self.dropout(torch.tanh(hidden))) * self.scale - y) ** 2).mean()
        if fault == "corner":
            return loss + CornerFault.apply(self.scale)
        if fault == "constant":
            return loss + float("nan")
        return loss * float("nan") if fault == "loss" else loss


class CornerFault(torch.autograd.Function):
    """Adds NaN to the loss and to one entry of one gradient, which lies in rank 0's shard."""

    @staticmethod
    def forward(ctx, parameter: Tensor) -> Tensor:
        ctx.like = parameter
        return parameter.new_full((), float("nan"))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        bad = torch.zeros_like(ctx.like)
        bad.view(-1)[0] = float("nan")
        return bad


def make_batch(case: Case, step: int, micro: int, rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    bad = step == BAD_STEP and (micro, rank) in case.places
    x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)
    return {"x": x, "y": y, "fault": case.kind if bad else None}


def make_parts(case: Case) -> tuple[Any, Any, Any]:
    size = dist.get_world_size()
    names = ("replica", "shard")
    mesh = (
        init_device_mesh("cpu", (size, 1), mesh_dim_names=names)
        if case.replicated
        else init_device_mesh("cpu", (size,))
    )
    model = Net()
    for module in (model.first, model.last, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    torch.manual_seed(1 + dist.get_rank())
    return model, optimizer, scheduler


def whole(model: Any, optimizer: Any, scheduler: Any) -> dict[str, Tensor]:
    """Returns all that training changes: this rank's shards, the full tensors, schedule and random state."""
    found = {"rng": torch.get_rng_state(), "schedule": torch.tensor(scheduler.last_epoch)}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        found[name] = parameter.to_local().detach().clone()
        found[f"full.{name}"] = parameter.full_tensor().detach()
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = (value.to_local() if isinstance(value, DTensor) else value).clone()
    return found


def play_stock(case: Case) -> dict[str, Tensor]:
    """The loop anybody would write, in which the bad batches never come."""
    model, optimizer, scheduler = make_parts(case)
    for step in range(BAD_STEP if case.halts else NUM_STEPS):
        micros = [m for m in range(case.accumulation) if step != BAD_STEP or m not in case.gone]
        for micro in micros:
            model.set_requires_gradient_sync(micro == micros[-1])
            batch = make_batch(case, step, micro, dist.get_rank())
            (model(**{**batch, "fault": None}) / len(micros)).backward()
        if not micros:
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return whole(model, optimizer, scheduler)


def play_guarded(case: Case) -> tuple[dict[str, Tensor], list[dict[str, Any]], str]:
    model, optimizer, scheduler = make_parts(case)
    events: list[dict[str, Any]] = []
    guard = Guard(
        model, optimizer, Policy(**case.policy), scheduler=scheduler, max_grad_norm=1.0, on_event=events.append
    )
    outcome = "finished"
    try:
        for step in range(NUM_STEPS):
            batches = [make_batch(case, step, micro, dist.get_rank()) for micro in range(case.accumulation)]
            guard.step(lambda batch: model(**batch), batches)
    except NonFiniteError as error:
        outcome = f"NonFiniteError: {error}"
    return whole(model, optimizer, scheduler), events, outcome


def play(case: Case) -> dict[str, Any]:
    found, events, outcome = play_guarded(case)
    stock = play_stock(case)
    return {
        "outcome": outcome,
        "events": events,
        "names": sorted(found),
        "stock_names": sorted(stock),
        "bad": [name for name, tensor in found.items() if not tensor.isfinite().all()],
        "apart": [name for name in stock if not torch.equal(found[name], stock[name])],
        "full": {name: tensor.tolist() for name, tensor in found.items() if name.startswith("full.")},
    }


if __name__ == "__main__":
    play_cases(lambda name: play(CASES[name]), CASES, PATIENCE)
