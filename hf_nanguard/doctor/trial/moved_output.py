"""Which module is the first whose output differs between two forward passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .trial_bench import Inputs, TrialBench


def _first_tensor(output: Any) -> Tensor | None:
    found = output[0] if isinstance(output, tuple | list) and output else output
    return found.detach() if isinstance(found, Tensor) and found.is_floating_point() and found.ndim >= 3 else None


@contextmanager
def _recorded(model: nn.Module, outputs: list[tuple[str, Tensor]]) -> Iterator[None]:
    """Appends name and output of every module that returns hidden states inside the block, in the order of their ends."""
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        value = _first_tensor(output)
        if value is not None and names[module]:
            outputs.append((names[module], value))

    handles = [module.register_forward_hook(note) for module in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def find_moved(bench: TrialBench, one: Inputs, other: Inputs, places: Tensor, bound: float) -> str | None:
    """Returns the name of the first module whose output at some places (batch, token) differs by more than a share of its
    spread; `None` if no module with such outputs does."""
    first: list[tuple[str, Tensor]] = []
    second: list[tuple[str, Tensor]] = []
    with _recorded(bench.bare, first):
        bench.forward(one)
    with _recorded(bench.bare, second):
        bench.forward(other)
    for (name, a), (_, b) in zip(first, second, strict=False):
        if a.shape == b.shape and a.shape[:2] == places.shape and measure_move(a, b, places) > bound:
            return name
    return None


def measure_move(one: Tensor, other: Tensor, places: Tensor) -> float:
    """Returns the largest difference at some places, in units of the spread of the first; inf if one is not finite."""
    a, b = one[places].float(), other[places].float()
    if not a.numel():
        return 0.0
    off = float((a - b).abs().max()) / measure_spread(one)
    return off if torch.isfinite(a).all() and torch.isfinite(b).all() else float("inf")


def measure_spread(output: Tensor) -> float:
    """Returns the standard deviation of outputs, but at least a tenth of their size: a single score has none."""
    values = output.float()
    return max(float(values.std(correction=0)), 0.1 * float(values.square().mean().sqrt()), 1e-12)
