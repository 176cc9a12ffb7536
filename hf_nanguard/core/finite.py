"""Exact finite checks by one fused pass, results left on the device.

The largest magnitude of a tensor is NaN if it holds a NaN and inf if it holds an inf, and, unlike a 2-norm or a sum,
it cannot overflow in float16. So one foreach norm over a list separates finite, inf and NaN.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .torch_private import foreach_norm


def local(tensor: Tensor) -> Tensor:
    """Returns the part of `tensor` that lives on this rank (the shard of a DTensor, the values of a sparse one)."""
    if hasattr(tensor, "to_local"):  # a DTensor; the class itself costs an import of torch.distributed.tensor
        tensor = tensor.to_local()
    return tensor.coalesce().values() if tensor.is_sparse else tensor


@torch.no_grad()
def magnitudes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns for each tensor its largest magnitude on its device: NaN if it holds NaN, else inf if it holds inf."""
    parts = [local(tensor) for tensor in tensors]
    full = [part for part in parts if part.numel()]
    measured = iter(foreach_norm(full, math.inf))
    return [next(measured) if part.numel() else part.new_zeros(()) for part in parts]


def read_host(values: Sequence[Tensor]) -> list[float]:
    """Brings scalars to the host as Python floats in a single read (one per device they live on)."""
    if not values:
        return []
    home = values[0].device
    wide = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
    with torch.no_grad():
        scalars = [value.to(home, wide) for value in values]
        return torch.stack([value.reshape(()) if value.ndim else value for value in scalars]).tolist()


def find_nonfinite(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Names the tensors that hold a non-finite value.

    Args:
        named (`Iterable[tuple[str, Tensor]]`):
            Names and tensors; only the part of each on this rank is looked at.

    Returns:
        `dict[str, str]`: name to `"nan"` (any NaN inside) or `"inf"`, in the given order; empty if all are finite.
    """
    pairs = [(name, tensor) for name, tensor in named if tensor.is_floating_point() or tensor.is_complex()]
    largest = read_host(magnitudes([tensor for _, tensor in pairs]))
    return {
        name: "nan" if math.isnan(value) else "inf"
        for (name, _), value in zip(pairs, largest, strict=True)
        if not math.isfinite(value)
    }
