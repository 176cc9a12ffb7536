"""A fixed sample of every trainable parameter, taken before an update and compared after it.

At most `SAMPLE` entries of a parameter, at a stride that reaches all of its columns, without random numbers. Before the update:
weights, gradients and the size of each whole gradient, to find exact zeros. After it: one host read.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..finite import local, magnitudes, read_host
from ..optimizer.rounding_remedies import Sample
from ..ranks import Ranks
from ..state_tensors import is_plain
from ..torch_private import foreach_norm

SAMPLE = 4096


@dataclass(frozen=True)
class Piece:
    """The sampled entries of one parameter with a dense gradient: every `stride`-th, `size` in all."""

    name: str
    parameter: Tensor
    group: int
    stride: int
    size: int

    @property
    def weight(self) -> float:
        """How many entries of the parameter each sampled one represents."""
        return local(self.parameter).numel() / self.size

    def take(self, tensor: Tensor) -> Tensor:
        """Returns these entries of the parameter or of its gradient."""
        return local(tensor).detach().reshape(-1)[:: self.stride]


@dataclass
class UpdateSample:
    """The sample taken before an update, on the device."""

    batches: list[tuple[list[Piece], Tensor, Tensor]]  # by device and dtype: pieces, their weights, their gradients
    sizes: dict[str, Tensor]  # of whole gradients by parameter, 0 for exact zeros only
    rates: list[float | Tensor | None]  # the learning rate of each parameter group
    idle: set[str]  # trainable parameters that have no gradient or are not in the optimizer
    is_sharded: bool  # whether ranks hold different parts of parameters

    @property
    def pieces(self) -> list[Piece]:
        return [piece for pieces, _, _ in self.batches for piece in pieces]

    def pick_entries(self, names: Collection[str]) -> dict[str, Sample]:
        """Returns the sampled entries of some parameters that have a gradient."""
        found = {}
        for pieces, _, gradients in self.batches:
            for piece, gradient in zip(pieces, gradients.split([piece.size for piece in pieces]), strict=True):
                if piece.name in names:
                    live = gradient.nonzero().flatten()
                    weight = piece.weight * len(live)
                    found[piece.name] = Sample(piece.parameter, live * piece.stride, gradient[live], weight)
        return found


@dataclass
class UpdateCounts:
    """What was read after the update, by parameter; counts are scaled up from the sample to all entries."""

    live: dict[str, float] = field(default_factory=dict)  # entries with a gradient
    moved: dict[str, float] = field(default_factory=dict)  # those of them that changed
    sizes: dict[str, float] = field(default_factory=dict)  # of the whole gradient
    rates: list[float | None] = field(default_factory=list)  # of each group, `None` if the optimizer finds its own

    def share(self, names: Iterable[str]) -> float | None:
        """Returns the share of entries with a gradient that changed, `None` if there are no such entries."""
        chosen = list(names)
        live = sum(self.live.get(name, 0.0) for name in chosen)
        return sum(self.moved.get(name, 0.0) for name in chosen) / live if live else None


@torch.no_grad()
def take_sample(model: nn.Module, optimizer: Optimizer) -> UpdateSample:
    """Takes the sample before an update, without a host read."""
    named = list(_name_parameters(model, optimizer))
    batches: dict[tuple[torch.device, torch.dtype], list[Piece]] = {}
    gradients = {name: parameter.grad for name, parameter, _ in named if parameter.grad is not None}
    for name, parameter, group in named:
        part = local(parameter)
        if name not in gradients or group is None:
            continue
        if is_plain(part) and part.numel() and part.shape == local(gradients[name]).shape:  # not quantised or sparse
            piece = Piece(name, parameter, group, *_find_stride(part))
            batches.setdefault((part.device, part.dtype), []).append(piece)
    return UpdateSample(
        batches=[
            (pieces, _take_weights(pieces), torch.cat([piece.take(gradients[piece.name]) for piece in pieces]))
            for pieces in batches.values()
        ],
        sizes=dict(zip(gradients, _measure(list(gradients.values())), strict=True)),
        rates=[_take_rate(group.get("lr")) for group in optimizer.param_groups],
        idle={name for name, _, group in named if name not in gradients or group is None},
        is_sharded=any(local(parameter) is not parameter for _, parameter, _ in named),
    )


@torch.no_grad()
def read_sample(sample: UpdateSample, ranks: Ranks) -> UpdateCounts:
    """Compares the sample after the update, with one host read. Every rank must call it if parameters are sharded."""
    live: list[Tensor] = []
    moved: list[Tensor] = []
    for pieces, before, gradients in sample.batches:
        sizes = [piece.size for piece in pieces]
        has_gradient = gradients != 0
        changed = (_take_weights(pieces) != before) & has_gradient
        # The 1-norms of a list are counts, all by one kernel.
        live += foreach_norm(has_gradient.float().split(sizes), 1)
        moved += foreach_norm(changed.float().split(sizes), 1)
    rates = [rate for rate in sample.rates if isinstance(rate, Tensor)]
    numbers = iter(read_host([*sample.sizes.values(), *live, *moved, *rates]))
    counts = UpdateCounts(
        sizes={name: next(numbers) for name in sample.sizes},
        live={piece.name: next(numbers) * piece.weight for piece in sample.pieces},
        moved={piece.name: next(numbers) * piece.weight for piece in sample.pieces},
    )
    counts.rates = [next(numbers) if isinstance(rate, Tensor) else rate for rate in sample.rates]
    return _add_up(counts, ranks) if sample.is_sharded and ranks.size > 1 else counts


def _add_up(mine: UpdateCounts, ranks: Ranks) -> UpdateCounts:
    total = UpdateCounts(rates=mine.rates)
    for live, moved, sizes in ranks.gather([mine.live, mine.moved, mine.sizes]):
        for into, part in ((total.live, live), (total.moved, moved)):
            for name, number in part.items():
                into[name] = into.get(name, 0.0) + number
        for name, number in sizes.items():
            total.sizes[name] = max(total.sizes.get(name, 0.0), number if math.isfinite(number) else math.inf)
    return total


def _name_parameters(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yields the trainable parameters of model and optimizer with their parameter group."""
    groups = {parameter: at for at, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        at = groups.pop(parameter, None)
        if parameter.requires_grad:
            yield name, parameter, at
    for index, (parameter, at) in enumerate(groups.items()):
        if parameter.requires_grad:  # a master copy
            yield f"parameter {index} of the optimizer", parameter, at


def _measure(gradients: list[Tensor]) -> list[Tensor]:
    """Returns a size of each gradient that is 0 only for exact zeros and finite for finite ones.

    The 1-norm takes a fraction of the time of largest magnitudes on a CPU, but in float16 it overflows.
    """
    parts = [local(gradient) for gradient in gradients]
    if any(part.dtype == torch.float16 for part in parts):
        return magnitudes(parts)
    return foreach_norm(parts, 1)


def _find_stride(part: Tensor) -> tuple[int, int]:
    """Returns a stride that reaches all columns, and the number of entries it yields."""
    count, width = part.numel(), part.shape[-1] if part.ndim else 1
    stride = -(-count // SAMPLE)
    while math.gcd(stride, width) > 1:
        stride += 1
    return stride, -(-count // stride)


def _take_rate(rate: float | Tensor | None) -> float | Tensor | None:
    """Returns the current learning rate; one on a device is copied and stays there."""
    return rate.detach().clone() if isinstance(rate, Tensor) else None if rate is None else float(rate)


def _take_weights(pieces: list[Piece]) -> Tensor:
    return torch.cat([piece.take(piece.parameter) for piece in pieces])
