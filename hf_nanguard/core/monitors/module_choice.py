"""Selects the modules whose outputs are monitored: the blocks of a model and its outer layers, or what a pattern matches."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ...errors import ArgumentError

OUTER_LAYERS = (nn.Embedding, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the blocks of a model by name: the elements of its outermost `nn.ModuleList`s."""
    return {name: module for name, module, is_block in _walk(model) if is_block}


def find_outer_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the embeddings, projections and heads by name: linear, convolution and embedding layers outside of blocks."""
    return {
        name: module for name, module, is_block in _walk(model) if not is_block and isinstance(module, OUTER_LAYERS)
    }


def pick_modules(model: nn.Module, patterns: str | Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Returns the modules to monitor by name, in the order of `model.named_modules()`; an `ArgumentError` if no module matches.

    `patterns` are `fnmatch` patterns of module names, separated by commas in a string. Leading parts may be left out:
    `"layers.*.mlp"` also matches `"base_model.model.model.layers.0.mlp"`. Blocks and outer layers by default.
    """
    if patterns is None:
        chosen = {**find_blocks(model), **find_outer_layers(model)}
        return {name: module for name, module in model.named_modules() if name in chosen}
    patterns = split_patterns(patterns)
    found = {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and any(matches(name, each) for each in patterns)
    }
    if not found:
        example = next(iter(find_blocks(model) or find_outer_layers(model)), "")
        raise ArgumentError(
            f"modules must be patterns of module names, got {', '.join(map(repr, patterns))}, which match no module. "
            f"This model has modules such as {example!r}."
        )
    return found


def split_patterns(patterns: str | Sequence[str] | None) -> list[str]:
    """Returns patterns one by one."""
    return [part.strip() for part in patterns.split(",")] if isinstance(patterns, str) else list(patterns or ())


def matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _walk(module: nn.Module, name: str = "", is_block: bool = False) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yields modules down to the blocks, with whether each is a block."""
    if isinstance(module, ParametrizationList):
        return  # it computes a weight
    is_list = isinstance(module, nn.ModuleList)
    if not is_list:
        yield name, module, is_block
    if is_list or not is_block:
        for child_name, child in module.named_children():
            yield from _walk(child, f"{name}.{child_name}" if name else child_name, is_list)
