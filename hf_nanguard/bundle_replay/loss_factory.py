"""Losses that no trainer computes: those of a user's own factory, and the one that a model computes itself."""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module

import torch
from torch import Tensor, nn

from ..core.autopsy.bundle.reader import Bundle
from ..core.autopsy.evidence.suspect_batch import name_tensors
from ..errors import ArgumentError

LossFunction = Callable[[nn.Module, object], Tensor]


def call_factory(name: str, bundle: Bundle) -> tuple[nn.Module, LossFunction | None]:
    """Calls the user's own function, imported from the current folder, and returns the model and perhaps the loss."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name.isidentifier():
        raise ArgumentError(f"--factory must be module:function, for example my_model:build, got {name!r}.")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(
            f"--factory must be a function that can be imported from {here}, got {name!r} ({error})."
        ) from error
    made = function(bundle)
    model, loss_fn = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or not (loss_fn is None or callable(loss_fn)):
        raise ArgumentError(
            f"--factory must return a model or (model, loss_fn), {name} returned {type(made).__name__}. "
            "loss_fn(model, inputs) returns the loss."
        )
    return model, loss_fn


def read_calls(inputs: object) -> list[tuple[list, dict]]:
    """Returns the arguments and keyword arguments of the recorded calls of a model's forward."""
    calls = []
    for call in inputs if isinstance(inputs, list) and inputs else [inputs]:
        args, kwargs = (call.get("args"), call.get("kwargs")) if isinstance(call, dict) else (None, None)
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise ArgumentError("The bundle's inputs must be calls of the model's forward, got something else.")
        calls.append((args, kwargs))
    return calls


def make_model_loss(inputs: object, mixed_precision: str | None, device: torch.device) -> LossFunction:
    """Returns the loss that a model computes itself in the recorded calls of its forward, under the same autocast.

    A model that returns no loss is given the mean of its first differentiable output, without masked logits: this reaches
    every operator of forward and backward, but not with the gradients of the trainer's loss. Other inputs than calls of a
    model's forward raise an [`ArgumentError`].
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision or "no")
    read_calls(inputs)

    def loss_fn(model: nn.Module, inputs: object) -> Tensor:
        losses = []
        for args, kwargs in read_calls(inputs):
            with torch.autocast(device.type, dtype) if dtype is not None else nullcontext():
                output = model(*args, **kwargs)
            loss = output.get("loss") if isinstance(output, Mapping) else None
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                first = next(tensor for tensor in name_tensors(output).values() if tensor.requires_grad)
                loss = torch.where(first == float("-inf"), 0.0, first)
            losses.append(loss.float().mean())
        return torch.stack(losses).sum()

    return loss_fn
