"""Repair of next-token scores: healthy rows untouched, sick entries masked, rows with nothing left ended.

The largest score of a row is NaN, +inf or -inf exactly when the row needs care: `amax` keeps NaN, and a mask of -inf
never wins. On a CPU the few maxima are looked at in place, and healthy scores are returned as they are: one reduction
over the scores, about one `torch.sum`. On a device nothing is looked at: two reductions, one copy and two operations on
a column, with no host read. What is not done here: a row whose scores were normalised before (beam search) has spread
its one NaN over all entries, so it is ended, not repaired.
"""

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

NEVER = 2**31 - 1
FOLD_EVERY = 64
VIEWS: dict[torch.dtype, Any] = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}


class Repair(NamedTuple):
    """Repaired scores, and how the largest score of each row was before and is after; `None` if all rows are known to
    be healthy."""

    scores: Tensor
    top: Tensor | None = None
    left: Tensor | None = None


def repair_scores(
    scores: Tensor, end_id: int = 0, look: bool | None = None, in_place: bool = False, rest: float = -math.inf
) -> Repair:
    """Masks NaN and +inf, and makes `end_id` the only choice of a row in which nothing is left.

    Healthy rows are bit-identical, and -inf stays a mask. Ending a row wins over a mask of `end_id`.

    Args:
        scores (`Tensor`):
            Floating point, `[rows, vocabulary]`.
        end_id (`int`, *optional*, defaults to `0`):
            The token that ends a sequence; one outside the vocabulary counts as 0.
        look (`bool`, *optional*):
            Whether to look at the maxima in the memory of a CPU tensor and to do nothing if all are finite. `None` does
            so where it can be done. The results are the same.
        in_place (`bool`, *optional*, defaults to `False`):
            Whether `scores` may be written to.
        rest (`float`, *optional*, defaults to `-inf`):
            The score of all other tokens in an ended row, where `end_id` has 0.

    Example:
        >>> repair_scores(torch.tensor([[1.0, float("nan"), 2.0]])).scores
        tensor([[1., -inf, 2.]])
    """
    if not scores.numel():
        return Repair(scores)
    top = scores.amax(-1)
    if (can_look(top) if look is None else look) and all(map(math.isfinite, view(top))):
        return Repair(scores)
    inf = math.inf
    out = scores if in_place else None
    fixed = torch.nan_to_num(scores, nan=-inf, posinf=-inf, neginf=-inf, out=out)
    left = fixed.amax(-1)
    ended = left == -inf
    if rest != -inf:
        fixed.masked_fill_(ended.unsqueeze(-1), rest)
    fixed[..., end_id if 0 <= end_id < scores.shape[-1] else 0].masked_fill_(ended, 0.0)
    return Repair(fixed, top, left)


def can_look(values: Tensor) -> bool:
    """Returns whether the values lie in memory of this process, finished and plain: no device, no trace, no subclass."""
    return type(values) is Tensor and values.device.type == "cpu" and not torch.compiler.is_compiling()


def view(values: Tensor) -> list[float]:
    """Returns a few values from the memory of a CPU tensor: no torch operation, no wait for a device."""
    values = (values if values.dtype in VIEWS else values.float()).contiguous()
    memory: Any = (VIEWS[values.dtype] * values.numel()).from_address(values.data_ptr())
    return memory[:]


def bound_scores(scores: Tensor, clip_value: float, min_prob: float) -> tuple[Tensor, Tensor]:
    """Bounds repaired rows to `[max - 2 * clip_value, max]` and gives no unmasked token less than `min_prob`.

    Args:
        scores (`Tensor`):
            As [`repair_scores`] returns them.
        clip_value (`float`):
            Half the largest allowed distance to the best token.
        min_prob (`float`):
            The least probability of an unmasked token, before all are normalised again.

    Returns:
        `tuple[Tensor, Tensor]`: Normalised log-probabilities, of which masked tokens keep -inf, and which rows had a token
        that was raised.
    """
    wide = scores if scores.dtype == torch.float64 else scores.float()
    masked = wide == -math.inf
    floor = wide.amax(-1, keepdim=True) - 2 * clip_value
    # of what stands above a floor, the least tells whether any does not
    raised = wide.masked_fill(masked, math.inf).amin(-1) < floor.squeeze(-1)
    logps = torch.maximum(wide, floor).masked_fill_(masked, -math.inf).log_softmax(-1)
    if min_prob > 0:
        raised |= logps.masked_fill(masked, math.inf).amin(-1) < math.log(min_prob)
        logps = logps.clamp(min=math.log(min_prob)).masked_fill_(masked, -math.inf).log_softmax(-1)
    return logps.to(scores.dtype), raised


def judge(top: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which rows were repaired and which were ended, from the maxima before and after."""
    ended = left == -math.inf
    return ~(ended | (top < math.inf)), ended


class Tally:
    """Counts repaired and ended rows where the scores live; nothing is read before somebody asks.

    Maxima are kept as they come and counted many at a time, so a token costs no operation of its own.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.counts: Tensor | None = None
        self.raised: list[Tensor] = []

    def add(self, top: Tensor, left: Tensor) -> None:
        """Takes the maxima of one call."""
        self.pending.append((top, left))
        if len(self.pending) >= FOLD_EVERY:
            self._fold()

    def add_bounded(self, raised: Tensor) -> None:
        """Takes which rows of one call were bounded."""
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
            tops, lefts = (torch.cat(maxima) for maxima in zip(*self.pending, strict=True))
            counts = torch.stack(judge(tops, lefts)).sum(-1)
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
    """Keeps for each row the first step at which it was repaired and at which it was ended, where the scores live."""

    def __init__(self) -> None:
        self.pending: list[tuple[int, Tensor, Tensor]] = []
        self.first: Tensor | None = None
        self.mixed = False

    def add(self, step: int, top: Tensor, left: Tensor) -> None:
        """Takes the maxima of one step.

        Args:
            step (`int`):
                The position of the token that will be drawn, 0 for the first.
            top (`Tensor`), left (`Tensor`):
                As in [`Repair`].
        """
        if self.pending and self.pending[-1][1].shape != top.shape:
            self._fold()
        self.pending.append((step, top, left))
        if len(self.pending) >= FOLD_EVERY:
            self._fold()

    def forget_from(self, step: int) -> None:
        """Takes back what was noted from a step on: its tokens were drafts and are drawn anew."""
        self.pending = [note for note in self.pending if note[0] < step]
        if self.first is not None:
            self.first = self.first.masked_fill(self.first >= step, NEVER)

    def _fold(self) -> None:
        if not self.pending:
            return
        steps, tops, lefts = zip(*self.pending, strict=True)
        self.pending = []
        sick = torch.stack(judge(torch.stack(tops), torch.stack(lefts)))  # [2, steps, rows]
        at = torch.tensor(steps, dtype=torch.int32).to(sick.device, non_blocking=True)[None, :, None]
        first = torch.where(sick, at, NEVER).amin(1)
        if self.first is not None and self.first.shape != first.shape:
            self.mixed = True  # rows came and went: whose they were is not known any more
            self.first, first = (notes.amin(-1, keepdim=True) for notes in (self.first, first))
        self.first = first if self.first is None else torch.minimum(self.first, first.to(self.first.device))

    def read(self) -> list[tuple[int, int]]:
        """Returns the first repaired and first ended step of each row, `NEVER` for none: one host read.

        It is empty if nothing was ever added.
        """
        self._fold()
        if self.first is None:
            return []
        repaired, ended = self.first.tolist()
        return list(zip(repaired, ended, strict=True))
