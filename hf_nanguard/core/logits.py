"""Repairs next-token scores: finite rows are untouched, NaN and inf are masked, rows without a finite score are ended.

The largest score of a row is NaN, +inf or -inf exactly if the row must be repaired: `amax` propagates NaN, and a mask of
-inf is never the maximum of a good row. On a CPU the maxima are read in place, and finite scores are returned as they are:
one reduction over the scores, about one `torch.sum`. On a device nothing is read: two reductions, one copy and two
operations on a column, with no host read. Limit: where scores were normalised before (beam search), one NaN has spread
over its whole row, so the row is ended, not repaired.
"""

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor

NEVER = 2**31 - 1
FOLD_EVERY = 64
VIEWS: dict[torch.dtype, type[ctypes.c_float] | type[ctypes.c_double]] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
}


class RowMaxima(NamedTuple):
    """The largest score of each row before and after a repair."""

    before: Tensor
    after: Tensor

    def judge(self) -> tuple[Tensor, Tensor]:
        """Returns which rows were repaired and which were ended."""
        ended = self.after == -math.inf
        return ~(ended | (self.before < math.inf)), ended


class Repair(NamedTuple):
    """Repaired scores and the maxima of their rows; `None` if all rows are known to be finite."""

    scores: Tensor
    maxima: RowMaxima | None = None


def repair_scores(
    scores: Tensor, end_id: int = 0, read_in_place: bool | None = None, in_place: bool = False, rest: float = -math.inf
) -> Repair:
    """Masks NaN and +inf in `[rows, vocabulary]`, and makes `end_id` the only choice in a row without a finite score.

    Finite rows stay bit-identical, and -inf stays a mask. Ending a row has priority over a mask of `end_id`; one outside the
    vocabulary counts as 0. `rest` is the score of all other tokens in an ended row, where `end_id` has 0. With `in_place`
    the scores are written to. `read_in_place` says whether to read the maxima in the memory of a CPU tensor and to do
    nothing if all are finite, by default where that is possible; the result is the same.
    """
    if not scores.numel():
        return Repair(scores)
    top = scores.amax(-1)
    if (can_read_in_place(top) if read_in_place is None else read_in_place) and all(map(math.isfinite, view(top))):
        return Repair(scores)
    inf = math.inf
    out = scores if in_place else None
    fixed = torch.nan_to_num(scores, nan=-inf, posinf=-inf, neginf=-inf, out=out)
    after = fixed.amax(-1)
    ended = after == -inf
    if rest != -inf:
        fixed.masked_fill_(ended.unsqueeze(-1), rest)
    fixed[..., end_id if 0 <= end_id < scores.shape[-1] else 0].masked_fill_(ended, 0.0)
    return Repair(fixed, RowMaxima(top, after))


def can_read_in_place(values: Tensor) -> bool:
    """Returns whether values can be read in place: a plain CPU tensor, not while compiling."""
    return type(values) is Tensor and values.device.type == "cpu" and not torch.compiler.is_compiling()


def view(values: Tensor) -> list[float]:
    """Returns the values of a CPU tensor straight from its memory: no torch operation, no synchronization."""
    values = (values if values.dtype in VIEWS else values.float()).contiguous()
    memory = (VIEWS[values.dtype] * values.numel()).from_address(values.data_ptr())
    return memory[:]


def bound_scores(scores: Tensor, clip_value: float, min_prob: float) -> tuple[Tensor, Tensor]:
    """Bounds repaired rows to `[max - 2 * clip_value, max]` and gives no unmasked token less than `min_prob`.

    Returns normalised log-probabilities, -inf for masked tokens, and which rows had a token that was raised. `min_prob`
    applies before probabilities are normalised again.
    """
    wide = scores if scores.dtype == torch.float64 else scores.float()
    masked = wide == -math.inf
    floor = wide.amax(-1, keepdim=True) - 2 * clip_value
    # comparing the smallest unmasked score with the floor is enough
    raised = wide.masked_fill(masked, math.inf).amin(-1) < floor.squeeze(-1)
    logps = torch.maximum(wide, floor).masked_fill_(masked, -math.inf).log_softmax(-1)
    if min_prob > 0:
        raised |= logps.masked_fill(masked, math.inf).amin(-1) < math.log(min_prob)
        logps = logps.clamp(min=math.log(min_prob)).masked_fill_(masked, -math.inf).log_softmax(-1)
    return logps.to(scores.dtype), raised


