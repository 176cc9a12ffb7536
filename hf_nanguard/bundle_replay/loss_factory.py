"""Losses that no trainer computes: those of a user's own factory, and the one that a model computes by itself."""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ..core.autopsy.bundle.reader import Bundle
from ..errors import ArgumentError
from ..hf.callbacks.forward_replay import find_loss, stand_in_loss

LossFunction = Callable[[nn.Module, Any], Tensor]


def call_factory(name: str, bundle: Bundle) -> tuple[nn.Module, LossFunction | None]:
    """Calls the user's own function, found from the current folder, and returns the model and perhaps the loss."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name.isidentifier():
        raise ArgumentError(f"--factory must be module:function, got {name!r}. For example my_model:build.")
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


def own_loss_of_model(facts: dict[str, Any], device: torch.device) -> LossFunction:
    """Returns the loss that a model computes by itself from the calls of its forward, under the same autocast."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(facts.get("mixed_precision")))

    def loss_fn(model: nn.Module, inputs: Any) -> Tensor:
        losses = []
        for call in inputs if isinstance(inputs, list) else [inputs]:
            with torch.autocast(device.type, dtype) if dtype is not None else nullcontext():
                output = model(*call["args"], **call["kwargs"])
            loss = find_loss(output)
            losses.append((stand_in_loss(output) if loss is None else loss).float())
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    return loss_fn


def check_calls(inputs: Any) -> None:
    """Refuses inputs that are not calls of a model's forward."""
    calls = inputs if isinstance(inputs, list) and inputs else [inputs]
    for call in calls:
        known = isinstance(call, dict) and isinstance(call.get("args"), list) and isinstance(call.get("kwargs"), dict)
        if not known:
            raise ArgumentError("The bundle's inputs must be calls of the model's forward, got something else.")
