"""What a reward function returned, read entry by entry: which are numbers, and what is wrong with the others."""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from torch import Tensor

from ...core.finite import read_host

FLOAT32_LIMIT = (2 - 2**-24) * 2.0**127
"""The smallest number that float32 rounds to infinity."""
KEPT = (list, tuple, Tensor, np.ndarray, str, bytes, bytearray, Mapping, Set)
"""What is not made a list of: it is one already, or its order means nothing."""


def find_kind(number: Any) -> str | None:
    """Returns what is wrong with an entry as [`read_entries`] gives it, `None` if nothing is."""
    if number is None:  # TRL's "this function does not apply here"
        return None
    if not isinstance(number, float):
        return "type"
    if math.isnan(number):
        return "nan"
    return None if abs(number) < FLOAT32_LIMIT else "inf" if number > 0 else "-inf"


def read_entries(entries: Sequence[Any]) -> list[Any]:
    """Returns the entries as floats, `None` as `None` and what is no number as its type. Tensors cost one read in all."""
    tensors = {i: e for i, e in enumerate(entries) if isinstance(e, Tensor) and e.numel() == 1 and not e.is_complex()}
    read = dict(zip(tensors, read_host([tensor.detach() for tensor in tensors.values()]), strict=True))
    return [read[i] if i in read else _read_entry(entry) for i, entry in enumerate(entries)]


def _read_entry(entry: Any) -> Any:
    if entry is None:
        return None
    shaped = isinstance(entry, np.ndarray) and (entry.ndim > 0 or entry.dtype.kind not in "biuf")
    if shaped or isinstance(entry, (Tensor, str, bytes, bytearray, complex, np.complexfloating)):
        return type(entry)
    try:
        return float(entry)
    except OverflowError:
        return math.copysign(math.inf, 1 if entry > 0 else -1)
    except (ArithmeticError, TypeError, ValueError, RuntimeError):
        return type(entry)


def is_listing(result: Any) -> bool:
    """Returns whether a result is one reward after the other, in an order that means something."""
    if isinstance(result, (Tensor, np.ndarray)):
        return result.ndim > 0
    return hasattr(result, "__len__") and not isinstance(result, (str, bytes, bytearray, Mapping, Set))


def materialise(result: Any) -> Any:
    """Returns a result that can be counted and read twice: generators and other iterables become lists."""
    if inspect.iscoroutine(result):
        result.close()  # nobody will await it: its function is not an async one
    return list(result) if isinstance(result, Iterable) and not isinstance(result, KEPT) else result


def describe_entry(number: Any) -> str:
    """Returns an entry, as [`read_entries`] gives it, in few words."""
    if isinstance(number, type):
        return f"a {number.__name__}"
    return f"{number:g}" if not math.isfinite(number) else f"{number:g}, which is beyond float32,"
