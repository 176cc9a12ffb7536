"""A fixed sample of every trainable parameter, taken before an update and compared after it.

At most `SAMPLE` entries of a parameter, at a stride that goes through all its columns, no random numbers. Before the update:
weights, gradients and (over all entries, for exact zeros) the size of each gradient; after it: one host read.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..finite import local, magnitudes, read_host
from ..optimizer.rounding import Sample
from ..ranks import Ranks
from ..state_tensors import is_plain
from ..torch_private import foreach_norm

SAMPLE = 4096


@dataclass(frozen=True)
class Piece:
    """A parameter whose gradient is dense, and which of its entries are looked at: every `stride`-th, `size` in all."""

    name: str
    parameter: Tensor
    group: int
    stride: int
    size: int

    @property
    def weight(self) -> float:
        """How many entries each of them stands for."""
        return local(self.parameter).numel() / self.size

    def take(self, tensor: Tensor) -> Tensor:
        """Returns these entries of the parameter or of its gradient."""
        return local(tensor).detach().reshape(-1)[:: self.stride]


@dataclass
class UpdateSample:
    """What was taken before an update, on the device.

    Args:
        heaps (`list`):
            For each device and dtype the pieces, their weights and their gradients.
        sizes (`dict[str, Tensor]`):
            The sizes of whole gradients by parameter, 0 for exact zeros only.
        rates (`list`):
            The learning rate of each group.
        idle (`set[str]`):
            Trainable parameters that have no gradient, or that the optimizer does not know.
        is_sharded (`bool`):
            Whether ranks hold different parts of parameters.
    """

    heaps: list[tuple[list[Piece], Tensor, Tensor]]
    sizes: dict[str, Tensor]
    rates: list[float | Tensor | None]
    idle: set[str]
    is_sharded: bool

    @property
    def pieces(self) -> list[Piece]:
        """All pieces."""
        return [piece for pieces, _, _ in self.heaps for piece in pieces]

    def sample(self, names: set[str]) -> dict[str, Sample]:
        """Returns those entries of some parameters that have a gradient."""
        found = {}
        for pieces, _, gradients in self.heaps:
            for piece, gradient in zip(pieces, gradients.split([piece.size for piece in pieces]), strict=True):
                if piece.name in names:
                    live = gradient.nonzero().flatten()
                    weight = piece.weight * len(live)
                    found[piece.name] = Sample(piece.parameter, live * piece.stride, gradient[live], weight)
        return found


@dataclass
class Count:
    """What was read of a look: entries with a gradient and how many of them moved, both scaled up to all entries, and the
    size of the gradient, by parameter; and the learning rate of each group (`None` if the optimizer finds its own)."""

    live: dict[str, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    rates: list[float | None] = field(default_factory=list)

    def share(self, names: set[str] | None = None) -> float | None:
        """Returns the share of entries with a gradient that moved, `None` if there are no such entries."""
        chosen = set(self.live) if names is None else names
        live = sum(self.live.get(name, 0.0) for name in chosen)
        return sum(self.moved.get(name, 0.0) for name in chosen) / live if live else None


@torch.no_grad()
def take_sample(model: nn.Module, optimizer: Any) -> UpdateSample:
    """Takes the sample, before an update; nothing is read."""
    named = list(_name_parameters(model, optimizer))
    heaps: dict[tuple[torch.device, torch.dtype], list[Piece]] = {}
    gradients = {name: parameter.grad for name, parameter, _ in named if parameter.grad is not None}
    for name, parameter, group in named:
        part = local(parameter)
        if name in gradients and group is not None and _can_sample(part, local(gradients[name])):
            piece = Piece(name, parameter, group, *_find_stride(part))
            heaps.setdefault((part.device, part.dtype), []).append(piece)
    return UpdateSample(
        heaps=[
            (pieces, _take_weights(pieces), torch.cat([piece.take(gradients[piece.name]) for piece in pieces]))
            for pieces in heaps.values()
        ],
        sizes=dict(zip(gradients, _measure(list(gradients.values())), strict=True)),
        rates=[_take_rate(group.get("lr")) for group in optimizer.param_groups],
        idle={name for name, _, group in named if name not in gradients or group is None},
        is_sharded=any(local(parameter) is not parameter for _, parameter, _ in named),
    )


@torch.no_grad()
def read_sample(sample: UpdateSample, ranks: Ranks) -> Count:
    """Compares after the update, by one host read. If parameters are sharded, every rank must call it."""
    live: list[Tensor] = []
    moved: list[Tensor] = []
    for pieces, before, gradients in sample.heaps:
        sizes = [piece.size for piece in pieces]
        has_gradient = gradients != 0
        changed = (_take_weights(pieces) != before) & has_gradient
        # The 1-norms of a list are counts, all by one kernel.
        live += foreach_norm(has_gradient.float().split(sizes), 1)
        moved += foreach_norm(changed.float().split(sizes), 1)
    rates = [rate for rate in sample.rates if isinstance(rate, Tensor)]
    numbers = iter(read_host([*sample.sizes.values(), *live, *moved, *rates]))
    count = Count(
        sizes={name: next(numbers) for name in sample.sizes},
        live={piece.name: next(numbers) * piece.weight for piece in sample.pieces},
        moved={piece.name: next(numbers) * piece.weight for piece in sample.pieces},
    )
    count.rates = [next(numbers) if isinstance(rate, Tensor) else rate for rate in sample.rates]
    return _add_up(count, ranks) if sample.is_sharded and ranks.size > 1 else count


def _add_up(mine: Count, ranks: Ranks) -> Count:
    total = Count(rates=mine.rates)
    for live, moved, sizes in ranks.gather([mine.live, mine.moved, mine.sizes]):
        for into, part in ((total.live, live), (total.moved, moved)):
            for name, number in part.items():
                into[name] = into.get(name, 0.0) + number
        for name, number in sizes.items():
            total.sizes[name] = max(total.sizes.get(name, 0.0), number if math.isfinite(number) else math.inf)
    return total


def _name_parameters(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yields the trainable parameters of model and optimizer, each with its group."""
    groups = {parameter: at for at, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        at = groups.pop(parameter, None)
        if parameter.requires_grad:
            yield name, parameter, at
    for index, (parameter, at) in enumerate(groups.items()):
        if parameter.requires_grad:  # a master copy
            yield f"parameter {index} of the optimizer", parameter, at


def _can_sample(part: Tensor, gradient: Tensor) -> bool:
    """Whether entries can be picked out: not of quantised weights, nor of the gradient of a few rows."""
    return is_plain(part) and part.numel() > 0 and part.shape == gradient.shape


def _measure(gradients: list[Tensor]) -> list[Tensor]:
    """Returns a size of each gradient that is 0 only for exact zeros and finite for finite ones.

    The 1-norm takes a fraction of the time that largest magnitudes take on a CPU; in float16 it overflows.
    """
    parts = [local(gradient) for gradient in gradients]
    if any(part.dtype == torch.float16 for part in parts):
        return magnitudes(parts)
    return foreach_norm(parts, 1)


def _find_stride(part: Tensor) -> tuple[int, int]:
    """Returns a stride that goes through all columns, and how many entries that makes."""
    count, width = part.numel(), part.shape[-1] if part.ndim else 1
    stride = -(-count // SAMPLE)
    while math.gcd(stride, width) > 1:
        stride += 1
    return stride, -(-count // stride)


def _take_rate(rate: Any) -> float | Tensor | None:
    """Returns a learning rate as it is now; one that lives on a device stays there, as a copy."""
    return rate.detach().clone() if isinstance(rate, Tensor) else None if rate is None else float(rate)


def _take_weights(pieces: list[Piece]) -> Tensor:
    return torch.cat([piece.take(piece.parameter) for piece in pieces])
