"""Which modules of a model are worth watching: its blocks, what lies before and behind them, or what a pattern names."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ...errors import ArgumentError

ENDS = (nn.Embedding, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the blocks of a model by name: the elements of its outermost lists of modules."""
    return {name: module for name, module, inside in _walk(model) if inside}


def find_ends(model: nn.Module) -> dict[str, nn.Module]:
    """Returns embeddings, projections and heads by name: the linear, convolution and embedding layers outside of blocks."""
    return {name: module for name, module, inside in _walk(model) if not inside and isinstance(module, ENDS)}


def pick_modules(model: nn.Module, patterns: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Returns the modules to watch by name, in the order in which the model holds them.

    Args:
        model (`nn.Module`):
            The model, without DDP wrapper.
        patterns (`Sequence[str]`, *optional*):
            Patterns of names as `fnmatch` has them; leading parts may be left out, so that `"layers.*.mlp"` also finds
            `"base_model.model.model.layers.0.mlp"`. The blocks and the ends of the model by default.

    Raises:
        ArgumentError: if no module has such a name.
    """
    if patterns is None:
        chosen = {**find_blocks(model), **find_ends(model)}
        return {name: module for name, module in model.named_modules() if name in chosen}
    found = {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        and any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for pattern in patterns)
    }
    if not found:
        example = next(iter(find_blocks(model) or find_ends(model)), "")
        raise ArgumentError(
            f"modules must be patterns of module names, got {', '.join(map(repr, patterns))}, which no module has. "
            f"This model has modules such as {example!r}."
        )
    return found


def _walk(module: nn.Module, name: str = "", inside: bool = False) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yields modules down to the blocks, with whether each is one."""
    if isinstance(module, ParametrizationList):
        return  # it computes a weight
    holds = isinstance(module, nn.ModuleList)
    if not holds:
        yield name, module, inside
    if holds or not inside:
        for child_name, child in module.named_children():
            yield from _walk(child, f"{name}.{child_name}" if name else child_name, holds)
