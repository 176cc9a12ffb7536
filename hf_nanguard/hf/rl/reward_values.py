"""Rewards and advantages as numbers: which are finite, what is wrong with the others, and the marks they get."""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from ...core.finite import read_host
from ..compat.online_trainer import Completions

BAD_REWARD = math.inf  # what TRL gets in place of a reward that is not a finite number
UNUSABLE = -math.inf  # what TRL gets for a completion that was not drawn from the policy
MAX_ADVANTAGE = 1e30  # no normalization of rewards gives an advantage of this size
FLOAT32_LIMIT = (2 - 2**-24) * 2.0**127  # the smallest number that float32 rounds to infinity
UNORDERED = (str, bytes, bytearray, Mapping, Set)  # what is no list of rewards, though it has a length


def find_kind(number: float | type) -> str | None:
    """Returns what is wrong with an entry of [`read_entries`], `None` if nothing is."""
    if not isinstance(number, float):
        return "type"
    if math.isnan(number):
        return "nan"
    return None if abs(number) < FLOAT32_LIMIT else "inf" if number > 0 else "-inf"


def read_entries(entries: Sequence[object]) -> list[float | type | None]:
    """Returns the entries as floats, `None` as `None`, and anything else as its type. All tensors together cost one read."""
    tensors = {i: e for i, e in enumerate(entries) if isinstance(e, Tensor) and e.numel() == 1 and not e.is_complex()}
    read = dict(zip(tensors, read_host([tensor.detach() for tensor in tensors.values()]), strict=True))
    return [read[i] if i in read else _read_entry(entry) for i, entry in enumerate(entries)]


def _read_entry(entry: Any) -> float | type | None:
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


def is_listing(result: object) -> TypeGuard[Sequence[object]]:
    """Returns whether a result is an ordered collection of rewards."""
    if isinstance(result, (Tensor, np.ndarray)):
        return result.ndim > 0
    return isinstance(result, Sized) and not isinstance(result, UNORDERED)


def materialise(result: object) -> object:
    """Returns a result that has a length and can be read twice: generators and other iterables become lists."""
    if inspect.iscoroutine(result):
        result.close()  # nobody will await it, because its function is not async
    kept = (list, tuple, Tensor, np.ndarray, *UNORDERED)
    return list(result) if isinstance(result, Iterable) and not isinstance(result, kept) else result


def describe_entry(number: float | type) -> str:
    """Returns a short description of a bad entry of [`read_entries`]."""
    if isinstance(number, type):
        return f"a {number.__name__}"
    return f"{number:g}" if not math.isfinite(number) else f"{number:g}, which is beyond float32,"


def mark_unscorable(rewards_per_func: Tensor) -> Tensor:
    """Returns the gathered rewards with NaN in all columns of every marked row, as TRL marks unscorable completions. No
    host read."""
    return torch.where(torch.isinf(rewards_per_func).any(dim=1, keepdim=True), math.nan, rewards_per_func)


def holds_bad_reward(rewards_per_func: Tensor) -> bool:
    """Returns whether the gathered rewards, before [`mark_unscorable`], hold a bad one of any rank: the same answer on every
    rank. One host read."""
    return bool((rewards_per_func == BAD_REWARD).any())


def zero_bad_advantages(output: Completions) -> list[int]:
    """Sets bad advantages to 0, in place, and returns the completions of this rank that had one. One host read.

    There is one advantage per completion or per token. TRL's `nan_to_num` turns an infinity into 3.4e38.
    """
    advantages = output.get("advantages")
    if not isinstance(advantages, Tensor) or not advantages.numel():
        return []
    bad = ~(advantages.abs() < MAX_ADVANTAGE).reshape(len(advantages), -1).all(dim=1)  # True for NaN
    found = [i for i, is_bad in enumerate(bad.tolist()) if is_bad]
    if found:
        advantages[bad] = 0.0
    return found
