"""The run on several ranks that never had the bad micro-batches, made from stock classes only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from .scenario import Place


def never_had(trainer_class: type, gone: tuple[Place, ...]) -> type:
    """Returns a stock trainer class in which the (step, micro-step, rank) of `gone` never come.

    What is left weighs the same: per-batch means 1 / (micro-batches left over all ranks), token losses
    1 / (tokens left over all ranks). DDP divides by the number of ranks, hence the factor of it. A rank with nothing left takes
    part in the reduction with a zero gradient; a step in which no rank has anything left does not happen.
    """

    class NeverHad(trainer_class):
        num_tokens = 0  # of what is left, on all ranks; what TRL counts itself stays on a rank where ranks have different numbers left

        def get_batch_samples(self, epoch_iterator, num_batches, device):
            batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
            step, rank, world = self.state.global_step, self.args.process_index, self.args.world_size
            left = [[m for m in range(len(batches)) if (step, m, r) not in gone] for r in range(world)]
            self.left, self.micro_step = left[rank], 0
            self.even = len({len(micros) for micros in left}) == 1
            total = sum(map(len, left))
            self.weight = total / world if total % world else total // world
            self.num_items = num_items
            if num_items is not None:
                shifted = (
                    self.count_labels(batches, 1) == num_items
                )  # older hosts also count the first label of a sample
                self.num_items = self.count_labels([batches[m] for m in self.left], int(shifted))
            if "attention_mask" in batches[0]:
                seen = sum((batches[m]["attention_mask"].sum() for m in self.left), torch.tensor(0))
                self.num_tokens += int(self.accelerator.reduce(seen, reduction="sum"))
            return batches, num_items

        def count_labels(self, batches, first):
            mine = sum((batch["labels"][..., first:] != -100).sum() for batch in batches)
            return self.accelerator.reduce(torch.as_tensor(mine), reduction="sum")

        def training_step(self, model, inputs, num_items_in_batch=None):
            micro_step, self.micro_step = self.micro_step, self.micro_step + 1
            self.optimizer._is_overflow = self.weight == 0
            self.current_gradient_accumulation_steps = self.weight
            if micro_step in self.left:
                with synced(model, micro_step == self.left[-1]):
                    return super().training_step(model, inputs, self.num_items)
            nothing = torch.zeros((), device=self.args.device)
            if hasattr(self, "_buffered_inputs"):  # RL: the completions are generated all the same
                self._prepare_inputs(inputs)
                self._step += 1
            if self.weight and not self.left and micro_step == 0:
                with as_before(model), synced(model, True):
                    self.accelerator.backward = lambda loss: (loss * 0.0).backward()
                    super().training_step(model, inputs, self.num_items)
                    del self.accelerator.backward
            return nothing

        def compute_loss(self, model, inputs, *args, **kwargs):
            with local_metrics(self.accelerator, not self.even):
                return super().compute_loss(model, inputs, *args, **kwargs)

    NeverHad.__name__ = trainer_class.__name__
    return NeverHad


def zeroed(trainer_class: type, step: int, parameter: str) -> type:
    """Returns a stock trainer class that zeroes one gradient entry before it clips."""

    class Zeroed(trainer_class):
        def _clip_grad_norm(self, model):
            if self.state.global_step == step:
                dict(self.accelerator.unwrap_model(model).named_parameters())[parameter].grad.view(-1)[0] = 0.0
            return super()._clip_grad_norm(model)

    Zeroed.__name__ = trainer_class.__name__
    return Zeroed


class StopAt(TrainerCallback):
    """Ends a run after so many steps, with the schedule of the longer one."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


@contextmanager
def synced(model: Any, sync: bool) -> Iterator[None]:
    """Reduces gradients in this backward, or not, whatever the Trainer said."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(sync)
        yield
        return
    before = model.require_backward_grad_sync
    model.require_backward_grad_sync = sync
    yield
    model.require_backward_grad_sync = before


@contextmanager
def local_metrics(accelerator: Any, active: bool) -> Iterator[None]:
    """Keeps metrics on their rank, since ranks run different numbers of losses."""
    names = ("gather", "gather_for_metrics", "reduce") if active else ()
    for name in names:
        setattr(accelerator, name, lambda tensor, *args, **kwargs: tensor)
    yield
    for name in names:
        delattr(accelerator, name)


@contextmanager
def as_before(model: Any) -> Iterator[None]:
    """Leaves random state and buffers as they were."""
    rng = torch.get_rng_state()
    buffers: dict[str, Tensor] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    torch.set_rng_state(rng)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
