"""Finds the tensors that may be bad, and their smallest and largest entries, on several threads; torch releases the interpreter.

One number for a tensor often proves that it has no NaN, no inf, no absurd number and is not all zero, in three quarters of the
time of `aminmax` or less. Only tensors of which it proves nothing are measured exactly.

- float32: the 2-norm, if it is finite, below what is absurd and not zero.
- bfloat16: the 2-norm of the sums of short rows, in the same way, because torch's norm has to compute more than the memory delivers.
  NaN and inf are in every sum. Absurd numbers of both signs may cancel each other, but only if they add up to nearly zero in each
  row: the steps between two absurd numbers are larger than the bound.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from .tensor_check import HUGE, measure

QUICK = (torch.float32, torch.bfloat16)  # their norms and sums are faster than aminmax
PROVEN = HUGE / 2  # half, because a norm is rounded
PROVEN_SUMS = 1e6  # two numbers above HUGE that are not equal are 6e7 apart in bfloat16
PART = 2**24  # entries that a thread checks at a time: of a large tensor, or of several small ones
ROW = 4096  # entries of bfloat16 whose sum is taken on its own

T = TypeVar("T")
Extent = tuple[float, float]
Batch = list[tuple[str, Tensor]]
Progress = Callable[[int], None]  # called from any thread with a number of bytes that were checked


def count_helpers() -> int:
    """Returns how many threads work beside the caller, who works as well because a thread that only waits is woken up for every
    result: one for each further core, none if torch has threads of its own, which wait for each other."""
    return 0 if torch.get_num_threads() > 1 else (os.cpu_count() or 1) - 1


def build_pool() -> ThreadPoolExecutor:
    """Returns the threads that help; they start when they are needed."""
    return ThreadPoolExecutor(max(count_helpers(), 1))


def find_extents(
    tensors: Mapping[str, Tensor], pool: ThreadPoolExecutor, progress: Progress, is_exact: bool
) -> dict[str, Extent]:
    """Returns the smallest and the largest entry of each tensor that may be bad, or of all tensors if it must be exact.

    Both are NaN if any entry is.
    """
    if not is_exact:
        proven = _map_parts(_is_proven, tensors, pool, progress)
        tensors, progress = {name: tensors[name] for name, is_good in proven if not is_good}, lambda num_bytes: None
    extents: dict[str, Extent] = {}
    for name, extent in _map_parts(measure, tensors, pool, progress):
        extents[name] = _join(extents.get(name, extent), extent)
    return extents


def _is_proven(part: Tensor) -> bool:
    """Returns whether one number proves that a part is good."""
    if part.dtype not in QUICK:
        return False
    whole = part.numel() // ROW * ROW
    if part.dtype is not torch.bfloat16 or not whole or not part.is_contiguous():
        return 0.0 < float(torch.linalg.vector_norm(part)) < PROVEN
    flat = part.view(-1)
    sums = flat[:whole].view(-1, ROW).sum(1)
    return 0.0 < float(torch.linalg.vector_norm(torch.cat([sums, flat[whole:]]))) < PROVEN_SUMS


def _map_parts(
    function: Callable[[Tensor], T], tensors: Mapping[str, Tensor], pool: ThreadPoolExecutor, progress: Progress
) -> Iterator[tuple[str, T]]:
    """Yields what a function returns for each part of each tensor, in order, with the name of the tensor."""
    batches = list(_make_batches((name, part) for name, tensor in tensors.items() for part in _split(tensor)))
    results: list[list[T]] = [[] for _ in batches]
    todo = iter(range(len(batches)))  # shared by the threads: each number is given to one of them

    def work() -> None:
        for number in todo:
            results[number] = [function(part) for _, part in batches[number]]
            progress(sum(part.nbytes for _, part in batches[number]))

    helpers = [pool.submit(work) for _ in batches[1 : count_helpers() + 1]]
    try:
        work()
        for helper in helpers:
            helper.result()
    finally:
        deque(todo, maxlen=0)  # after an error or an interrupt, the others need not go on
    for batch, found in zip(batches, results, strict=True):
        yield from zip((name for name, _ in batch), found, strict=True)


def _split(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.reshape(-1).split(PART) if tensor.numel() > PART and tensor.is_contiguous() else (tensor,)


def _make_batches(parts: Iterable[tuple[str, Tensor]]) -> Iterator[Batch]:
    """Yields tensors in groups that are worth a task of a thread."""
    batch: Batch = []
    size = 0
    for name, part in parts:
        batch.append((name, part))
        size += part.numel()
        if size >= PART:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _join(one: Extent, other: Extent) -> Extent:
    """Returns the extent of both; `min` and `max` of Python would lose a NaN."""
    is_nan = math.isnan(one[0]) or math.isnan(other[0])
    return (math.nan, math.nan) if is_nan else (min(one[0], other[0]), max(one[1], other[1]))
