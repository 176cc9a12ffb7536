"""A hand-written loop with and without the guard: the same model, data, dropout and BatchNorm."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_nanguard.core.settings import Policy
from hf_nanguard.core.step.guard import Guard
from hf_nanguard.testing import NAN, add_bad_gradient

OPTIMIZERS: dict[str, Callable] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


class Net(nn.Module):
    """Dropout, BatchNorm and a counter: everything that a bad batch can leave a trace in."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


@dataclass
class Batch:
    """Data, and what goes wrong with it: `"loss"`, `"gradient"` (of `parameter` only) or nothing."""

    x: Tensor
    y: Tensor
    fault: str | None = None
    value: float = NAN
    parameter: str = "first.weight"
    runs: int = 0
    once: bool = False

    @property
    def strikes(self) -> bool:
        return self.fault is not None and not (self.once and self.runs > 1)


def make_batch(seed: int, fault: str | None = None, value: float = NAN, **fields: Any) -> Batch:
    """Returns a batch of 6 samples; an `"input"` fault is part of its data."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(6, 4, generator=generator), torch.randn(6, 1, generator=generator)
    if fault == "input":
        x[2, 1] = value
        fault = None
    return Batch(x, y, fault, value, **fields)


def make_groups(num_groups: int, size: int, faults: dict[tuple[int, int], Any] | None = None) -> list[list[Batch]]:
    """Returns groups of batches with faults (a kind, or keyword arguments of `make_batch`) at (group, index)."""
    groups = []
    for g in range(num_groups):
        planted = [(faults or {}).get((g, i)) for i in range(size)]
        fields = [fault if isinstance(fault, dict) else {"fault": fault} for fault in planted]
        groups.append([make_batch(100 * g + i, **fields[i]) for i in range(size)])
    return groups


@dataclass
class Loop:
    """A model in training; `guard` is None in the plain loop."""

    optimizer_name: str = "adamw"
    clip: float | None = 1.0
    scaler: Any = None
    model: Net = field(default_factory=Net)

    def __post_init__(self) -> None:
        torch.manual_seed(7)
        for module in (self.model.first, self.model.last):
            module.reset_parameters()
        self.optimizer = OPTIMIZERS[self.optimizer_name](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.events: list[dict] = []
        self.guard: Guard | None = None
        torch.manual_seed(11)

    def guarded(self, policy: Policy | None = None, **kwargs: Any) -> "Loop":
        """Puts the guard in."""
        self.guard = Guard(
            self.model, self.optimizer, policy, scheduler=self.scheduler, scaler=self.scaler, max_grad_norm=self.clip,
            on_event=self.events.append, **kwargs,
        )  # fmt: skip
        return self

    def loss(self, batch: Batch) -> Tensor:
        """The loss of a batch, with its fault."""
        batch.runs += 1
        loss = nn.functional.mse_loss(self.model(batch.x), batch.y)
        if batch.strikes and batch.fault == "loss":
            loss = loss * batch.value
        if batch.strikes and batch.fault == "gradient":
            loss = add_bad_gradient(loss, dict(self.model.named_parameters())[batch.parameter], batch.value)
        return loss

    def step(self, group: list[Batch]) -> Any:
        """One optimizer step."""
        if self.guard is not None:
            return self.guard.step(self.loss, group)
        for batch in group:
            weighed = self.loss(batch) / len(group)
            (weighed if self.scaler is None else self.scaler.scale(weighed)).backward()
        skipped = False
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            skipped = self.scaler.get_scale() < scale
        if not skipped:
            self.scheduler.step()
        self.optimizer.zero_grad()
        return None

    def run(self, groups: Iterable[list[Batch]]) -> "Loop":
        """All steps; a group with nothing in it never came."""
        for group in groups:
            if group:
                self.step(group)
        return self

    def everything(self) -> dict[str, Any]:
        """All that training changes."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
        found["schedule"] = self.scheduler.state_dict()["last_epoch"]
        found["rng"] = torch.get_rng_state()
        if self.scaler is not None:
            found["scaler"] = self.scaler.state_dict()
        return copy.deepcopy(found)

    def told(self) -> list[tuple[Any, ...]]:
        """Step, micro-step, signal and action of every event."""
        return [(e["step"], e["micro_step"], e["signal"], e["action"]) for e in self.events]


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Asserts bit-identity."""
    assert first.keys() == second.keys()
    different = [
        name
        for name, value in first.items()
        if not (torch.equal(value, second[name]) if isinstance(value, Tensor) else value == second[name])
    ]
    assert not different, f"differ: {different}"


GROUPS: list[dist.ProcessGroup] = []


@contextmanager
def group_of_one() -> Iterator[None]:
    """A process group of this process alone, for DDP."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # Were DDP the last to hold the group, torch would wait for its thread with the GIL, which that thread may wait for.
    GROUPS.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()
