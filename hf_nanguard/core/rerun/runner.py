"""How the guard runs micro-batches again: each alone to find the bad ones, then the good ones as the loop would have.

A runner knows the loop it belongs to; the guard decides what to run. Under DDP a probe stays on its rank (`no_sync`), and
a rank with nothing left joins the others' reduction with zeros. Sharded parameters (FSDP2) need every rank in every
pass: `lockstep` is then true and a micro-batch is dropped on all ranks or on none.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Generic

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...boundary import Boundary
from ..event import JsonObject
from ..finite import is_sharded
from ..rng import RngState
from ..torch_private import (
    copy_unscaled,
    forget_used_parameters,
    plain_name,
    restore_unscaled,
    sync_buffers,
    without_reentrant_checkpoints,
)
from .buffers import BufferKeeper
from .closed_iterators import closed_iterators
from .loss_mark import mark_shard, marked_backward
from .micro_batch import AccumulationGroup, MicroBatch, Payload, Weight
from .traceless_skip import clear_gradients, forget_unscale

SETTINGS = ("lr", "weight_decay", "eps", "momentum")  # of a group of parameters


def same_on_all_ranks(norm: Tensor) -> Tensor:
    """Returns the norm as a value that every rank has; for a sharded model this takes one small reduction.

    Replicas of shards (HSDP) have the same norm, unless one of them was marked: they exchange whether theirs is NaN.
    """
    if not is_sharded(norm):
        return norm
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = norm.device_mesh, norm.placements  # type: ignore[attr-defined]
    everywhere = [Replicate()] * mesh.ndim
    value = norm.redistribute(placements=everywhere).to_local()  # type: ignore[attr-defined]
    for dimension, placement in enumerate(placements):
        if mesh.ndim > 1 and placement.is_replicate() and mesh.size(dimension) > 1:
            num_marked = value.isnan().to(value.dtype)
            torch.distributed.all_reduce(num_marked, group=mesh.get_group(dimension))
            value = torch.where(num_marked > 0, math.nan, value)
    return DTensor.from_local(value, mesh, everywhere, run_check=False)


class Runner(ABC, Generic[Payload, Weight]):
    """Runs held micro-batches again.

    The model is the one that the loop calls, with its DDP wrapper if it has one.
    """

    def __init__(self, model: nn.Module, scaler: torch.amp.GradScaler | None = None):
        self.model = model
        self.scaler = scaler
        self.buffers = BufferKeeper(model)
        parameters = self.parameters
        self.lockstep = any(is_sharded(parameter) for parameter in parameters)
        self.device_type = parameters[0].device.type if parameters else "cpu"

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trainable now; a run may freeze and unfreeze them."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @abstractmethod
    def run(self, micro: MicroBatch[Payload], weight: Weight) -> Tensor:
        """Runs forward and backward of one micro-batch as the loop does and returns its loss, detached."""

    @abstractmethod
    def forward(self, micro: MicroBatch[Payload]) -> None:
        """Runs the forward only, with gradients enabled."""

    @abstractmethod
    def regroup(self, good: list[MicroBatch[Payload]], num_good: list[int]) -> Weight:
        """Returns how the good micro-batches are weighed, given how many each rank has left. Every rank calls it."""

    @abstractmethod
    def weigh_alone(self, micro: MicroBatch[Payload]) -> Weight:
        """Returns how a micro-batch is weighed as if it were the whole step. No collective operation."""

    @abstractmethod
    def unscale(self) -> None:
        """Divides the gradients by the loss scale, if there is one, once per step."""

    def why_not(self, group: AccumulationGroup[Payload, Weight]) -> str | None:
        """Returns why the group cannot be redone, `None` if it can."""
        return group.failure

    def mean_loss(self, losses: list[float]) -> float:
        """Returns the loss of a step from those of its micro-batches, which the loop has weighed already."""
        return sum(losses) if losses else math.nan

    left_out: frozenset[str] = frozenset()  # the terms left out of the loss of the micro-batch that is being run again

    @property
    def bad_setting(self) -> tuple[str, float] | None:
        """Name and value of a number of the optimizer that is not finite, such as a learning rate; one that is a tensor is not
        looked at."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        values = ((name, group.get(name)) for group in groups for name in SETTINGS)
        return next(((n, v) for n, v in values if isinstance(v, float) and not math.isfinite(v)), None)

    # ---- what an autopsy needs ----

    optimizer: torch.optim.Optimizer | None = None  # the torch optimizer whose update may be to blame
    max_grad_norm: float | None = None  # what the loop clips gradients to

    @property
    def num_labels(self) -> int | None:
        """How many labels a target may be, `None` if that is not known."""
        return None

    @abstractmethod
    def inputs_of(self, micro: MicroBatch[Payload]) -> object:
        """Returns the inputs of a held micro-batch: tensors, nested in mappings and sequences."""

    @abstractmethod
    def with_inputs(self, micro: MicroBatch[Payload], inputs: object) -> Payload:
        """Returns the payload of a micro-batch with other inputs."""

    def decode(self, micro: MicroBatch[Payload], sample: int) -> str | None:
        """Returns the text of a sample, `None` if it has none."""
        return None

    def name_row(self, row: int | None, text: str | None) -> str | None:
        """Returns what identifies a dataset row for the user, `None` if nothing does. Its number and its text are given as far
        as they are known."""
        return None

    def rows_of(self, micro: MicroBatch[Payload], number: int) -> list[int] | None:
        """Returns the dataset row of each of this many documents that lie in one entry, `None` if they are not known."""
        rows = micro.rows
        return rows if rows is not None and len(rows) == number else None

    def facts(self, weight: Weight) -> JsonObject:
        """Returns what a bundle must hold so that the loop's model and loss can be built again, as JSON values."""
        return {"kind": "loop", "model": type(self.model).__name__}

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Restores gradients, buffers, random state and loss scaler after the block."""
        gradients = [(parameter, parameter.grad) for parameter in self.parameters]
        rng = RngState.capture(self.device_type)
        buffers = self.buffers.keep_apart()
        unscaled = {} if self.scaler is None else copy_unscaled(self.scaler)
        try:
            yield
        finally:
            with ExitStack() as stack:  # the last one first, each of them even if another fails
                if self.scaler is not None:
                    stack.callback(restore_unscaled, self.scaler, unscaled)
                stack.callback(sync_buffers, self.model, True)
                stack.callback(rng.restore)
                stack.callback(buffers.restore)
                forget_used_parameters(self.model)
                for parameter, gradient in gradients:
                    parameter.grad = gradient

    @property
    def learning_rate(self) -> float | None:
        """The largest learning rate of the optimizer; `None` without an optimizer, or if it is a tensor."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        rates = [group.get("lr") for group in groups]
        return max((rate for rate in rates if isinstance(rate, float)), default=None)

    # ---- isolation ----

    def replayed(self) -> AbstractContextManager[None]:
        """Returns a context for all passes of a replay: iterators that they would read on refuse to be read. Not where parameters are
        sharded, because a pass that fails there ends the run."""
        return nullcontext() if self.lockstep else closed_iterators(self.model, *self.loss_functions())

    def loss_functions(self) -> list[object]:
        """Returns what the loss consists of beside the model, see [`closed_iterators`]."""
        return []

    def isolated(self) -> AbstractContextManager:
        """Returns a context in which running a micro-batch changes no state or metric of the loop."""
        return nullcontext()

    def recorded(self, weight: Weight) -> AbstractContextManager:
        """Returns a context in which the good micro-batches replace what the group has added to the loop's metrics."""
        return nullcontext()

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Returns the trainable parameters with the names the user knows, in model order."""
        return [(name, parameter) for name, parameter in self._all_named() if parameter.requires_grad]

    @property
    def bare_model(self) -> nn.Module:
        """The model without its DDP wrapper."""
        model = self.model
        return model.module if isinstance(model, (DistributedDataParallel, nn.DataParallel)) else model

    def _all_named(self) -> list[tuple[str, Tensor]]:
        return [(plain_name(name), parameter) for name, parameter in self.bare_model.named_parameters()]

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        """Returns the gradients that exist, in model order."""
        return [(name, p.grad) for name, p in self._all_named() if p.grad is not None]

    def measure(self) -> Tensor:
        """Unscales the gradients and returns their total norm on the device, the same on every rank."""
        self.unscale()
        return self.norm()

    def norm(self) -> Tensor:
        """Returns the total norm of the gradients as they are."""
        given = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        gradients = [grad.coalesce().values() if grad.is_sparse else grad for grad in given]  # torch has no sparse norm
        return same_on_all_ranks(torch.nn.utils.get_total_norm(gradients))

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Clips the gradients, given their norm; as in the hosts, also those of a parameter that was frozen since."""
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Keeps the gradients of the passes inside on this rank."""
        if isinstance(self.model, DistributedDataParallel):
            with self.model.no_sync():
                yield
        elif self.lockstep:
            self.model.set_requires_gradient_sync(False)  # type: ignore[operator]
            try:
                yield
            finally:
                self.model.set_requires_gradient_sync(True)  # type: ignore[operator]
        else:
            yield

    def mark_losses(self, losses: list[Tensor]) -> None:
        """Makes the norm of sharded gradients NaN on every rank if one of these losses is not finite."""
        if self.lockstep:
            mark_shard(self.parameters, losses)

    def marking(self, loss: Tensor, boundary: Boundary) -> AbstractContextManager[None]:
        """Returns a context whose backward pass makes the reduced gradients NaN on every rank if the loss is not finite."""
        if self.lockstep:
            return nullcontext()
        return boundary.inside("loss mark", lambda: marked_backward(self.parameters, loss, boundary))

    def poison(self) -> None:
        """Makes the norm NaN; where gradients are sharded, on every rank."""
        mark_shard(self.parameters, [torch.tensor(float("nan"))])

    def clear(self) -> None:
        """Sets all gradients to `None` and lets the scaler unscale again."""
        clear_gradients(self.parameters)
        forget_used_parameters(self.model)
        if self.scaler is not None:
            forget_unscale(self.scaler)

    def reset(self) -> None:
        """Sets all gradients to `None` and puts kept buffers back."""
        self.clear()
        self.buffers.restore()

    def probe(self, micro: MicroBatch[Payload], weight: Weight) -> Tensor:
        """Runs one micro-batch alone, with the random state it had. Its gradients stay in place."""
        self.reset()
        micro.rng.restore()
        sync_buffers(self.model, False)  # ranks may run different numbers of probes
        self.left_out = micro.left_out
        with self.isolated(), nullcontext() if self.lockstep else self.unsynced():
            return self.run(micro, weight)

    def look(self, micro: MicroBatch[Payload]) -> None:
        """Runs the forward of one micro-batch alone, with the random state it had: in Python, also of a compiled model, so that
        hooks are called. Gradients are enabled as in training, but nothing is kept for a backward pass."""
        self.buffers.restore()
        micro.rng.restore()
        sync_buffers(self.model, False)
        self.left_out = micro.left_out
        unkept = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)
        in_python = torch.compiler.set_stance("force_eager")
        with self.isolated(), self.unsynced(), in_python, without_reentrant_checkpoints(), unkept:
            self.forward(micro)

    def rerun(
        self, group: AccumulationGroup[Payload, Weight], good: list[MicroBatch[Payload]], weight: Weight
    ) -> list[Tensor]:
        """Runs the good micro-batches from the group's first random state, as if the others did not exist."""
        self.undo(group)  # buffers are synced in the first pass, as in the group itself; every rank runs one
        with self.recorded(weight):
            if not good:
                self.left_out = frozenset()
                self.join(group.micro_batches[0])
                self.buffers.restore()
                group.micro_batches[0].rng.restore()
            losses = []
            for micro in good:
                self.left_out = micro.left_out
                with nullcontext() if micro is good[-1] else self.unsynced():
                    losses.append(self.run(micro, weight))
            return losses

    def undo(self, group: AccumulationGroup[Payload, Weight]) -> None:
        """Sets the gradients to `None` and puts buffers and random state back as they were before the group."""
        self.reset()
        sync_buffers(self.model, True)
        for micro in group.micro_batches[:1]:  # none if the guard failed to record it
            micro.rng.restore()

    def join(self, micro: MicroBatch[Payload]) -> None:
        """Takes part in the other ranks' gradient reduction with zeros."""
        if isinstance(self.model, DistributedDataParallel):
            with self.isolated():
                self.forward(micro)
            torch.autograd.backward(self.parameters, [torch.zeros_like(p) for p in self.parameters])


