"""Other tensors for the duration of a replay: changed copies of weights and inputs in the place of the model's own.

Nothing of the model is written. A new `.data` would do as well, but makes torch forget the gradient accumulators that DDP
has hooked; so the modules' tables are changed, and the very same tensors are put back.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...rerun.nested_inputs import map_tensors
from ..evidence.suspect_batch import SuspectBatch


@contextmanager
def swapped(suspect: SuspectBatch, model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Puts changed copies in the place of parameters and buffers, tied ones as one, and the very same tensors back."""
    runner, kept = suspect.runner, suspect.runner.buffers.kept
    modules = list(model.modules())
    places: list[tuple[dict, str]] = [
        (table, key) for module in modules for table in (module._parameters, module._buffers) for key in table
    ]
    # Recurrent layers hold their parameters a second time.
    places += [(m.__dict__, "_flat_weights") for m in modules if isinstance(m, nn.RNNBase)]
    before = [table[key] for table, key in places]
    changed: dict[int, Tensor] = {}

    def exchange(tensor: Tensor) -> Tensor:
        if id(tensor) not in changed:
            changed[id(tensor)] = _replace(tensor, change)
        return changed[id(tensor)]

    try:
        runner.buffers.kept = []  # a replay would put the old ones back
        for (table, key), value in zip(places, before, strict=True):
            table[key] = map_tensors(value, exchange)
        yield
    finally:
        for (table, key), value in zip(places, before, strict=True):
            table[key] = value
        runner.buffers.kept = kept


def _replace(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        value = change(tensor)
    if value is tensor or not isinstance(tensor, nn.Parameter):
        return value
    parameter = nn.Parameter(value, tensor.requires_grad)
    if tensor._backward_hooks:
        parameter._backward_hooks = tensor._backward_hooks
    return parameter


@contextmanager
def given(suspect: SuspectBatch, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Changes the float tensors among the inputs."""
    micro, runner = suspect.micro, suspect.runner
    inputs = map_tensors(runner.inputs_of(micro), lambda t: change(t) if t.is_floating_point() else t)
    suspect.micro = replace(micro, payload=runner.with_inputs(micro, inputs))
    try:
        yield
    finally:
        suspect.micro = micro


def _as_zero(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def fill_input(suspect: SuspectBatch, field: Tensor) -> AbstractContextManager:
    """Takes the bad entries of one input as zero."""
    return given(suspect, lambda tensor: _as_zero(tensor) if tensor is field else tensor)


def name_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def fill_weight(suspect: SuspectBatch, name: str) -> AbstractContextManager:
    """Takes the bad entries of one parameter or buffer as zero."""
    named = name_weights(suspect.model)
    return swapped(suspect, suspect.model, lambda tensor: _as_zero(tensor) if tensor is named[name] else tensor)
