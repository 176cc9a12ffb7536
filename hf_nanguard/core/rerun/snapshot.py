"""The state of a run in host memory, so that the run can go back to it.

A snapshot consists of the copies of several parts: trainable parameters, what a forward pass writes to modules, optimizer,
schedule, loss scaler and random state; a loop adds what it keeps beside them. Frozen parameters are not copied, so with LoRA
only the adapters are. Where parameters are sharded, each rank copies its shards. Everything is restored in place.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..finite import shard_of
from ..rng import RngState
from ..torch_private import StateSlot
from .buffers import BufferKeeper
from .host_copy import HostCopy, OptimizerState, copy_tensor, count_bytes, find_tensors, restore_tensor, wait_for_copies
from .kept_attributes import KeptAttributes, keep_module
from .runner import Runner
from .traceless_skip import ScalerState

SMALL = 100_000  # entries of a buffer that is copied although nobody is known to write it
MOMENTS = 2  # tensors that an optimizer is expected to keep for each parameter, before its first step


class StatePart(Protocol):
    """A part of the state of a run."""

    def copy(self, reused: Any) -> object:
        """Returns a copy of the state of now; `reused` is an earlier one that is no longer needed, or `None`."""

    def restore(self, saved: Any, step: int) -> None:
        """Puts a copy back, after which the run continues with `step`."""


class Weights:
    """The trainable parameters."""

    def __init__(self, model: nn.Module):
        self.model = model

    def copy(self, reused: dict[Tensor, HostCopy] | None) -> dict[Tensor, HostCopy]:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return {parameter: copy_tensor(parameter, (reused or {}).get(parameter)) for parameter in trained}

    def restore(self, saved: dict[Tensor, HostCopy], step: int) -> None:
        for parameter, value in saved.items():
            restore_tensor(parameter, value)
            parameter.grad = None

    @torch.no_grad()
    def measure_change(self, saved: dict[Tensor, HostCopy]) -> tuple[float, float]:
        """Returns the sums of squares of what has changed since a copy and of the copy itself, on this rank; entries that are
        not finite now are left out."""
        changed = size = 0.0
        for parameter, copied in saved.items():
            before, now = copied.value.double(), shard_of(parameter.detach()).to("cpu", torch.float64)
            changed += float(torch.where(now.isfinite(), now - before, 0.0).square().sum())
            size += float(before.square().sum())
        return changed, size


@dataclass(frozen=True)
class ModuleCopy:
    """Buffers and frozen parameters, each with its tensor and a copy, and attributes that passes write."""

    tensors: list[tuple[StateSlot, Tensor, HostCopy]]
    attributes: list[KeptAttributes]


class Modules:
    """What a forward pass writes to modules. A large buffer is copied only once it is known to be written, because buffers also
    hold quantised weights."""

    def __init__(self, buffers: BufferKeeper):
        self.buffers = buffers

    def copy(self, reused: ModuleCopy | None) -> ModuleCopy:
        keeper = self.buffers
        live = [(index, slot, slot.get()) for index, slot in enumerate(keeper.slots)]
        chosen = [
            (slot, tensor, copy_tensor(tensor))
            for index, slot, tensor in live
            if tensor is not None and not tensor.is_meta
            if (index in keeper.written and not tensor.requires_grad) or (slot.is_buffer and tensor.numel() < SMALL)
        ]
        attributes = [keep_module(module) for module in keeper.modules]
        return ModuleCopy(chosen, attributes + [watched.copy() for watched in keeper.watched])

    def restore(self, saved: ModuleCopy, step: int) -> None:
        for attributes in saved.attributes:
            attributes.restore()
        for slot, tensor, value in saved.tensors:
            slot.put(tensor)
            restore_tensor(tensor, value)


class Schedule:
    """The position of a learning rate schedule."""

    def __init__(self, scheduler: Any):
        self.scheduler = scheduler

    def copy(self, reused: object) -> object:
        return copy.deepcopy(self.scheduler.state_dict())

    def restore(self, saved: object, step: int) -> None:
        self.scheduler.load_state_dict(copy.deepcopy(saved))


class Scaler:
    """The scale of a loss scaler."""

    def __init__(self, scaler: torch.amp.GradScaler):
        self.scaler = scaler

    def copy(self, reused: object) -> ScalerState:
        return ScalerState(self.scaler)

    def restore(self, saved: ScalerState, step: int) -> None:
        saved.restore()


class Generators:
    """The random state."""

    def __init__(self, device_type: str):
        self.device_type = device_type

    def copy(self, reused: object) -> RngState:
        return RngState.capture(self.device_type)

    def restore(self, saved: RngState, step: int) -> None:
        saved.restore()


def list_parts(runner: Runner, optimizer: Optimizer, scheduler: object = None) -> tuple[StatePart, ...]:
    """Returns the parts of any training loop."""
    parts: list[StatePart] = [Weights(runner.model), Modules(runner.buffers), OptimizerState(optimizer)]
    parts += [] if scheduler is None else [Schedule(scheduler)]
    parts += [] if runner.scaler is None else [Scaler(runner.scaler)]
    return (*parts, Generators(runner.device_type))


def estimate_bytes(runner: Runner, optimizer: Optimizer) -> int:
    """Returns how many bytes a snapshot needs on this rank, also before the optimizer's first step."""
    trained = sum(count_bytes(parameter) for parameter in runner.parameters)
    state = sum(count_bytes(tensor) for tensor in find_tensors(dict(optimizer.state)))
    return trained + (state or MOMENTS * trained)


@dataclass
class Snapshot:
    """The state of a run before a step."""

    step: int
    num_updates: int  # of the weights, since the run began
    parts: Sequence[StatePart]
    copies: list[Any]
    num_used: int = 0  # how often the run went back to it
    rate_factor: float = 1.0  # what earlier rewinds had multiplied the learning rate by

    @classmethod
    @torch.no_grad()
    def take(
        cls, step: int, num_updates: int, parts: Sequence[StatePart], reused: "Snapshot | None" = None
    ) -> "Snapshot":
        """Copies the state of now, into the memory of another snapshot of the same parts if there is one to spare."""
        before = [None] * len(parts) if reused is None else reused.copies
        return cls(step, num_updates, parts, [part.copy(old) for part, old in zip(parts, before, strict=True)])

    def measure_change(self) -> tuple[float, float]:
        """Returns how far the parameters of this rank have moved since, and their size: as [`Weights.measure_change`]."""
        wait_for_copies()
        pairs = zip(self.parts, self.copies, strict=True)
        moved = [part.measure_change(saved) for part, saved in pairs if isinstance(part, Weights)]
        return sum(changed for changed, _ in moved), sum(size for _, size in moved)

    def restore(self, step: int) -> None:
        """Puts everything back in place; the run continues with `step`."""
        wait_for_copies()
        for part, saved in zip(self.parts, self.copies, strict=True):
            part.restore(saved, step)
        self.num_used += 1
