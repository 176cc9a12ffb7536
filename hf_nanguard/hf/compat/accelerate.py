"""Every private name of accelerate that we touch, each with the condition under which it can go."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from .trainer_protocol import HostTrainer


def steps_in_backward(trainer: HostTrainer) -> bool:
    """Returns whether the optimizer steps inside the backward pass, before anybody can decide, as DeepSpeed's engine does.

    Can go when accelerate parts the engine's backward from its step.
    """
    return trainer.accelerator.distributed_type == DistributedType.DEEPSPEED


@contextmanager
def replaced_method(
    owner: object, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., object]]
) -> Iterator[None]:
    """Replaces a method on one object for the duration of the block, and restores what was there. `wrap` returns the
    replacement, given the method as it is now.

    Can go when the hosts offer hooks at the places where it is used.
    """
    attributes = vars(owner)
    before = attributes.get(name)
    attributes[name] = wrap(getattr(owner, name))
    try:
        yield
    finally:
        attributes.pop(name, None)
        if before is not None:
            attributes[name] = before


def poisoned_backward(accelerator: Accelerator, parameter: torch.Tensor) -> AbstractContextManager[None]:
    """Returns a context whose backward leaves NaN in one gradient, so that the reduced norm makes every rank redo the group.

    Multiplying the loss by NaN is not enough: the backward of a cross-entropy over masked labels writes zeros all the
    same. Can go when accelerate offers a hook on the loss before its backward.
    """

    def poison(backward: Callable[[torch.Tensor], None], loss: torch.Tensor) -> None:
        backward(loss + (parameter.sum() * float("nan")).to(loss.device))

    return changed_backwards(accelerator, poison)


def surrounded_backwards(
    accelerator: Accelerator, around: Callable[[torch.Tensor], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """Returns a context in which every backward pass runs inside `around(loss)`.

    Can go when accelerate offers a hook on the loss before its backward.
    """

    def surround(backward: Callable[[torch.Tensor], None], loss: torch.Tensor) -> None:
        with around(loss):
            backward(loss)

    return changed_backwards(accelerator, surround)


@contextmanager
def changed_backwards(
    accelerator: Accelerator, run: Callable[[Callable[[torch.Tensor], None], torch.Tensor], None]
) -> Iterator[None]:
    """Makes every backward pass of a loss go through `run(backward, loss)`: by the accelerator, before it scales the loss, or
    past it, by `loss.backward()`. A pass inside another one, as of a checkpointed part, belongs to that one.

    Can go when accelerate offers a hook on the loss before its backward.
    """
    depth = 0

    def pass_through(backward: Callable[[torch.Tensor], None], loss: Any) -> None:
        nonlocal depth
        depth += 1
        try:
            if depth > 1 or not isinstance(loss, torch.Tensor):  # several tensors at once are no loss
                backward(loss)
            else:
                run(backward, loss)
        finally:
            depth -= 1

    def by_accelerator(backward: Callable[..., Any]) -> Callable[..., object]:
        return lambda loss, **kwargs: pass_through(lambda given: backward(given, **kwargs), loss)

    by_torch = torch.autograd.backward

    def past_it(tensors: object, *args: Any, **kwargs: Any) -> None:
        pass_through(lambda given: by_torch(given, *args, **kwargs), tensors)

    with replaced_method(accelerator, "backward", by_accelerator), patch.object(torch.autograd, "backward", past_it):
        yield


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
    """Counts what a loss exchanges with other ranks: forwards, in which DDP broadcasts buffers, and accelerate's collectives. A
    loss that raised has done some of them; the batch that replaces it does only the rest.

    Can go together with `local_collectives`.
    """

    NAMES = ("gather", "gather_for_metrics", "reduce")

    def __init__(self, accelerator: Accelerator, model: nn.Module):
        self.accelerator = accelerator
        self.model = model  # as the training loop calls it
        self.forwards = 0
        self.calls = 0

    @contextmanager
    def counted(self, forwards_done: int = 0, calls_done: int = 0) -> Iterator[None]:
        """Counts inside the block. The first `forwards_done` forwards and `calls_done` collectives stay on this rank."""
        self.forwards = self.calls = 0
        inside = False

        def on_forward(model: nn.Module, *args: object) -> None:
            self.forwards += 1
            if self.forwards <= forwards_done and isinstance(model, DistributedDataParallel):
                model.require_forward_param_sync = False

        def wrapped(method: Any) -> Any:
            def call(*args: object, **kwargs: object) -> object:
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

        with self.model.register_forward_pre_hook(on_forward), ExitStack() as stack:
            for name in self.NAMES:
                stack.enter_context(replaced_method(self.accelerator, name, wrapped))
            yield

    def forget(self) -> None:
        """Resets the counts."""
        self.forwards = self.calls = 0

    def resumed(self) -> AbstractContextManager:
        """Returns a context in which the exchanges counted so far are not repeated."""
        return self.counted(self.forwards, self.calls)


def bypass_optimizer(optimizer: Any, holds_schedule: bool = True) -> None:
    """Makes the step that is about to come a no-op for the optimizer, the loss scaler and, if it is to be held, the schedule.

    Can go when a Trainer can be told not to step.
    """
    GradientState()._set_sync_gradients(False)
    optimizer._is_overflow = holds_schedule  # the Trainer asks `step_was_skipped` before it steps the schedule


def is_bypassed(optimizer: object) -> bool:
    """Returns whether [`bypass_optimizer`] keeps the optimizer from stepping; a bare one of torch does not know of it.

    Can go together with it.
    """
    return isinstance(optimizer, AcceleratedOptimizer) and optimizer.step_was_skipped


def resume_optimizer(optimizer: Any) -> None:
    """Undoes [`bypass_optimizer`] once the step has passed.

    Can go together with it.
    """
    GradientState()._set_sync_gradients(True)
    optimizer._is_overflow = False


def bare_optimizer(optimizer: object) -> Any:
    """Returns the torch optimizer inside accelerate's wrapper.

    Can go when `AcceleratedOptimizer` shows the state of single parameters by itself.
    """
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def dispatches_batches(trainer: HostTrainer) -> bool:
    """Returns whether rank 0 collates for all ranks: then nothing but tensors can travel with a batch.

    Can go when accelerate's dispatcher passes other values through.
    """
    accelerator = trainer.accelerator
    streamed = isinstance(trainer.train_dataset, IterableDataset)
    asked = accelerator.dispatch_batches
    return accelerator.num_processes > 1 and (streamed if asked is None else bool(asked))
