"""Alters the model for the duration of a replay: other weights, or another precision of the model or of one module."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ...finite import dtype_name
from ...rerun.nested_inputs import map_tensors
from ...rerun.runner import Runner
from ...torch_private import copy_hooks, list_tensor_slots
from ..evidence.suspect_batch import SuspectBatch

LOW_PRECISION = (torch.float16, torch.bfloat16)


@contextmanager
def swapped(runner: Runner, model: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replaces parameters and buffers with changed copies, a tied one with one copy, and puts the very same tensors back.

    No tensor of the model is written. Assigning `.data` would be simpler, but makes torch forget the gradient accumulators
    that DDP has hooked; so the modules' tables are changed.
    """
    places = list_tensor_slots(model)
    before = [table[key] for table, key in places]
    changed: dict[int, Tensor] = {}

    def exchange(tensor: Tensor) -> Tensor:
        if id(tensor) not in changed:
            changed[id(tensor)] = _replace(tensor, change)
        return changed[id(tensor)]

    with runner.buffers.suspended():  # a replay would put the old ones back
        try:
            for (table, key), value in zip(places, before, strict=True):
                table[key] = map_tensors(value, exchange)
            yield
        finally:
            for (table, key), value in zip(places, before, strict=True):
                table[key] = value


def _replace(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        value = change(tensor)
    if value is tensor or not isinstance(tensor, nn.Parameter):
        return value
    parameter = nn.Parameter(value, tensor.requires_grad)
    copy_hooks(tensor, parameter)
    return parameter


def zeros_in(target: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a change that replaces the non-finite entries of one tensor with zero."""
    return lambda tensor: tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) if tensor is target else tensor


@contextmanager
def in_precision(
    suspect: SuspectBatch, narrow: tuple[torch.dtype, ...], wide: torch.dtype, remarks: list[str]
) -> Iterator[None]:
    """Runs in `wide` whatever is in one of the `narrow` dtypes: weights, buffers, inputs and autocast."""
    cast = lambda tensor: tensor.to(wide) if tensor.dtype in narrow else tensor  # noqa: E731
    devices = {"cpu", suspect.runner.device_type}
    with (
        swapped(suspect.runner, suspect.runner.model, cast),
        suspect.changed_inputs(cast),
        autocast_as(narrow, wide, devices, remarks),
    ):
        yield


@contextmanager
def autocast_as(
    narrow: tuple[torch.dtype, ...], wide: torch.dtype, devices: set[str], remarks: list[str]
) -> Iterator[None]:
    """Makes every autocast that is entered inside, and those that are active already, cast to `wide` instead."""
    original = torch.autocast.__enter__

    def enter(self: torch.autocast) -> object:
        enabled, dtype = self._enabled, self.fast_dtype
        if enabled and dtype in narrow:
            remarks.append("autocast off" if wide is torch.float32 else f"autocast to {dtype_name(wide)}")
            self._enabled, self.fast_dtype = wide is not torch.float32, dtype if wide is torch.float32 else wide
        try:
            return original(self)
        finally:  # instances are entered repeatedly: accelerate keeps one for the whole run
            self._enabled, self.fast_dtype = enabled, dtype

    torch.clear_autocast_cache()
    try:
        with patch.object(torch.autocast, "__enter__", enter), ExitStack() as ambient:
            for device in devices:
                if torch.is_autocast_enabled(device):
                    ambient.enter_context(torch.autocast(device, torch.get_autocast_dtype(device)))
            yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def upcast_module(suspect: SuspectBatch, module: nn.Module, narrow: torch.dtype, remarks: list[str]) -> Iterator[None]:
    """Computes one module in float32 and casts its output back."""
    cast = lambda tensor: tensor.float() if tensor.dtype in LOW_PRECISION else tensor  # noqa: E731
    original = module.forward
    device = suspect.runner.device_type

    def narrowed(tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        result = tensor.to(narrow)
        spilled = tensor.detach()[~result.isfinite() & tensor.isfinite()]
        if spilled.numel():
            remarks.append(f"its output overflows, it reaches {spilled.abs().max():.3g}")
        return result

    @functools.wraps(original)
    def forward(*args: object, **kwargs: object) -> object:
        with torch.autocast(device, enabled=False):
            output = original(*map_tensors(args, cast), **map_tensors(kwargs, cast))
        return map_tensors(output, narrowed)

    with swapped(suspect.runner, module, cast), patch.object(module, "forward", forward):
        yield
