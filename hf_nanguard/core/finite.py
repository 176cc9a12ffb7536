"""Exact finite checks by one fused kernel; results stay on the device.

The largest magnitude of a tensor is NaN if it contains NaN, else inf if it contains inf. Unlike a 2-norm or a sum, it cannot
overflow in float16. So one foreach norm over a list tells finite tensors, inf and NaN apart.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .torch_private import foreach_norm

SHOWN_ROWS = 8


def local(tensor: Tensor) -> Tensor:
    """Returns the part of `tensor` on this rank (the shard of a DTensor, the values of a sparse tensor)."""
    tensor = shard_of(tensor)
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def shard_of(tensor: Tensor) -> Tensor:
    """Returns the shard of a DTensor on this rank, any other tensor as it is; writing to it writes the tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether `tensor` is a DTensor, whose class costs an import of torch.distributed.tensor."""
    return hasattr(tensor, "to_local")


@torch.no_grad()
def magnitudes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the largest magnitude of each tensor, on its device: NaN if it contains NaN, else inf if it contains inf."""
    parts = [local(tensor) for tensor in tensors]
    nonempty = [part for part in parts if part.numel()]
    measured = iter(foreach_norm(nonempty, math.inf))
    return [next(measured) if part.numel() else part.new_zeros(()) for part in parts]


def read_host(values: Sequence[Tensor]) -> list[float]:
    """Returns scalars as Python floats with a single host read, by stacking them on the device of the first."""
    if not values:
        return []
    device = values[0].device
    wide = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
    with torch.no_grad():
        scalars = [value.to(device, wide) for value in values]
        return torch.stack([value.reshape(()) if value.ndim else value for value in scalars]).tolist()


def total_norm(tensors: Sequence[Tensor]) -> float:
    """Returns the 2-norm of finite tensors, of the part on this rank, scaled so that no square overflows; two host reads."""
    largest = max(read_host(magnitudes(tensors)), default=0.0) or 1.0
    parts = [local(tensor) / largest for tensor in tensors]
    return largest * math.hypot(*read_host([torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]))


def find_nonfinite(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Returns the kind, `"nan"` (any NaN inside) or `"inf"`, of each non-finite tensor, in the given order.

    Of each tensor only the part on this rank is checked.
    """
    pairs = [(name, tensor) for name, tensor in named if tensor.is_floating_point() or tensor.is_complex()]
    largest = read_host(magnitudes([tensor for _, tensor in pairs]))
    return {
        name: "nan" if math.isnan(value) else "inf"
        for (name, _), value in zip(pairs, largest, strict=True)
        if not math.isfinite(value)
    }


def find_rows(bad: Tensor) -> tuple[int, ...]:
    """Returns the first `SHOWN_ROWS` rows with a true entry."""
    rows = (bad if bad.ndim < 2 else bad.flatten(1).any(1)).reshape(-1).nonzero().flatten()
    return tuple(rows[:SHOWN_ROWS].tolist())


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")
