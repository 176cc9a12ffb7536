"""Who wrote the non-finite values that a piece of memory holds.

Values are followed by storage, since views write nothing. What is kept of a storage is its address and the span of each
bad write, never the memory itself; a finite write over the whole span of a bad one forgets it.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...finite import local
from ...torch_private import is_traceable_wrapper_subclass, is_zero_tensor, sparse_values, storage_address
from .op_record import FINITE, Extent, Record

SHOWN_POSITIONS = 64


def measure(tensor: Tensor) -> Extent:
    """Returns the exact extent of a tensor; integers and empty tensors are finite."""
    part = strided(tensor)
    if part is None or not is_float(part) or part.numel() == 0 or part.device.type == "meta":
        return FINITE
    low, high = torch.aminmax(_comparable(part))
    return Extent(low.item(), high.item())


def strided(tensor: Tensor) -> Tensor | None:
    """Returns the plain tensor that holds the values of `tensor` on this rank, `None` if there is no such thing."""
    kind = type(tensor)
    if tensor.layout is torch.strided and (kind is Tensor or kind is nn.Parameter) and not tensor.is_nested:
        return None if is_zero_tensor(tensor) else tensor
    if tensor.is_sparse:
        return sparse_values(tensor)
    if tensor.is_nested or tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        tensor = tensor.values()
    tensor = local(tensor)
    if is_traceable_wrapper_subclass(tensor):  # its values are in tensors that it holds
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return next((part for held in inner if is_float(held) and (part := strided(held)) is not None), None)
    return tensor if tensor.layout is torch.strided else None


def is_float(tensor: Tensor) -> bool:
    """Whether a tensor can hold a NaN at all."""
    return tensor.is_floating_point() or tensor.is_complex()


def _comparable(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, and formats of one byte in one that has comparisons."""
    tensor = tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.element_size() == 1 else tensor


def find_nonfinite_entries(tensor: Tensor) -> Tensor:
    """Returns where a plain tensor is not finite."""
    tensor = tensor.detach()
    return ~torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor)


def storage_key(tensor: Tensor) -> int:
    """Returns what tells one storage from another as long as both are alive; 0 for what has none."""
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
    """All bad writes that are still to be read."""

    def __init__(self) -> None:
        self.writes: dict[int, list[_Write]] = {}
        self.patched: set[int] = set()

    def remember(self, output: Tensor, record: Record) -> None:
        """Notes that `record` wrote `output`."""
        part = strided(output)
        if part is None:
            return
        key = storage_key(part)
        self.forget(output, key)
        self.writes.setdefault(key, []).append(_Write(record, *span_of(part), StorageWeakRef(part.untyped_storage())))

    def forget(self, output: Tensor, key: int) -> None:
        """Drops what was known of memory that has been written anew."""
        known = self.writes.get(key)
        part = strided(output)
        if known is None or part is None:
            return
        start, end = span_of(part)
        if part.numel() * part.element_size() < end - start:  # with gaps, in which old values live on
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
        """Returns who wrote the bad values of `tensor`: the last one of their kind; garbage only if there is no other."""
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
        """Returns the extent of an input, without looking again at what one operator has written and nobody since."""
        key = storage_key(tensor)
        writes = self.writes.get(key, ())
        part = strided(tensor)
        if len(writes) != 1 or part is None or key in self.patched:
            return measure(tensor)
        record, start, end, _ = writes[0]
        known = not record.uninitialised and tensor.dtype == record.dtype and span_of(part) == (start, end)
        return record.extent if known and part.numel() == record.numel else measure(tensor)


def find_positions(tensor: Tensor) -> list[tuple[int, ...]]:
    """Returns the first places of non-finite values in a tensor: of a matrix each bad row with its first bad column, of
    more dimensions all but the last."""
    part = strided(tensor)
    return [] if part is None else first_places(find_nonfinite_entries(part))


def first_places(bad: Tensor) -> list[tuple[int, ...]]:
    """Returns the first true places of a boolean tensor, as [`find_positions`] does."""
    if bad.ndim == 2:
        rows = bad.any(1).nonzero()[:SHOWN_POSITIONS, 0]
        return list(zip(rows.tolist(), bad[rows].int().argmax(1).tolist(), strict=True))
    if bad.ndim > 2:
        bad = bad.any(-1)
    return [tuple(index) for index in bad.nonzero()[:SHOWN_POSITIONS].tolist()]