class LoopRunner(Runner[object, float]):
    """The runner of a hand-written loop: a loss function, a model and an optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None = None,
        max_grad_norm: float | None = None,
    ):
        super().__init__(model, scaler)
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.loss_fn: Callable[[object], Tensor] | None = None

    def begin_group(self, loss_fn: Callable[[Any], Tensor]) -> None:
        """Prepares for the micro-batches of a step: no gradients are left of an earlier one."""
        self.loss_fn = loss_fn
        self.clear()

    def loss_functions(self) -> list[object]:
        return [self.loss_fn]

    def _loss(self, payload: object) -> Tensor:
        if self.loss_fn is None:
            raise RuntimeError("LoopRunner was asked to run a micro-batch before Guard.step gave it a loss function.")
        return self.loss_fn(payload)

    def run(self, micro: MicroBatch, weight: float, marked_by: Boundary | None = None) -> Tensor:
        loss = self._loss(micro.payload)
        weighed = loss * weight
        with nullcontext() if marked_by is None else self.marking(loss, marked_by):
            (weighed if self.scaler is None else self.scaler.scale(weighed)).backward()
        return loss.detach()

    def mean_loss(self, losses: list[float]) -> float:
        return sum(losses) / len(losses)

    def forward(self, micro: MicroBatch) -> None:
        self._loss(micro.payload)

    def regroup(self, good: list[MicroBatch], num_good: list[int]) -> float:
        return len(num_good) / sum(num_good)

    def weigh_alone(self, micro: MicroBatch) -> float:
        return 1.0

    def inputs_of(self, micro: MicroBatch) -> object:
        return micro.payload

    def with_inputs(self, micro: MicroBatch, inputs: object) -> object:
        return inputs

    def unscale(self) -> None:
        if self.scaler is not None and self.optimizer is not None:
            self.scaler.unscale_(self.optimizer)

    def update(self) -> None:
        """Lets the optimizer step, through the scaler if there is one."""
        if self.optimizer is None:
            return
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
