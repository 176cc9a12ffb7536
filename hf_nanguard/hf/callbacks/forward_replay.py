"""How a callback runs a bad step again: by the calls of the model's forward that were caught on the way."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.rerun.micro_batch import AccumulationGroup, MicroBatch
from ...core.rerun.nested_inputs import find_tensors
from ...core.rerun.runner import Runner
from ..trainer.isolation import untouched_modules
from ..trainer.trainer_runner import decode_sample
from .gradient_tap import Call, GradientTap, as_scalar


class CallbackRunner(Runner):
    """A runner that can look, clear, and run the model's forward again, but not the trainer's loss: a callback does not
    know that.

    Args:
        model (`nn.Module`):
            The bare model.
        tap (`GradientTap`):
            Measures its gradients and catches the calls of its forward.
        processing_class (`Any`, *optional*):
            The tokenizer, to show the text of a sample.
    """

    knows_loss = False

    def __init__(self, model: nn.Module, tap: GradientTap, processing_class: Any = None):
        super().__init__(model)
        self.tap = tap
        self.processing_class = processing_class
        self.probing = False

    def why_not(self, group: AccumulationGroup) -> str | None:
        return "a callback cannot run the trainer's loss again"

    def why_no_autopsy(self, group: AccumulationGroup) -> str | None:
        if self.lockstep:
            return "parameters are sharded"
        return None if all(micro.payload for micro in group.micro_batches) else "no forward of the model was caught"

    def measure(self) -> Tensor:
        assert self.tap.norm is not None
        return self.tap.norm

    def named_gradients(self) -> list[tuple[str, Tensor]]:
        return super().named_gradients() if self.probing else self.tap.named_magnitudes()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Surrounds a decision: afterwards the tap speaks for the gradients again."""
        try:
            yield
        finally:
            self.probing = False

    def probe(self, micro: MicroBatch, weight: Any) -> Tensor:
        self.probing = True
        return super().probe(micro, weight)

    def isolated(self) -> AbstractContextManager:
        return untouched_modules(self.model)

    def run(self, micro: MicroBatch, weight: Any) -> Tensor:
        losses = []
        for call in micro.payload:
            call.rng.restore()
            with unobserved(self.model):
                output = self.model(*call.args, **call.kwargs)
            loss = find_loss(output)
            losses.append(stand_in_loss(output) if loss is None else loss)
        total = torch.stack([loss.reshape(()) for loss in losses]).sum() if len(losses) > 1 else losses[0]
        total.backward()
        return total.detach()

    def forward(self, micro: MicroBatch) -> None:
        raise NotImplementedError

    def regroup(self, good: list[MicroBatch], num_good: list[int]) -> Any:
        raise NotImplementedError

    def unscale(self) -> None:
        raise NotImplementedError

    # ---- what an autopsy asks ----

    def inputs_of(self, micro: MicroBatch) -> Any:
        calls = [{"args": list(call.args), "kwargs": dict(call.kwargs)} for call in micro.payload]
        return calls[0] if len(calls) == 1 else calls

    def with_inputs(self, micro: MicroBatch, inputs: Any) -> tuple[Call, ...]:
        many = inputs if isinstance(inputs, list) else [inputs]
        return tuple(
            replace(call, args=tuple(new["args"]), kwargs=new["kwargs"])
            for call, new in zip(micro.payload, many, strict=True)
        )

    def decode(self, micro: MicroBatch, sample: int) -> str | None:
        return decode_sample(self.processing_class, micro.payload[0].kwargs, sample)

    def facts(self, weight: Any) -> dict[str, Any]:
        from ..trainer.trainer_facts import describe_model

        return {"kind": "callback", **describe_model(self.model)}


@contextmanager
def unobserved(model: nn.Module) -> Iterator[None]:
    """Runs the model without the hooks on it, so that no other callback takes a replay for training."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    before = {name: getattr(model, name) for name in names}
    for name in names:
        setattr(model, name, OrderedDict())
    try:
        yield
    finally:
        for name, hooks in before.items():
            setattr(model, name, hooks)


def share_out(calls: list[Call], size: int) -> list[tuple[Call, ...]]:
    """Returns the calls of each micro-batch; a loss may call the model several times, each time as often."""
    each, rest = divmod(len(calls), size)
    if rest:
        return [()] * size
    return [tuple(calls[i * each : (i + 1) * each]) for i in range(size)]


def find_loss(output: Any) -> Tensor | None:
    """Returns the loss a model computed by itself, `None` if it left that to the trainer."""
    loss = output.get("loss") if isinstance(output, Mapping) else None
    return as_scalar(loss) if isinstance(loss, Tensor) and loss.requires_grad else None


def stand_in_loss(output: Any) -> Tensor:
    """Returns the mean of the first differentiable output, masked logits left out: it reaches every operator of the
    forward and of its backward, though not with the gradients of the trainer's loss."""
    first = next(tensor for tensor in find_tensors(output) if tensor.requires_grad)
    return torch.where(first == float("-inf"), 0.0, first).float().mean()
