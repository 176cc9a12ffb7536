"""Attributes of trainers and modules that a loss writes while it runs, kept so that they can be put back.

TRL's losses append to metric lists, count tokens and replace attributes; modules hold counters, caches and running means of
their own beside parameters and buffers. Attributes are put back by reference; the contents of small containers, small
tensors and generators, also those inside containers, by value.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private import write_count

DATA = ("train_dataset", "eval_dataset", "callback_handler", "_eval_dataloaders")
LARGE = 100_000
MODULE = tuple(vars(nn.Module()))
KINDS = (dict, defaultdict, OrderedDict, Counter, list, deque, set)


class Kept:
    """A container as it was: itself, and its items (containers, tensors and generators among them with their contents)."""

    def __init__(self, container: Any, above: tuple[int, ...] = ()):
        self.holder = container
        above = (*above, id(container))
        items = container.items() if isinstance(container, dict) else enumerate(container)
        self.items = [(key, item if id(item) in above else _keep(item, above)) for key, item in items]

    @property
    def is_changed(self) -> bool:
        """Whether it has other items now."""
        now = list(self.holder.items() if isinstance(self.holder, dict) else enumerate(self.holder))
        before = [(key, item.holder if isinstance(item, (Kept, Written)) else item) for key, item in self.items]
        same = len(now) == len(before) and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(now, before, strict=True))
        return not same or any(item.is_changed for _, item in self.items if isinstance(item, (Kept, Written)))

    def restore(self) -> object:
        """Puts the items back into the container and returns it."""
        items = [(key, item.restore() if isinstance(item, (Kept, Written)) else item) for key, item in self.items]
        self.holder.clear()
        if isinstance(self.holder, dict):
            for key, item in items:  # not by `update`, which counts in a Counter
                self.holder[key] = item
        elif isinstance(self.holder, set):
            self.holder.update(item for _, item in items)
        else:
            self.holder.extend(item for _, item in items)
        return self.holder


def _is_small_container(value: Any) -> bool:
    return type(value) in KINDS and len(value) < LARGE  # a subclass, e.g. a ModelOutput, may refuse to be written


class Written:
    """A tensor or generator as it was, put back only if somebody wrote it."""

    def __init__(self, holder: Tensor | torch.Generator):
        self.holder = holder
        self.value = holder.detach().clone() if isinstance(holder, Tensor) else holder.get_state()
        self.version = write_count(holder) if isinstance(holder, Tensor) else None

    @property
    def is_changed(self) -> bool:
        if isinstance(self.holder, torch.Generator):
            return not torch.equal(self.holder.get_state(), self.value)
        return write_count(self.holder) != self.version

    @torch.no_grad()
    def restore(self) -> object:
        """Puts the value back and returns what holds it."""
        if isinstance(self.holder, torch.Generator):
            self.holder.set_state(self.value)
        elif write_count(self.holder) != self.version:
            self.holder.copy_(self.value)
        return self.holder


def _can_be_written(value: Any) -> bool:
    if isinstance(value, torch.Generator):
        return True
    plain = type(value) is Tensor and value.layout is torch.strided and not value.is_inference()
    return plain and not value.requires_grad and value.numel() < LARGE


def _keep(value: Any, above: tuple[int, ...] = ()) -> object:
    """Returns what keeps the contents of a value, the value itself if it has none that can be put back."""
    if _is_small_container(value):
        return Kept(value, above)
    return Written(value) if _can_be_written(value) else value


class KeptAttributes:
    """The attributes of an object as they were: the contents of some, the others by reference, and some not at all."""

    def __init__(self, owner: Any, by_reference: Collection[str] = (), ignored: Collection[str] = ()):
        self.owner = owner
        self.ignored = {*ignored}
        self.before = {name: value for name, value in vars(owner).items() if name not in self.ignored}
        own = [value for name, value in self.before.items() if name not in by_reference]
        self.contents: list[Kept | Written] = [
            kept for value in own if isinstance(kept := _keep(value), (Kept, Written))
        ]

    @property
    def _added(self) -> set[str]:
        return vars(self.owner).keys() - self.before.keys() - self.ignored

    @property
    def is_changed(self) -> bool:
        """Whether an attribute, or the contents of one, is another one now."""
        replaced = any(vars(self.owner).get(name, self) is not value for name, value in self.before.items())
        return replaced or bool(self._added) or any(kept.is_changed for kept in self.contents)

    def restore(self) -> None:
        """Puts all of them back."""
        for name in self._added:
            delattr(self.owner, name)
        for name, value in self.before.items():
            if vars(self.owner).get(name, self) is not value:
                setattr(self.owner, name, value)
        for kept in self.contents:
            kept.restore()


def keep_module(module: nn.Module) -> KeptAttributes:
    """Keeps what a module holds beside parameters, buffers, modules and hooks. A tensor with a graph is not held, because it
    is an activation of the last step."""
    values = vars(module).items()
    activations = [name for name, value in values if isinstance(value, Tensor) and value.requires_grad]
    return KeptAttributes(module, ignored=(*MODULE, *activations))


@contextmanager
def untouched_modules(model: nn.Module) -> Iterator[None]:
    """Leaves what the modules of a model hold beside parameters, buffers, modules and hooks as it was before the block."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(untouched(module, MODULE))
        yield


@contextmanager
def untouched(owner: object, by_reference: Collection[str] = DATA) -> Iterator[None]:
    """Leaves the attributes of `owner`, and the contents of those not named, as they were before the block."""
    kept = KeptAttributes(owner, by_reference)
    try:
        yield
    finally:
        kept.restore()