class Tally:
    """Counts repaired and ended rows on the device of the scores; nothing is read on the host before `read`.

    Maxima are collected and counted many at a time, so counting adds no operation per token.
    """

    def __init__(self) -> None:
        self.pending: list[RowMaxima] = []
        self.counts: Tensor | None = None
        self.raised: list[Tensor] = []

    def add(self, maxima: RowMaxima) -> None:
        self.pending.append(maxima)
        if len(self.pending) >= FOLD_EVERY:
            self._fold()

    def add_bounded(self, raised: Tensor) -> None:
        """Adds the rows of one call that were bounded."""
        self.raised.append(raised)
        if len(self.raised) >= FOLD_EVERY:
            self.raised = [self._count_bounded()]

    def _count_bounded(self) -> Tensor:
        return torch.stack([raised.sum().to(self.raised[0].device) for raised in self.raised]).sum()

    def read_bounded(self) -> int:
        """Returns how many rows were bounded: one host read, none if nothing was ever added."""
        return int(self._count_bounded()) if self.raised else 0

    def _fold(self) -> None:
        if self.pending:
            before, after = (torch.cat(maxima) for maxima in zip(*self.pending, strict=True))
            counts = torch.stack(RowMaxima(before, after).judge()).sum(-1)
            self.counts = counts if self.counts is None else self.counts + counts.to(self.counts.device)
            self.pending = []

    def read(self) -> tuple[int, int]:
        """Returns how many rows were repaired and how many ended: one host read, none if nothing was ever added."""
        self._fold()
        if self.counts is None:
            return 0, 0
        repaired, ended = self.counts.tolist()
        return repaired, ended


class RowNotes:
    """Keeps the first step at which each row was repaired and ended, on the device of the scores.

    `mixed` says that the number of rows has changed, so it is not known any more which row was which.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[int, RowMaxima]] = []
        self.first: Tensor | None = None
        self.mixed = False

    def add(self, step: int, maxima: RowMaxima) -> None:
        """Adds the rows of one step: the position of the token that will be drawn, 0 for the first."""
        if self.pending and self.pending[-1][1].before.shape != maxima.before.shape:
            self._fold()
        self.pending.append((step, maxima))
        if len(self.pending) >= FOLD_EVERY:
            self._fold()

    def forget_from(self, step: int) -> None:
        """Removes the notes from a step on: its tokens were drafts and are drawn again."""
        self.pending = [note for note in self.pending if note[0] < step]
        if self.first is not None:
            self.first = self.first.masked_fill(self.first >= step, NEVER)

    def _fold(self) -> None:
        if not self.pending:
            return
        steps, maxima = zip(*self.pending, strict=True)
        self.pending = []
        before, after = (torch.stack(values) for values in zip(*maxima, strict=True))
        hit = torch.stack(RowMaxima(before, after).judge())  # [2, steps, rows]
        at = torch.tensor(steps, dtype=torch.int32).to(hit.device, non_blocking=True)[None, :, None]
        first = torch.where(hit, at, NEVER).amin(1)
        if self.first is not None and self.first.shape != first.shape:
            self.mixed = True
            self.first, first = (notes.amin(-1, keepdim=True) for notes in (self.first, first))
        self.first = first if self.first is None else torch.minimum(self.first, first.to(self.first.device))

    def read(self) -> list[tuple[int, int]]:
        """Returns the first repaired and first ended step of each row, `NEVER` for none; one host read, none if empty."""
        self._fold()
        if self.first is None:
            return []
        repaired, ended = self.first.tolist()
        return list(zip(repaired, ended, strict=True))
