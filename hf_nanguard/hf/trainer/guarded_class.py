"""How a guarded class sits on top of a host's: hidden from the user's registries, and never entered twice.

A host's method may be replaced by something that calls the trainer's again: `patch.object(SFTTrainer, "training_step",
wraps=trainer.training_step)` is how one observes a trainer in a test. If the trainer was guarded afterwards by
[`attach`], the replaced method is below ours, and what it wraps is ours.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

MADE_HERE = "nanguard_made_here"
"""Marks the body of a class that is made here. A keyword of the class is no alternative: few metaclasses accept one."""


def is_made_here(cls: type) -> bool:
    """Returns whether a class was made by `guarded` or `attach`, whatever module it claims to be from."""
    return MADE_HERE in vars(cls)


class Stealth:
    """Hides a class that is made here from `__init_subclass__` of the classes after it, which may be a registry."""

    def __init_subclass__(cls, **kwargs: Any):
        if MADE_HERE not in vars(cls):
            super().__init_subclass__(**kwargs)


class HostMethods:
    """The host's own methods as they were when its trainer became guarded.

    Args:
        trainer (`Trainer`):
            The guarded trainer.
        mixin (`type`):
            The class below which the host begins.
    """

    def __init__(self, trainer: Any, mixin: type):
        order = type(trainer).__mro__
        self._classes = order[order.index(mixin) + 1 :]
        self._found: dict[str, Any] = {}
        for host in reversed(self._classes):
            self._found.update(vars(host))
        self.entered: set[str] = set()

    def is_replaced(self, name: str) -> bool:
        """Returns whether somebody has put something else in the place of a method since."""
        now = next(vars(host)[name] for host in self._classes if name in vars(host))
        return now is not self._found[name]

    def call(self, trainer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method as it was."""
        return self._found[name](trainer, *args, **kwargs)


def entered_once(method: Callable[..., Any]) -> Any:
    """Makes an override of the mixin go on to the host's own method if the one that replaced it has come back to us."""
    name = method.__name__

    @wraps(method)
    def call(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        host: HostMethods = trainer.nanguard.host
        if name not in host.entered:
            host.entered.add(name)
            try:
                return method(trainer, *args, **kwargs)
            finally:
                host.entered.discard(name)
        if host.is_replaced(name):
            return host.call(trainer, name, *args, **kwargs)
        return method(trainer, *args, **kwargs)

    return call
