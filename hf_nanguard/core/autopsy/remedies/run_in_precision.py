"""Runs a replay in another precision: the whole model or one module, with every autocast adapted."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ...finite import dtype_name
from ...rerun.nested_inputs import map_tensors
from ..evidence.suspect_batch import SuspectBatch
from .tensor_swap import swapped

LOW_PRECISION = (torch.float16, torch.bfloat16)


@contextmanager
def in_precision(
    suspect: SuspectBatch, narrow: tuple[torch.dtype, ...], wide: torch.dtype, remarks: list[str]
) -> Iterator[None]:
    """Runs in `wide` whatever is in one of the `narrow` dtypes: weights, buffers, inputs and autocast."""
    cast = lambda tensor: tensor.to(wide) if tensor.dtype in narrow else tensor  # noqa: E731
    devices = {"cpu", suspect.runner.device_type}
    with (
        swapped(suspect, suspect.runner.model, cast),
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

    with swapped(suspect, module, cast), patch.object(module, "forward", forward):
        yield
