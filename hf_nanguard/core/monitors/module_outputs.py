"""What modules put out, measured on the device: extremes, RMS, zeros, and how much comes near the dtype's limit.

Three reductions an output: `aminmax` for the largest magnitude (exact in every dtype, NaN and inf survive, the sign of an inf
is told), a 2-norm in float32 for the RMS, and a count of non-zeros. A 0-norm in float32 would be one more norm, but on
the CPU it stops counting at 2**24. The share near the limit takes two more operations, so it is measured on request. All
of it stays on the device until it is put together in one table.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..finite import local
from ..rerun.nested_inputs import find_tensors
from ..vocabulary import Cause

NEAR_BITS = 4  # near the limit: within a factor of 16
DTYPES = {
    torch.float16: Cause.FP16_OVERFLOW,
    torch.bfloat16: Cause.BF16_OVERFLOW,
    torch.float32: None,
    torch.float64: None,
}
NAMES = {torch.finfo(dtype).max: str(dtype).removeprefix("torch.") for dtype in DTYPES}
CAUSES = {torch.finfo(dtype).max: cause for dtype, cause in DTYPES.items()}
COLUMNS = 7  # minus lowest, highest, whether NaN, RMS, share of zeros, share near the limit, minus the dtype's limit


def find_tensor(output: Any) -> Tensor | None:
    """Returns the first float tensor with a dimension in what a module returned; `None` if there is none."""
    return next((part for tensor in find_tensors(output) if _has_kernels(part := local(tensor))), None)


def _has_kernels(part: Tensor) -> bool:
    dense = part.layout is torch.strided and not part.is_nested and not part.is_meta
    return bool(dense and part.dtype in DTYPES and part.ndim and part.numel())


@dataclass(frozen=True)
class Activation:
    """What was seen of one module at one step: over its forwards and all ranks, the largest of each.

    Args:
        lowest, highest (`float`):
            The extremes.
        has_nan (`bool`):
            Whether there was a NaN.
        rms (`float`):
            Root of the mean square.
        zeros (`float`):
            Share of exact zeros.
        near_limit (`float`, *optional*):
            Share within a factor of 16 of the dtype's limit; `None` if it was not measured.
        limit (`float`):
            That limit.
    """

    lowest: float
    highest: float
    has_nan: bool
    rms: float
    zeros: float
    near_limit: float | None
    limit: float

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return math.nan if self.has_nan else max(-self.lowest, self.highest)

    @property
    def is_masked(self) -> bool:
        """Whether -inf, or the lowest number of the dtype, is all that stands out: that is how masks are written."""
        return not self.has_nan and self.lowest <= -self.limit and self.highest < self.limit

    @property
    def is_finite(self) -> bool:
        """Whether all was finite."""
        return math.isfinite(self.largest)


@dataclass(frozen=True)
class OutputMeasure:
    """One output, measured on its device."""

    index: int
    numel: int
    dtype: torch.dtype
    lowest: Tensor
    highest: Tensor
    norm: Tensor
    nonzeros: Tensor
    near: Tensor | None


@torch.no_grad()
def measure(index: int, tensor: Tensor, near: bool) -> OutputMeasure:
    lowest, highest = torch.aminmax(tensor)
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32  # a 2-norm of float16 overflows
    norm = torch.linalg.vector_norm(tensor, 2, dtype=wide)
    edge = torch.finfo(tensor.dtype).max * 2.0**-NEAR_BITS
    large = torch.count_nonzero(nn.functional.hardshrink(tensor, edge)) if near else None
    return OutputMeasure(
        index, tensor.numel(), tensor.dtype, lowest, highest, norm, torch.count_nonzero(tensor), large
    )  # fmt: skip


@torch.no_grad()
def tabulate(measures: Sequence[OutputMeasure], num_modules: int, device: torch.device) -> Tensor:
    """Returns one row of `COLUMNS` per module, on the device: the largest of its measures, -inf without any."""
    wide = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    rows = [torch.full((1, COLUMNS), -math.inf, dtype=wide, device=device)]
    places: list[list[int]] = [[] for _ in range(num_modules)]
    groups: dict[tuple[torch.dtype, torch.device], list[OutputMeasure]] = {}
    for measured in measures:
        groups.setdefault((measured.dtype, measured.lowest.device), []).append(measured)
    num_rows = 1
    for (dtype, _), group in groups.items():
        lowest, highest, norms, nonzeros = (
            torch.stack(column).to(device, wide)
            for column in zip(
                *((measured.lowest, measured.highest, measured.norm, measured.nonzeros) for measured in group),
                strict=True,
            )
        )
        sizes = torch.tensor([measured.numel for measured in group], dtype=wide, device=device)
        near = torch.full_like(sizes, -1.0)
        counted = [(place, measured.near) for place, measured in enumerate(group) if measured.near is not None]
        if counted:
            where = torch.tensor([place for place, _ in counted], device=device)
            near[where] = torch.stack([count for _, count in counted]).to(device, wide) / sizes[where]
        limits = torch.full_like(sizes, -torch.finfo(dtype).max)
        has_nan = torch.isnan(highest).to(wide)
        columns = (-lowest, highest, has_nan, norms / sizes.sqrt(), 1 - nonzeros / sizes, near, limits)
        # A reduction over ranks may lose a NaN, so it travels as a flag.
        rows.append(torch.stack(columns, 1).nan_to_num(math.inf, math.inf, -math.inf))
        for measured in group:
            places[measured.index].append(num_rows)
            num_rows += 1
    depth = max(1, *map(len, places))
    table = torch.tensor([place + [0] * (depth - len(place)) for place in places], device=device)
    return torch.cat(rows)[table].amax(1)
