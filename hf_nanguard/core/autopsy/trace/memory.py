"""Knows which operator wrote the non-finite values in a piece of memory.

Values are followed by storage, because views write nothing. Of a storage only its address and the span of each non-finite
write are kept, never the memory itself; a finite write over the whole span of a non-finite one removes it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...finite import local
from ...torch_private import inner_tensors, is_zero_tensor, sparse_values, storage_address
from .op_record import FINITE, Extent, Record

SHOWN_POSITIONS = 64


def measure(tensor: Tensor) -> Extent:
    """Returns the exact extent of a tensor; integers and empty tensors are finite."""
    part = strided(tensor)
    if part is None or not is_float(part) or part.numel() == 0 or part.device.type == "meta":
        return FINITE
    low, high = torch.aminmax(torch.view_as_real(part.detach().resolve_conj()) if part.is_complex() else _wide(part))
    return Extent(low.item(), high.item())


def strided(tensor: Tensor) -> Tensor | None:
    """Returns the plain tensor that holds the values of `tensor` on this rank, `None` if there is none."""
    kind = type(tensor)
    if tensor.layout is torch.strided and (kind is Tensor or kind is nn.Parameter) and not tensor.is_nested:
        return None if is_zero_tensor(tensor) else tensor
    if tensor.is_sparse:
        return sparse_values(tensor)
    if tensor.is_nested or tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        tensor = tensor.values()
    tensor = local(tensor)
    if inner := inner_tensors(tensor):  # its values are in tensors that it holds
        return next((part for held in inner.values() if is_float(held) and (part := strided(held)) is not None), None)
    return tensor if tensor.layout is torch.strided else None


def is_float(tensor: Tensor) -> bool:
    """Whether a tensor can hold NaN."""
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> Tensor:
    """Returns 8-bit floats in float32, because they cannot be compared."""
    tensor = tensor.detach()
    return tensor.float() if tensor.element_size() == 1 else tensor


def find_nonfinite_entries(tensor: Tensor) -> Tensor:
    """Returns where a plain tensor is not finite."""
    return ~torch.isfinite(_wide(tensor))


def storage_key(tensor: Tensor) -> int:
    """Returns a number that identifies the storage of a tensor as long as it is alive; 0 if it has none."""
    part = strided(tensor)
    return 0 if part is None else storage_address(part)


def span_of(part: Tensor) -> tuple[int, int]:
    """Returns the first byte of a plain tensor in its storage, and the one after its last."""
    size = part.element_size()
    start = int(part.storage_offset()) * size
    if part.is_contiguous():
        return start, start + max(part.numel(), 1) * size
    reach = sum((n - 1) * s for n, s in zip(part.shape, part.stride(), strict=True)) if part.numel() else 0
    return start, start + (reach + 1) * size


class _Write(NamedTuple):
    record: Record
    start: int
    end: int
    storage: StorageWeakRef  # holds the address, not the memory


class Memory:
    """All non-finite writes that may still be read."""

    def __init__(self) -> None:
        self.writes: dict[int, list[_Write]] = {}
        self.patched: set[int] = set()

    def remember(self, output: Tensor, key: int, record: Record) -> None:
        """Notes that `record` wrote `output`, whose storage has this key."""
        self.forget(output, key)
        if (part := strided(output)) is not None:
            write = _Write(record, *span_of(part), StorageWeakRef(part.untyped_storage()))
            self.writes.setdefault(key, []).append(write)

    def forget(self, output: Tensor, key: int) -> None:
        """Removes what was known of memory that has been overwritten."""
        known = self.writes.get(key)
        part = strided(output)
        if known is None or part is None:
            return
        start, end = span_of(part)
        if part.numel() * part.element_size() < end - start:  # with gaps, which keep their old values
            self.patched.add(key)
            return
        kept = [write for write in known if write.start < start or end < write.end]
        if kept:
            self.writes[key] = kept
            self.patched.add(key)
        else:
            del self.writes[key]
            self.patched.discard(key)

    def find_writer(self, tensor: Tensor, extent: Extent) -> Record | None:
        """Returns the last writer of non-finite values of this kind in `tensor`; uninitialised memory only if there is no other."""
        part = strided(tensor)
        if part is None:
            return None
        start, end = span_of(part)
        found = [
            write.record
            for write in reversed(self.writes.get(storage_key(part), []))
            if write.start < end and start < write.end
        ]
        judged = [record for record in found if not record.uninitialised]
        same = [record for record in judged if record.extent.kind == extent.kind]
        return next(iter(same or judged or found), None)

    def extent_of(self, tensor: Tensor) -> Extent:
        """Returns the extent of an input, from the record if it is still exactly what one operator has written."""
        key = storage_key(tensor)
        writes = self.writes.get(key, ())
        part = strided(tensor)
        if len(writes) != 1 or part is None or key in self.patched:
            return measure(tensor)
        record, start, end, _ = writes[0]
        same = (
            tensor.dtype == record.dtype and span_of(part) == (start, end) and part.numel() == math.prod(record.shape)
        )
        return record.extent if same and not record.uninitialised else measure(tensor)


def first_places(bad: Tensor) -> list[tuple[int, ...]]:
    """Returns the first true places of a boolean tensor: of a matrix each row with its first column, of more dimensions all
    but the last."""
    if bad.ndim == 2:
        rows = bad.any(1).nonzero()[:SHOWN_POSITIONS, 0]
        return list(zip(rows.tolist(), bad[rows].int().argmax(1).tolist(), strict=True))
    if bad.ndim > 2:
        bad = bad.any(-1)
    return [tuple(index) for index in bad.nonzero()[:SHOWN_POSITIONS].tolist()]
