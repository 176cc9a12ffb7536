"""Fault injector: plants a fault at a chosen step, micro-batch and rank of any trainer, stock or guarded.

A fault belongs to a batch, not to a moment: it occurs again when the guard runs that batch again, and it affects no other
batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.finite import local

NAN = float("nan")
INF = float("inf")
ID_FIELDS = ("completion_ids", "input_ids", "pixel_values", "x")  # the tensor by which a batch is recognised


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and where.

    Args:
        kind (`str`):
            `"loss"`: the loss and its gradients become `value`. `"constant"`: the loss becomes `value`, its gradients stay
            as they are. `"gradient"`: the loss stays finite, and the gradient of
            `parameter` (of every parameter if `None`) contains `value`. `"input"`: `value` in the first entry of the
            float input `field`. `"label"`: `value` as the last label of every row; `None` masks all labels.
            `"weight"`: `value` in the first entry of `parameter`. `"moment"`: `value` in the first entry of Adam's first
            moment of `parameter`. `"error"`: the loss raises a `RuntimeError`. `"missing"`: the loss is `None`.
        step (`int`, *optional*, defaults to `2`):
            `state.global_step` at which the fault occurs.
        micro_step (`int`, *optional*, defaults to `0`):
            Position of the micro-batch in its accumulation group.
        rank (`int`, *optional*):
            Rank on which the fault occurs; `None` for all ranks.
        value (`float`, *optional*, defaults to NaN):
            The bad number.
        parameter (`str`, *optional*):
            Name of the parameter.
        field (`str`, *optional*, defaults to `"pixel_values"`):
            Name of the float input.
        once (`bool`, *optional*, defaults to `False`):
            Occur only when the batch runs for the first time, like a hardware fault.
    """

    kind: str
    step: int = 2
    micro_step: int = 0
    rank: int | None = None
    value: float | None = NAN
    parameter: str | None = None
    field: str = "pixel_values"
    once: bool = False

    @property
    def number(self) -> float:
        """`value`, or NaN if that is `None`, which only a label fault can be."""
        return NAN if self.value is None else self.value


class _BadGradient(torch.autograd.Function):
    """Returns zero, and a gradient whose first entry is bad."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: float) -> Tensor:
        ctx.like, ctx.value = parameter, value
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        bad = torch.zeros_like(ctx.like)
        bad.view(-1)[0] = ctx.value
        return bad, None


def add_bad_gradient(loss: Tensor, parameter: Tensor, value: float = NAN) -> Tensor:
    """Returns a loss of the same value, by which the first entry of a parameter's gradient becomes bad: `value` is added to it."""
    return loss + _BadGradient.apply(parameter, value)


class PlantedFaults:
    """The faults that [`plant`] put into a trainer.

    Attributes:
        faults (`list[Fault]`):
            The faults of this rank.
        triggered (`list[Fault]`):
            The faults that have occurred. A test should check it, because a fault that never occurs proves nothing.
    """

    def __init__(self, trainer: Any, faults: tuple[Fault, ...]):
        self.trainer = trainer
        self.faults = [fault for fault in faults if fault.rank in (None, trainer.args.process_index)]
        self.triggered: list[Fault] = []
        self._places: dict[tuple[int, int], tuple[Tensor, int, int]] = {}
        self._compute_loss: Callable = trainer.compute_loss
        self._num_collated = 0
        self._collator = trainer.data_collator
        trainer.compute_loss = self.compute_loss
        if any(fault.kind in ("input", "label") for fault in self.faults):
            trainer.data_collator = self.collate

    @property
    def batches(self) -> dict[tuple[int, int], Tensor]:
        """The main input of every batch that the loss got, by step and micro-step."""
        return {(step, micro_step): main for main, step, micro_step in self._places.values()}

    def collate(self, examples: list) -> dict[str, Tensor]:
        """The trainer's collator, with the faults of inputs and labels."""
        batch = self._collator(examples)
        place = divmod(self._num_collated, self.trainer.args.gradient_accumulation_steps)
        self._num_collated += 1
        for fault in self.faults:
            if (fault.step, fault.micro_step) == place and fault.kind in ("input", "label"):
                self.triggered.append(fault)
                if fault.kind == "input":
                    batch[fault.field].view(-1)[0] = fault.value
                elif fault.value is None:
                    batch["labels"].fill_(-100)
                else:
                    batch["labels"][:, -1] = int(fault.value)
        return batch

    def place(self, inputs: dict) -> tuple[int, int]:
        """Returns step and micro-step of a batch, also when it runs again; (-1, -1) for a part of a batch."""
        main = next(inputs[key] for key in ID_FIELDS if key in inputs)
        guard = getattr(self.trainer, "nanguard", None)
        step = self.trainer.state.global_step
        key = (id(main), step)  # a policy is trained on a generation for several steps
        if key not in self._places and guard is not None and guard.replaying:
            return -1, -1  # an autopsy runs parts of a batch to find the samples to blame
        if key not in self._places:
            micro_step = sum(1 for _, when, _ in self._places.values() if when == step)
            self._places[key] = (main, step, micro_step)
        return self._places[key][1:]

    def compute_loss(self, model: nn.Module, inputs: dict, *args: object, **kwargs: object) -> Tensor | None:
        """The trainer's `compute_loss`, with the faults of this batch."""
        if not model.training:
            return self._compute_loss(model, inputs, *args, **kwargs)
        place = self.place(inputs)
        now = [fault for fault in self.faults if (fault.step, fault.micro_step) == place]
        now = [fault for fault in now if not (fault.once and fault in self.triggered)]
        self.triggered.extend(f for f in now if f not in self.triggered and f.kind not in ("input", "label"))
        for fault in now:
            if fault.kind == "weight":
                local(self._named(fault.parameter).data).view(-1)[0] = fault.number
            if fault.kind == "moment":
                local(self.trainer.optimizer.state[self._named(fault.parameter)]["exp_avg"]).view(-1)[0] = fault.number
            if fault.kind == "error":
                raise RuntimeError("planted error")
        loss = self._compute_loss(model, inputs, *args, **kwargs)
        for fault in now:
            if fault.kind == "missing":
                return None
            if fault.kind == "loss":
                loss = loss * fault.number
            if fault.kind == "constant":
                loss = loss + fault.number
            if fault.kind == "gradient" and fault.parameter is not None:
                loss = add_bad_gradient(loss, self._named(fault.parameter), fault.number)
            if fault.kind == "gradient" and fault.parameter is None:
                loss = loss * 1.0
                loss.register_hook(lambda gradient, value=fault.number: gradient * value)
        return loss

    def _named(self, name: str | None) -> Tensor:
        bare = self.trainer.accelerator.unwrap_model(self.trainer.model)
        return dict(bare.named_parameters())[name]


def plant(trainer: object, *faults: Fault) -> PlantedFaults:
    """Plants faults in a trainer; call it before `train()`.

    Args:
        trainer (`Trainer`):
            A trainer of transformers or TRL, stock or guarded.
        faults (`Fault`):
            The faults.

    Returns:
        [`PlantedFaults`]: Says which of them have occurred.

    Example:

    ```python
    planted = plant(trainer, Fault("loss", step=3, micro_step=1))
    trainer.train()
    assert len(planted.triggered) == 1
    ```
    """
    return PlantedFaults(trainer, faults)
