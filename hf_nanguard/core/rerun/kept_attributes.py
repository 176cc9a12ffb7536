"""Attributes of trainers and modules that a loss writes while it runs, kept so that they can be put back.

TRL's losses append to metric lists, count tokens and replace attributes; modules hold counters, caches and running means of
their own beside parameters and buffers. Attributes are put back by reference; the contents of small containers, small
tensors and generators (of torch, Python and NumPy), also those inside containers, by value.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from ...own_fields import own_fields
from ..rng import Generator, OwnGenerator, is_generator
from ..torch_private import write_count

DATA = ("train_dataset", "eval_dataset", "callback_handler", "_eval_dataloaders")
LARGE = 100_000
MAX_DEPTH = 8  # of containers inside containers
MOST_ENTRIES = 1_000  # of a container that a loss writes, with those inside it; larger ones would be copied each step
MODULE = tuple(own_fields(nn.Module()))
KINDS = (dict, defaultdict, OrderedDict, Counter, list, deque, set)


class Kept:
    """A container as it was: itself, and its items (containers, tensors and generators among them with their contents)."""

    def __init__(self, container: Any, above: tuple[int, ...] = ()):
        self.holder = container
        above = (*above, id(container))
        items = _list_items(container)
        self.items = [(key, item if id(item) in above else _keep(item, above)) for key, item in items]

    @property
    def is_changed(self) -> bool:
        """Whether it has other items now."""
        now = _list_items(self.holder)
        before = [(key, item.holder if isinstance(item, (Kept, Written)) else item) for key, item in self.items]
        # By identity: keys may be tensors.
        same = len(now) == len(before) and all(a is c and b is d for (a, b), (c, d) in zip(now, before, strict=True))
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


def _list_items(container: Any) -> list[tuple[object, Any]]:
    """Returns keys and values of a dictionary; the entries of another container have no keys."""
    return list(container.items()) if isinstance(container, dict) else [(None, item) for item in container]


def _is_small_container(value: Any) -> bool:
    return type(value) in KINDS and len(value) < LARGE  # a subclass, e.g. a ModelOutput, may refuse to be written


class Written:
    """A tensor or generator as it was, put back only if somebody wrote it."""

    def __init__(self, holder: Tensor | Generator):
        self.holder = holder
        self.generator = None if isinstance(holder, Tensor) else OwnGenerator(holder)
        self.value = holder.detach().clone() if isinstance(holder, Tensor) else None
        self.version = write_count(holder) if isinstance(holder, Tensor) else None

    @property
    def is_changed(self) -> bool:
        if isinstance(self.holder, Tensor):
            return write_count(self.holder) != self.version
        return self.generator is not None and self.generator.is_changed

    @torch.no_grad()
    def restore(self) -> object:
        """Puts the value back and returns what holds it."""
        if self.generator is not None:
            self.generator.restore()
        elif isinstance(self.holder, Tensor) and self.value is not None and self.is_changed:
            self.holder.copy_(self.value)
        return self.holder


def _can_be_written(value: Any) -> bool:
    if is_generator(value):
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

    def __init__(
        self,
        owner: Any,
        by_reference: Collection[str] = (),
        ignored: Collection[str] = (),
        only: Collection[str] | None = None,
        restored: Collection[str] | None = None,
    ):
        self.owner = owner
        self.ignored = {*ignored}
        self.restored = restored  # read when something is put back; all if `None`
        self.only = None if only is None else {*only}
        self.before = {name: value for name, value in own_fields(owner).items() if self._is_kept(name)}
        kept = {name: _keep(value) for name, value in self.before.items() if name not in by_reference}
        self.contents = {name: each for name, each in kept.items() if isinstance(each, (Kept, Written))}

    def _is_kept(self, name: str) -> bool:
        return name not in self.ignored and (self.only is None or name in self.only)

    @property
    def changed(self) -> set[str]:
        """The names of attributes that are others now, or have other contents."""
        now = own_fields(self.owner)
        added = {name for name in now if self._is_kept(name)} - self.before.keys()
        replaced = {name for name, value in self.before.items() if now.get(name, self) is not value}
        return added | replaced | {name for name, kept in self.contents.items() if kept.is_changed}

    def restore(self, only: Collection[str] | None = None) -> None:
        """Puts all of them back, or only some: where they were read from, because an object may refuse to be written, or do more
        than that (a frozen dataclass, a `__setattr__` that counts)."""
        values = own_fields(self.owner)
        is_class = isinstance(self.owner, type)  # whose fields can only be read
        put = partial(type.__setattr__, self.owner) if is_class else values.__setitem__
        remove = partial(type.__delattr__, self.owner) if is_class else values.__delitem__
        only = self.restored if only is None else only
        for name in self.changed if only is None else self.changed & {*only}:
            if name not in self.before:
                remove(name)
                continue
            if values.get(name, self) is not self.before[name]:
                put(name, self.before[name])
            if name in self.contents:
                self.contents[name].restore()


class WatchedAttributes:
    """The attributes of an object that one function writes, where others write other attributes of it.

    Which ones the function writes is learned from its calls in the first group; only these are kept and put back, as long as they
    are numbers, texts, generators, small tensors or small containers of those. Outputs of the model, objects and long lists are
    neither held nor copied.
    """

    def __init__(self, owner: Any, ignored: Collection[str] = ()):
        self.owner = owner
        self.ignored = {*ignored}
        self.written: set[str] = set()
        self.kept: KeptAttributes | None = None  # as they were before the first call in this group
        self.learns = True
        self.has_returned = False  # what it writes is known, unless it has always raised
        self._before: KeptAttributes | None = None  # the call of now

    def begin_group(self) -> None:
        """Begins another group of calls."""
        self.learns = self.learns and not self.has_returned
        self.kept = None

    def begin_call(self) -> None:
        """Keeps what the function may write, which is about to be called."""
        self._before = self.copy() if self.learns else None
        if self.kept is None:
            self.kept = self._before or self.copy()

    def end_call(self, has_returned: bool) -> None:
        """Learns what the function has written, which may have raised."""
        self.has_returned |= has_returned
        if self._before is not None:
            self.written |= self._before.changed
            self._before = None

    def copy(self) -> KeptAttributes:
        """Returns the attributes that the function writes, as they are now; what these are may be known only when they are put
        back."""
        values = own_fields(self.owner)
        names = {*values} if self.learns else self.written & values.keys()
        large = {name for name in names if not _is_plain_state(values[name])}
        return KeptAttributes(
            self.owner,
            ignored=self.ignored | large,
            only=None if self.learns else self.written,
            restored=self.written,
        )

    def restore(self) -> None:
        """Puts back what the function has written in this group."""
        if self.kept is not None:
            self.kept.restore()


def _is_plain_state(value: object) -> bool:
    return _count_entries(value) <= MOST_ENTRIES


def _count_entries(value: Any, depth: int = 0) -> int:
    """Returns how many entries a value has, with those of containers inside; more than the most if it is anything else than
    plain state."""
    if value is None or isinstance(value, (str, bytes, Number)) or _can_be_written(value):
        return 1
    if type(value) not in KINDS or len(value) > MOST_ENTRIES or depth > MAX_DEPTH:
        return MOST_ENTRIES + 1
    number = 1
    for _, item in _list_items(value):
        number += _count_entries(item, depth + 1)
        if number > MOST_ENTRIES:
            break
    return number


def keep_module(module: nn.Module) -> KeptAttributes:
    """Keeps what a module holds beside parameters, buffers, modules and hooks. A tensor with a graph is not held, because it
    is an activation of the last step."""
    values = own_fields(module).items()
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
def untouched(owner: object, by_reference: Collection[str] = DATA, ignored: Collection[str] = ()) -> Iterator[None]:
    """Leaves the attributes of `owner` that are not ignored, and the contents of those not named, as they were before the
    block."""
    kept = KeptAttributes(owner, by_reference, ignored)
    try:
        yield
    finally:
        kept.restore()
