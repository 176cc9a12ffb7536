"""Running a trainer's loss again without leaving anything behind in its books.

TRL's losses append to metric lists, count tokens and replace attributes while they run. Attributes are put back by
reference and the contents of small containers by value; tensors are never copied.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DATA = ("train_dataset", "eval_dataset", "callback_handler", "_eval_dataloaders")
LARGE = 100_000
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


@contextmanager
def untouched(owner: Any) -> Iterator[None]:
    """Leaves the attributes of `owner`, and the containers among them, as they were before the block."""
    before = dict(vars(owner))
    kept = [Kept(value) for name, value in before.items() if _is_small_container(value) and name not in DATA]
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
