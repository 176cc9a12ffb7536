"""Updates lost to rounding: what would move these entries, tried on copies of them.

A stored weight changes if its update is more than half the distance to the next representable number. One more update of sampled
entries by the same optimizer in float64 shows how large updates are. From that follow how many entries stochastic rounding
would move on average and how much larger the learning rate has to be; float32 weights and that learning rate are then tried.
Nothing is tried with optimizers whose state is not kept for each entry (Adafactor's rows and columns, 8-bit blocks).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...boundary import attempt
from ...plain_text import quote_error
from ..event import Remedy
from ..finite import local
from ..state_tensors import is_plain
from .copied_update import copy_entries, copy_settings, copy_state, step_copy

MOVES = 0.01  # the share of entries from which weights count as moving
# Names that optimizers give to the part of a weight that its dtype cannot hold.
REMAINDERS = ("master", "compensation", "kahan")
IDEAS = {
    "float32_weights": "float32 weights, or float32 master copies of them",
    "stochastic_rounding": "an optimizer that rounds up or down at random, unbiased on average",
    "larger_lr": "a larger learning rate",
}


@dataclass(frozen=True)
class Sample:
    """Entries of a parameter that an update should have changed."""

    parameter: Tensor
    entries: Tensor  # their positions in its part on this rank
    gradient: Tensor  # of these entries
    weight: float = 1.0  # how many entries of the parameter each of them represents


@torch.no_grad()
def keeps_remainder(optimizer: Optimizer, sample: Sample) -> bool:
    """Returns whether the optimizer keeps what rounding removes: a more precise copy of the weights, or the rest of updates."""
    state = optimizer.state.get(sample.parameter, {})
    weights = local(sample.parameter).reshape(-1)[sample.entries]
    for key, value in state.items():
        if not isinstance(value, Tensor) or local(value).numel() != local(sample.parameter).numel():
            continue
        if any(word in str(key).lower() for word in REMAINDERS):
            return True
        if is_plain(local(value)) and torch.finfo(value.dtype).eps < torch.finfo(weights.dtype).eps:
            same = local(value).reshape(-1)[sample.entries].to(weights.dtype) == weights
            if bool((same & (weights != 0)).sum() > 0.9 * len(weights)):
                return True
    return False


@torch.no_grad()
def moves_copies(optimizer: Optimizer, samples: Sequence[Sample]) -> bool:
    """Returns whether one more update would change copies of entries that an update has left as they were. Then that update was
    not lost to rounding: the optimizer did not apply it, e.g. because it does so every few steps only."""
    live = [sample for sample in samples if len(sample.entries)]
    if not live or not all(_goes_by_entries(optimizer, sample.parameter) for sample in live):
        return False

    def moves() -> bool:
        moved = [_share_moved(optimizer, each, each.parameter.dtype) for each in live]
        return _average([each.weight for each in live], moved) >= MOVES

    return attempt(moves, lambda error: False)  # of an optimizer whose constructor or state is not known here


def try_rounding_remedies(optimizer: Optimizer, samples: Sequence[Sample]) -> tuple[Remedy, ...]:
    """Tries what would change entries whose updates are lost to rounding. Optimizer and parameters are only read.

    The samples are entries with a gradient. Each remedy states the share of entries that it would move in a step.
    """
    live = [sample for sample in samples if len(sample.entries)]
    if not live or not all(_goes_by_entries(optimizer, sample.parameter) for sample in live):
        return _leave("the optimizer does not keep state for each entry")
    return attempt(lambda: _try(optimizer, live), lambda error: _leave(quote_error(error, 200)))


def _leave(why: str) -> tuple[Remedy, ...]:
    return tuple(Remedy(name, tried=False, note=f"{note}; not tried ({why})") for name, note in IDEAS.items())


@torch.no_grad()
def _try(optimizer: Optimizer, samples: Sequence[Sample]) -> tuple[Remedy, ...]:
    sizes, chances, ratios = [], [], []
    for sample in samples:
        before, after = _update_copy(optimizer, sample, torch.float64)
        change = (after - before).abs()
        distance = _find_distance(before, sample.parameter.dtype)
        sizes.append(sample.weight)
        chances.append((change / distance).clamp(max=1.0).mean())
        ratios.append(distance[change > 0] / 2 / change[change > 0])
    expected = _average(sizes, chances)
    wide = _average(sizes, [_share_moved(optimizer, each, torch.float32) for each in samples])
    remedies = [
        _judge("float32_weights", f"moves {wide:.2%} of the entries in a step", wide >= MOVES),
        _judge(
            "stochastic_rounding", f"moves {100 * expected:.2g}% of the entries in a step, on average", expected > 0
        ),
    ]
    every = torch.cat(ratios)
    if not len(every):
        return (*remedies, Remedy("larger_lr", True, False, f"{IDEAS['larger_lr']}; the update is exactly zero"))
    factor = _round_up(float(every.median()) * 1.01)  # a change of exactly half the distance may go either way
    scaled = [_share_moved(optimizer, each, each.parameter.dtype, factor) for each in samples]
    share = _average(sizes, scaled)
    note = f"{factor:g} times as large moves {share:.2%} of the entries in a step"
    return (*remedies, _judge("larger_lr", note, share >= MOVES))


def _judge(name: str, note: str, works: bool) -> Remedy:
    return Remedy(name, True, works, f"{IDEAS[name]}: {note}")


def _average(sizes: list[float], values: list[Tensor]) -> float:
    weights = torch.tensor(sizes, dtype=torch.float64)
    return float((torch.stack(values).double().cpu() * weights).sum() / weights.sum())


def _round_up(value: float) -> float:
    """Rounds up to two digits."""
    digit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / digit) * digit


def _find_distance(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the distance to the next number that a dtype can represent."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(weights.abs())[1] - 1
    return torch.ldexp(torch.full_like(weights, info.eps), exponent).clamp(min=info.smallest_normal * info.eps)


def _share_moved(optimizer: Optimizer, sample: Sample, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    before, after = _update_copy(optimizer, sample, dtype, factor)
    return (before != after).double().mean()


def _goes_by_entries(optimizer: Optimizer, parameter: Tensor) -> bool:
    shape = local(parameter).shape
    tensors = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
    return all(not v.ndim or (is_plain(local(v)) and local(v).shape == shape) for v in tensors)


def _update_copy(
    optimizer: Optimizer, sample: Sample, dtype: torch.dtype, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns some entries before and after one more update on a copy."""
    settings = copy_settings(optimizer, sample.parameter)
    assert settings is not None
    if settings["lr"] is not None:
        settings["lr"] = settings["lr"] * factor
    before = copy_entries(sample.parameter, sample.entries).to(dtype)
    state = copy_state(optimizer, sample.parameter, sample.entries, settings, lambda part: part.to(dtype))
    return before, step_copy(optimizer, before, sample.gradient.to(dtype), state, settings)
