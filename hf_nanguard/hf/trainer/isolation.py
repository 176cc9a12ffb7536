"""Running a trainer's loss again without leaving anything behind in its books.

TRL's losses append to metric lists, count tokens and replace attributes while they run. Attributes are put back by
reference; the contents of small containers, small tensors and generators by value. So are those that the modules of a
model hold beside parameters and buffers: counters, caches, running means of the user's own.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...core.torch_private import write_count

DATA = ("train_dataset", "eval_dataset", "callback_handler", "_eval_dataloaders")
LARGE = 100_000
MODULE = tuple(vars(nn.Module()))
KINDS = (dict, defaultdict, OrderedDict, Counter, list, deque, set)


class Kept:
    """A container as it was: itself, and its items (containers among them kept likewise, all else by reference)."""

    def __init__(self, container: Any, above: tuple[int, ...] = ()):
        self.container = container
        above = (*above, id(container))
        items = container.items() if isinstance(container, dict) else enumerate(container)
        self.items = [
            (key, Kept(item, above) if _is_small_container(item) and id(item) not in above else item)
            for key, item in items
        ]

    def restore(self) -> Any:
        """Puts the items back into the container and returns it."""
        items = [(key, item.restore() if isinstance(item, Kept) else item) for key, item in self.items]
        self.container.clear()
        if isinstance(self.container, dict):
            for key, item in items:  # not by `update`, which counts in a Counter
                self.container[key] = item
        elif isinstance(self.container, set):
            self.container.update(item for _, item in items)
        else:
            self.container.extend(item for _, item in items)
        return self.container


def _is_small_container(value: Any) -> bool:
    return type(value) in KINDS and len(value) < LARGE  # a subclass, e.g. a ModelOutput, may refuse to be written


class Written:
    """A tensor or generator as it was, put back only if somebody wrote it."""

    def __init__(self, holder: Tensor | torch.Generator):
        self.holder = holder
        self.value = holder.detach().clone() if isinstance(holder, Tensor) else holder.get_state()
        self.version = write_count(holder) if isinstance(holder, Tensor) else None

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the value back."""
        if isinstance(self.holder, torch.Generator):
            self.holder.set_state(self.value)
        elif write_count(self.holder) != self.version:
            self.holder.copy_(self.value)


def _can_be_written(value: Any) -> bool:
    if isinstance(value, torch.Generator):
        return True
    plain = type(value) is Tensor and value.layout is torch.strided and not value.is_inference()
    return plain and not value.requires_grad and value.numel() < LARGE


@contextmanager
def untouched_modules(model: nn.Module) -> Iterator[None]:
    """Leaves what the modules of a model hold beside parameters, buffers, modules and hooks as it was before the block."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(untouched(module, MODULE))
        yield


@contextmanager
def untouched(owner: Any, besides: Collection[str] = DATA) -> Iterator[None]:
    """Leaves the attributes of `owner`, and the containers among them, as they were before the block.

    Args:
        owner (`Any`):
            Whose attributes.
        besides (`Collection[str]`):
            Attributes that are only put back by reference.
    """
    before = dict(vars(owner))
    own = [value for name, value in before.items() if name not in besides]
    kept: list[Any] = [Kept(value) for value in own if _is_small_container(value)]
    kept += [Written(value) for value in own if _can_be_written(value)]
    try:
        yield
    finally:
        for name in vars(owner).keys() - before.keys():
            delattr(owner, name)
        for name, value in before.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)
        for container in kept:
            container.restore()
