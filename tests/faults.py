"""The fault injector: plants a named culprit at a chosen step, micro-batch and rank of any trainer, stock or guarded.

A fault belongs to a batch, not to a moment: when the guard runs that batch again, the fault strikes again, and it
strikes no other batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAN = float("nan")
INF = float("inf")


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Args:
        kind (`str`):
            `"loss"`: the loss becomes `value`, and so do its gradients. `"gradient"`: the loss stays finite, the gradient
            of `parameter` (of every parameter, if none is named) does not. `"input"`: `value` in the first entry of the
            float input `field`. `"label"`: `value` as the first label of every row, `None` for all labels masked.
            `"weight"`: `value` in an entry of `parameter`. `"moment"`: `value` in Adam's first moment of `parameter`.
            `"error"`: an exception inside the loss. `"missing"`: no loss at all.
        step, micro_step (`int`):
            When: `state.global_step` and place in the accumulation group.
        rank (`int`, *optional*):
            On which rank; `None` for all.
        value (`float` or `int`, *optional*):
            The bad number.
        parameter, field (`str`, *optional*):
            Where.
        once (`bool`):
            Strike the first run of the batch only, like a hardware fault.
    """

    kind: str
    step: int = 2
    micro_step: int = 0
    rank: int | None = None
    value: float | None = NAN
    parameter: str | None = None
    field: str = "pixel_values"
    once: bool = False


class _BadGradient(torch.autograd.Function):
    """Adds nothing to the loss and one bad entry to a gradient."""

    @staticmethod
    def forward(ctx, parameter: Tensor, value: float) -> Tensor:
        ctx.like, ctx.value = parameter, value
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx, gradient: Tensor):
        bad = torch.zeros_like(ctx.like)
        bad.view(-1)[0] = ctx.value
        return bad, None


class Planted:
    """Faults planted in a trainer; `struck` lists those that came to pass."""

    def __init__(self, trainer: Any, faults: tuple[Fault, ...]):
        self.trainer = trainer
        self.faults = [fault for fault in faults if fault.rank in (None, trainer.args.process_index)]
        self.struck: list[Fault] = []
        self.seen: dict[int, tuple[Tensor, int, int]] = {}
        self.original: Callable = trainer.compute_loss
        self.collated = 0
        self.collator = trainer.data_collator
        trainer.compute_loss = self.compute_loss
        if any(fault.kind in ("input", "label") for fault in self.faults):
            trainer.data_collator = self.collate

    def collate(self, examples: list) -> Any:
        batch = self.collator(examples)
        step, micro_step = divmod(self.collated, self.trainer.args.gradient_accumulation_steps)
        self.collated += 1
        for fault in self.faults:
            if (fault.step, fault.micro_step) == (step, micro_step) and fault.kind in ("input", "label"):
                self.struck.append(fault)
                if fault.kind == "input":
                    batch[fault.field].view(-1)[0] = fault.value
                elif fault.value is None:
                    batch["labels"].fill_(-100)
                else:
                    batch["labels"][:, -1] = int(fault.value)
        return batch

    def place(self, inputs: dict) -> tuple[int, int]:
        """Returns step and micro-step of the batch, also when it is run again."""
        main = next(inputs[key] for key in ("completion_ids", "input_ids", "pixel_values", "x") if key in inputs)
        guard = vars(self.trainer).get("nanguard")
        if id(main) not in self.seen and guard is not None and guard.replaying:
            return -1, -1  # a part of a batch: an autopsy looks for the samples to blame
        if id(main) not in self.seen:
            step = self.trainer.state.global_step
            micro_step = sum(1 for _, when, _ in self.seen.values() if when == step)
            self.seen[id(main)] = (main, step, micro_step)
        return self.seen[id(main)][1:]

    def named(self, name: str | None) -> Tensor:
        bare = self.trainer.accelerator.unwrap_model(self.trainer.model)
        return dict(bare.named_parameters())[name]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            return self.original(model, inputs, *args, **kwargs)
        place = self.place(inputs)
        now = [fault for fault in self.faults if (fault.step, fault.micro_step) == place]
        now = [fault for fault in now if not (fault.once and fault in self.struck)]
        self.struck.extend(fault for fault in now if fault not in self.struck and fault.kind not in ("input", "label"))
        for fault in now:
            if fault.kind == "weight":
                self.named(fault.parameter).data.view(-1)[0] = fault.value
            if fault.kind == "moment":
                self.trainer.optimizer.state[self.named(fault.parameter)]["exp_avg"].view(-1)[0] = fault.value
            if fault.kind == "error":
                raise RuntimeError("planted error")
        loss = self.original(model, inputs, *args, **kwargs)
        for fault in now:
            if fault.kind == "missing":
                return None
            if fault.kind == "loss":
                loss = loss * fault.value
            if fault.kind == "gradient" and fault.parameter is not None:
                loss = loss + _BadGradient.apply(self.named(fault.parameter), fault.value)
            if fault.kind == "gradient" and fault.parameter is None:
                loss = loss * 1.0
                loss.register_hook(lambda gradient, value=fault.value: gradient * value)
        return loss


def plant(trainer: Any, *faults: Fault) -> Planted:
    """Plants faults in a trainer before `train()`."""
    return Planted(trainer, faults)
