"""Which module is the first whose output differs between two forward passes."""

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from .trial_bench import Inputs, TrialBench


def _first_tensor(output: object) -> Tensor | None:
    found = output[0] if isinstance(output, tuple | list) and output else output
    return found.detach() if isinstance(found, Tensor) and found.is_floating_point() and found.ndim >= 3 else None


def _record(bench: TrialBench, inputs: Inputs) -> list[tuple[str, Tensor]]:
    """Returns name and output of every module that returns hidden states in a forward pass, in the order of their ends."""
    names = {module: name for name, module in bench.bare.named_modules()}
    outputs: list[tuple[str, Tensor]] = []

    def note(module: nn.Module, args: object, output: object) -> None:
        value = _first_tensor(output)
        if value is not None and names[module]:
            outputs.append((names[module], value))

    with ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_hook(note))
        bench.forward(inputs)
    return outputs


def find_moved(bench: TrialBench, one: Inputs, other: Inputs, places: Tensor, bound: float) -> str | None:
    """Returns the name of the first module whose output at some places (batch, token) differs by more than a share of its
    spread; `None` if no module with such outputs does."""
    for (name, a), (_, b) in zip(_record(bench, one), _record(bench, other), strict=False):
        if a.shape == b.shape and a.shape[:2] == places.shape and measure_move(a, b, places) > bound:
            return name
    return None


def measure_move(one: Tensor, other: Tensor, places: Tensor | None = None) -> float:
    """Returns the largest difference, at some places or anywhere, in units of the spread of the first; inf if one is not finite."""
    a, b = (each.float() if places is None else each[places].float() for each in (one, other))
    if not a.numel():
        return 0.0
    off = float((a - b).abs().max()) / measure_spread(one)
    return off if torch.isfinite(a).all() and torch.isfinite(b).all() else float("inf")


def measure_spread(output: Tensor) -> float:
    """Returns the standard deviation of outputs, but at least a tenth of their size: a single score has none."""
    values = output.float()
    return max(float(values.std(correction=0)), 0.1 * float(values.square().mean().sqrt()), 1e-12)
