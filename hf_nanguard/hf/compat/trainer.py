"""Every private name of a host library that we touch, each with the condition under which it can go."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from transformers import Trainer

ITEMS = "num_items_in_batch"
ONE_NORM = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU,
            DistributedType.MULTI_NPU, DistributedType.MULTI_MLU, DistributedType.MULTI_HPU)  # fmt: skip


@contextmanager
def poisoned_backward(accelerator: Accelerator, parameter: torch.Tensor) -> Iterator[None]:
    """Makes the next backward leave NaN in one gradient, so that the reduced norm tells every rank to redo the group.

    A NaN factor on the loss would not do: the backward of a cross-entropy over masked labels writes zeros all the same.
    Can go when accelerate offers a hook on the loss before its backward.
    """
    backward, before = accelerator.backward, vars(accelerator).get("backward")

    def poison(loss: torch.Tensor, **kwargs: Any) -> None:
        backward(loss + (parameter.sum() * float("nan")).to(loss.device), **kwargs)

    accelerator.backward = poison
    try:
        yield
    finally:
        del accelerator.backward
        if before is not None:
            accelerator.backward = before


class BackwardCount:
    """Counts the backward passes of one `training_step`; under DDP each of them is an exchange that all ranks take part in.

    Can go when accelerate counts them.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.number = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts inside the block."""
        accelerator, backward, before = (
            self.accelerator,
            self.accelerator.backward,
            vars(self.accelerator).get("backward"),
        )

        def count(*args: Any, **kwargs: Any) -> None:
            self.number += 1
            backward(*args, **kwargs)

        accelerator.backward = count
        try:
            yield
        finally:
            del accelerator.backward
            if before is not None:
                accelerator.backward = before


@contextmanager
def local_collectives(active: bool) -> Iterator[None]:
    """Makes accelerate's gathers and reductions local, so that one rank can run a loss that the others do not run.

    Can go when accelerate has a public switch for this, or TRL's losses stop reducing their metrics inline.
    """
    stores = (AcceleratorState._shared_state, PartialState._shared_state) if active else ()
    before = [store.get("distributed_type") for store in stores]
    for store in stores:
        store["distributed_type"] = DistributedType.NO
    try:
        yield
    finally:
        for store, value in zip(stores, before, strict=True):
            store["distributed_type"] = value


class Exchange:
    """Counts what a loss exchanges with other ranks: forwards, in which DDP broadcasts buffers, and accelerate's
    collectives. A loss that failed half-way has done some of it; whoever stands in for it does the rest.

    Can go together with `local_collectives`.

    Args:
        accelerator (`Accelerator`):
            The trainer's.
        model (`nn.Module`):
            The model as the training loop calls it.
    """

    NAMES = ("gather", "gather_for_metrics", "reduce")

    def __init__(self, accelerator: Accelerator, model: Any):
        self.accelerator = accelerator
        self.model = model
        self.forwards = 0
        self.calls = 0

    @contextmanager
    def counted(self, forwards_done: int = 0, calls_done: int = 0) -> Iterator[None]:
        """Counts what happens inside; as much as is said to be done already stays on this rank."""
        self.forwards = self.calls = 0
        inside = False

        def on_forward(model: Any, *args: Any) -> None:
            self.forwards += 1
            if self.forwards <= forwards_done and isinstance(model, DistributedDataParallel):
                model.require_forward_param_sync = False

        def wrapped(method: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal inside
                if inside:
                    return method(*args, **kwargs)
                inside, self.calls = True, self.calls + 1
                try:
                    with local_collectives(self.calls <= calls_done):
                        return method(*args, **kwargs)
                finally:
                    inside = False

            return call

        hook = self.model.register_forward_pre_hook(on_forward)
        for name in self.NAMES:
            vars(self.accelerator)[name] = wrapped(getattr(self.accelerator, name))
        try:
            yield
        finally:
            hook.remove()
            for name in self.NAMES:
                del vars(self.accelerator)[name]

    def forget(self) -> None:
        """Starts to count anew."""
        self.forwards = self.calls = 0

    def resumed(self) -> AbstractContextManager:
        """Returns a context in which what was counted is not done again."""
        return self.counted(self.forwards, self.calls)


def bypass_optimizer(trainer: Trainer) -> None:
    """Makes the step that is about to come a no-op for the optimizer, the loss scaler and the schedule alike.

    Can go when a Trainer can be told not to step.
    """
    trainer.accelerator.gradient_state._set_sync_gradients(False)
    hold_schedule(trainer.optimizer, True)


def resume_optimizer(trainer: Trainer) -> None:
    """Undoes [`bypass_optimizer`] once the step has passed by."""
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    hold_schedule(trainer.optimizer, False)


def hold_schedule(optimizer: Any, held: bool) -> None:
    """Tells the Trainer whether the optimizer step was skipped, so that the learning rate schedule is held.

    Can go when `AcceleratedOptimizer.step_was_skipped` has a setter.
    """
    optimizer._is_overflow = held


def bare_optimizer(optimizer: Any) -> Any:
    """Returns the torch optimizer inside accelerate's wrapper.

    Can go when `AcceleratedOptimizer` shows the state of single parameters by itself.
    """
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def clips_in_one_piece(trainer: Trainer, model: torch.nn.Module) -> bool:
    """Returns whether the host clips by torch's own `get_total_norm` and `clip_grads_with_norm_`, so that we can look
    between the two; a subclass may clip in its own way, and so may whoever has put a clip of theirs on the accelerator.

    Can go when the Trainer measures and clips in two calls.
    """
    accelerator = trainer.accelerator
    own = [
        cls
        for cls in type(trainer).__mro__
        if "_clip_grad_norm" in vars(cls) and cls.__module__.split(".")[0] != "hf_nanguard"
    ]
    sharded = accelerator.distributed_type == DistributedType.FSDP and accelerator.is_fsdp2
    one_norm = sharded or accelerator.distributed_type in ONE_NORM
    replaced = "_clip_grad_norm" in vars(trainer) or "clip_grad_norm_" in vars(accelerator)
    return own[0] is Trainer and not replaced and one_norm and not trainer._has_mixed_mesh_grads(model)


def dispatches_batches(trainer: Trainer) -> bool:
    """Returns whether rank 0 collates for all ranks: then nothing but tensors can travel with a batch.

    Can go when accelerate's dispatcher passes other values through.
    """
    accelerator = trainer.accelerator
    streamed = isinstance(trainer.train_dataset, IterableDataset)
    asked = accelerator.dispatch_batches
    return accelerator.num_processes > 1 and (streamed if asked is None else bool(asked))


def metric_lists(trainer: Trainer) -> dict[str, list]:
    """Returns the lists of training metrics a TRL trainer collects between two log rows, `{}` for other trainers.

    Can go when TRL's trainers have a public metric store.
    """
    metrics = vars(trainer).get("_metrics", vars(trainer).get("_stored_metrics"))
    return metrics["train"] if isinstance(metrics, dict) and "train" in metrics else {}


def logged_advantages(trainer: Trainer) -> list[float] | None:
    """Returns the advantages of the newest generation that a TRL trainer has brought to the host for its own log, `None` if
    it keeps no such log.

    Can go when TRL checks its advantages itself.
    """
    logs = vars(trainer).get("_logs")
    return list(logs["advantages"]) if isinstance(logs, dict) and "advantages" in logs else None


def running_loss(trainer: Trainer) -> torch.Tensor:
    """Returns the loss the Trainer sums up between two log rows, on its device.

    Can go when the Trainer lets a subclass say what is logged.
    """
    return trainer._tr_loss


def forget_step(trainer: Trainer) -> None:
    """Takes a skipped step out of the means that the Trainer logs, which would else show part of a 0.0.

    Can go together with `running_loss`.
    """
    trainer._globalstep_last_logged += 1
    trainer._initial_global_step += 1


def counts_no_step(trainer: Trainer) -> bool:
    """Returns whether no step is left in the mean loss of the run, which the Trainer then calls 0.

    Can go together with `forget_step`.
    """
    return trainer.state.global_step <= trainer._initial_global_step


def loss_shifts_labels(trainer: Trainer) -> bool:
    """Returns whether position 0 of the labels is never a target.

    Can go when the Trainer makes `_loss_shifts_labels` public.
    """
    return bool(vars(trainer).get("_loss_shifts_labels", False))


def count_items(trainer: Trainer, batches: list[Any], device: torch.device) -> torch.Tensor | int | None:
    """Returns the host's own count of loss items in these batches on this rank alone, `None` if it does not count.

    Can go when `get_batch_samples` is split in fetching and counting.
    """
    with local_collectives(trainer.args.world_size > 1):
        return trainer._get_num_items_in_batch(batches, device)


def counts_per_generation(trainer: Trainer) -> bool:
    """Returns whether a TRL trainer divides by the mean count of a generation times the current group size, so that a
    smaller group needs no new count.

    Can go when TRL's online trainers normalise by what `get_batch_samples` counts.
    """
    return hasattr(trainer.args, "steps_per_generation")


def completion_mask(batch: dict[str, Any]) -> torch.Tensor:
    """Returns which completion tokens of a TRL online trainer's batch count in its loss.

    Can go together with `counts_per_generation`.
    """
    return batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]


def has_own_loss(trainer: Trainer) -> bool:
    """Returns whether the loss is the user's own code: a `compute_loss_func`, or a `compute_loss` in a class (or on an
    instance) that is neither the hosts' nor ours.

    Can go when a Trainer tells which labels its loss ignores.
    """
    ours = "hf_nanguard."
    definer = next(c for c in type(trainer).__mro__ if "compute_loss" in vars(c) and not c.__module__.startswith(ours))
    own_class = not definer.__module__.startswith(("transformers.", "trl."))
    return trainer.compute_loss_func is not None or "compute_loss" in vars(trainer) or own_class


def lost_loss(error: Exception) -> bool:
    """Returns whether the host raised because the model returned no loss.

    Can go when the Trainer raises an error of its own for this.
    """
    return isinstance(error, ValueError) and "did not return a loss" in str(error)


def record_batches(dataloader: Any, record: list) -> bool:
    """Makes the batch sampler of a prepared dataloader write down which rows each batch of the epoch is made of.

    The class of the sampler is swapped, because accelerate and torch both refuse another object once a dataloader is
    built. Returns whether there is a batch sampler. Can go when a DataLoader tells the indices of a batch.
    """
    base = vars(dataloader).get("base_dataloader", dataloader)
    sampler = vars(base).get("batch_sampler")
    if not hasattr(sampler, "__dict__") or vars(base).get("in_order") is False:  # a plain list has no class to swap
        return False
    original = type(sampler)

    def __iter__(self):  # noqa: N807 - it becomes the method of that name
        record.clear()
        for batch in original.__iter__(self):
            record.append(list(batch))
            yield batch

    sampler.__class__ = type(original.__name__, (original,), {"__iter__": __iter__, "__module__": original.__module__})
    return True
