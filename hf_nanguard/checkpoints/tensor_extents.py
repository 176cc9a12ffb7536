"""Measures the smallest and the largest entry of many tensors on several threads; torch releases the interpreter meanwhile."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from .tensor_check import measure

PART = 2**24  # entries that a thread checks at a time: of a large tensor, or of several small ones

Extent = tuple[float, float]
Progress = Callable[[int], None]  # called with a number of bytes that were checked


def build_pool() -> ThreadPoolExecutor:
    """Returns as many threads as there are cores, or one if torch has threads of its own, which wait for each other."""
    return ThreadPoolExecutor(1 if torch.get_num_threads() > 1 else os.cpu_count() or 1)


def measure_all(tensors: Mapping[str, Tensor], pool: ThreadPoolExecutor, progress: Progress) -> dict[str, Extent]:
    """Returns the smallest and the largest entry of each tensor; NaN if any entry is."""
    batches = list(_make_batches((name, part) for name, tensor in tensors.items() for part in _split(tensor)))
    extents: dict[str, Extent] = {}
    for batch, found in zip(batches, pool.map(_measure_batch, batches), strict=True):
        for (name, _), extent in zip(batch, found, strict=True):
            extents[name] = _join(extents.get(name, extent), extent)
        progress(sum(part.nbytes for _, part in batch))
    return extents


def _split(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.reshape(-1).split(PART) if tensor.numel() > PART and tensor.is_contiguous() else (tensor,)


def _make_batches(parts: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields tensors in groups that are worth a task of a thread."""
    batch: list[tuple[str, Tensor]] = []
    size = 0
    for name, part in parts:
        batch.append((name, part))
        size += part.numel()
        if size >= PART:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _measure_batch(batch: list[tuple[str, Tensor]]) -> list[Extent]:
    return [measure(part) for _, part in batch]


def _join(one: Extent, other: Extent) -> Extent:
    """Returns the extent of both; `min` and `max` of Python would lose a NaN."""
    is_nan = math.isnan(one[0]) or math.isnan(other[0])
    return (math.nan, math.nan) if is_nan else (min(one[0], other[0]), max(one[1], other[1]))
