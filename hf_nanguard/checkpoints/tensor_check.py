"""Judges one tensor by its smallest and largest entry, which one pass finds: 0.16-0.25 ns an entry on a CPU.

`aminmax` is NaN if any entry is, infinite if any entry is, 0 and 0 if all entries are, and shows the largest magnitude.
Everything else (counts, rows, whether an inf is a mask) takes further passes, over bad tensors only or with `deep`.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..core.finite import SHOWN_ROWS, dtype_name, find_rows, local
from .scan_result import Problem

HUGE = 1e10  # no healthy weight is larger; masks of -1e9 are
NEAR_LIMIT = 0.5  # of the largest number of the dtype
MAX_DENORMAL = {torch.float16: 0.1}  # weights of 0.02 have 0.2 % of them in float16
MAX_SHARE = 0.01  # of denormal numbers in other dtypes, and of entries that a cast makes zero
ROW_FACTOR = 1e3  # a row is compared with the median row
TINY = 1e-30  # entries of rows that were never written are often denormal numbers, in float32 at least
WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # others lack most operators
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
# State of an optimizer inside a file of everything: gradients squared may be of any size, and zero.
STATE = re.compile(r"optim|exp_avg|momentum_buffer|(^|\.)state\.\d+\.")
# Matrices that begin at zero and may stay there: adapters, position and type embeddings, added projections.
BORN_ZERO = re.compile(r"lora_(embedding_)?B|vera_lambda|zero_conv|zero_proj|pos_embed|position|token_type|cls_token|"
                       r"relative_attention_bias|ada_?ln|adaln|(^|[._])bias($|[._])|running_|prompt|gate")  # fmt: skip


@dataclass(frozen=True)
class Checks:
    """What is looked for besides NaN, inf, magnitudes and zeros: `deep` adds passes, `cast` is the dtype of `--as`."""

    deep: bool = False
    cast: torch.dtype | None = None

    @property
    def need_extents(self) -> bool:
        """Whether every tensor is judged, not only those that may be bad."""
        return self.deep or self.cast is not None


def as_plain(tensor: Tensor) -> Tensor | None:
    """Returns the float entries of a tensor as a plain one, `None` if there are none to check."""
    if not has_floats(tensor) or not tensor.numel():
        return None
    tensor = tensor.detach()
    tensor = tensor.values() if tensor.layout in COMPRESSED else local(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.numel() or not can_check(tensor):
        return None
    repeated = [dim for dim, stride in enumerate(tensor.stride()) if stride == 0]
    for dim in repeated:  # an expanded tensor may claim any size
        tensor = tensor.narrow(dim, 0, 1)
    return tensor if tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes() else None


def has_floats(tensor: Tensor) -> bool:
    """Returns whether a tensor has float numbers of its own; a quantized one has integers."""
    return (tensor.is_floating_point() or tensor.is_complex()) and not (tensor.is_meta or tensor.is_quantized)


def can_check(tensor: Tensor) -> bool:
    """Returns whether the entries of a tensor with floats can be checked: torch has dtypes and layouts that it can only store."""
    is_known = tensor.layout in (torch.strided, torch.sparse_coo, *COMPRESSED) and not tensor.is_nested
    return is_known and (tensor.is_complex() or _can_widen(tensor.dtype))


@cache
def _can_widen(dtype: torch.dtype) -> bool:
    try:
        torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype).float()
    except NotImplementedError:
        return False
    return True


def widen(tensor: Tensor) -> Tensor:
    """Returns the same numbers in a dtype that has all operators."""
    return tensor if tensor.dtype in WIDE else tensor.float()


def measure(part: Tensor) -> tuple[float, float]:
    """Returns the smallest and the largest entry; NaN if any entry is."""
    low, high = torch.aminmax(widen(part))
    return float(low), float(high)


def judge(
    name: str, tensor: Tensor, extent: tuple[float, float], is_state: bool, checks: Checks
) -> Iterator[tuple[Problem, str]]:
    """Yields the problems of a tensor, given its smallest and largest entry."""
    low, high = extent
    largest = max(abs(low), abs(high))
    is_state = is_state or STATE.search(name) is not None
    if math.isnan(largest):
        yield Problem.NAN, _format_entries("NaN", torch.isnan(widen(tensor)))
        return
    if math.isinf(largest):
        if is_state or not is_mask(widen(tensor)):
            yield Problem.INF, _format_entries("inf", torch.isinf(widen(tensor)))
        return
    yield from _judge_magnitude(tensor, low, high, is_state)
    if low == high == 0 and not is_state and not _may_be_zero(name, tensor):
        yield Problem.ALL_ZERO, f"is zero in all {tensor.numel()} entries"
    if is_state:
        return
    if checks.cast is not None:
        yield from _judge_cast(widen(tensor), largest, checks.cast)
    if checks.deep and largest:
        yield from _judge_deep(tensor)


def _judge_magnitude(tensor: Tensor, low: float, high: float, is_state: bool) -> Iterator[tuple[Problem, str]]:
    limit, largest = torch.finfo(tensor.dtype).max, max(abs(low), abs(high))
    is_near = largest > NEAR_LIMIT * limit
    is_odd = is_near or (largest > HUGE and not is_state)
    if tensor.dtype not in WIDE or not is_odd:  # float8 is scaled to its limit
        return
    if low < -HUGE and _has_one_value(tensor[tensor != low]):  # a mask of a large negative number
        return
    if is_near:
        yield Problem.NEAR_LIMIT, f"reaches {largest:.3g}; {dtype_name(tensor.dtype)} ends at {limit:.3g}"
    else:
        yield Problem.HUGE, f"reaches {largest:.3g}, which no healthy weight does"


def _has_one_value(entries: Tensor) -> bool:
    return not entries.numel() or bool((entries == entries[0]).all())


def _may_be_zero(name: str, tensor: Tensor) -> bool:
    """Returns whether zeros are usual: vectors, single rows, and what begins at zero."""
    return sum(size > 1 for size in tensor.shape) < 2 or BORN_ZERO.search(name) is not None


def is_mask(tensor: Tensor) -> bool:
    """Returns whether the infinities of a tensor are there by design.

    They are all -inf, and the other entries are the same number (an attention mask), or they fill whole rows and columns
    (forbidden transitions of a CRF).
    """
    bad = tensor.isneginf()
    if torch.isposinf(tensor).any():
        return False
    if _has_one_value(tensor[~bad]):
        return tensor.numel() > 1
    if tensor.ndim < 2:
        return False
    matrix = bad.reshape(-1, bad.shape[-1])
    return bool((matrix == (matrix.all(1, keepdim=True) | matrix.all(0, keepdim=True))).all())


def _judge_cast(tensor: Tensor, largest: float, dtype: torch.dtype) -> Iterator[tuple[Problem, str]]:
    limit, target = torch.finfo(dtype).max, dtype_name(dtype)
    if largest > limit:
        num_over = int((tensor.abs() > limit).sum())
        yield Problem.OVERFLOW, f"reaches {largest:.3g} and would overflow in {target} in {num_over} entries"
    num_lost = int(((tensor != 0) & (tensor.to(dtype) == 0)).sum())
    if num_lost > MAX_SHARE * tensor.numel():
        yield Problem.UNDERFLOW, f"would become zero in {target} in {num_lost} of {tensor.numel()} entries"


def _judge_deep(tensor: Tensor) -> Iterator[tuple[Problem, str]]:
    wide = widen(tensor)
    num_denormal = int(((wide != 0) & (wide.abs() < torch.finfo(wide.dtype).smallest_normal)).sum())
    if tensor.dtype in WIDE and num_denormal > MAX_DENORMAL.get(tensor.dtype, MAX_SHARE) * tensor.numel():
        yield Problem.DENORMAL, f"has denormal numbers in {num_denormal} of {tensor.numel()} entries"
    if tensor.ndim == 2 and min(tensor.shape) > 1:
        rows = wide.abs().amax(1).float()
        median = float(rows[rows > 0].median())
        odd = (rows > ROW_FACTOR * median) | ((rows > 0) & (rows < min(TINY, median / ROW_FACTOR)))
        if odd.any():
            yield Problem.UNINITIALIZED_ROWS, f"has {int(odd.sum())} rows that look uninitialized{_format_rows(odd)}"


def _format_entries(kind: str, bad: Tensor) -> str:
    num_bad, total = int(bad.sum()), bad.numel()
    if num_bad == total > 1:
        return f"contains {kind} in all {total} entries"
    return f"contains {kind} in {num_bad} of {total} entries{_format_rows(bad)}"


def _format_rows(bad: Tensor) -> str:
    rows = find_rows(bad)
    shown = ", ".join(map(str, rows)) + (", ..." if len(rows) == SHOWN_ROWS else "")
    return f" ({'row' if len(rows) == 1 else 'rows'} {shown})"
