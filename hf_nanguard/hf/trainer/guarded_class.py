"""How a guarded class sits on top of a host's: hidden from registries, signatures and pickles, and never entered twice.

A host's method may be replaced by something that calls the trainer's again: `patch.object(SFTTrainer, "training_step",
wraps=trainer.training_step)` is how one observes a trainer in a test. If the trainer was guarded afterwards by
[`attach`], the replaced method is below ours, and what it wraps is ours.
"""

import inspect
from collections.abc import Callable
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from ...own_fields import own_fields

MADE_HERE = "nanguard_made_here"
"""Marks the body of a class that is made here: the function that makes it, and the class it is made of. A keyword of the
class is no alternative: few metaclasses accept one."""


OURS = ("nanguard", "given_guard", "asked_by", "needs_callback")
"""What the guard adds to the attributes of a trainer."""


def is_made_here(cls: type) -> bool:
    """Returns whether a class was made by `guarded` or `attach`, whatever module it claims to be from."""
    return MADE_HERE in own_fields(cls)


class Stealth:
    """Hides a class that is made here from `__init_subclass__` of the classes after it, which may be a registry."""

    def __init_subclass__(cls, **kwargs: object):
        if MADE_HERE not in own_fields(cls):
            super().__init_subclass__(**kwargs)


class HostMethods:
    """The methods of the host, whose classes come after `mixin`, as they were when its trainer became guarded."""

    def __init__(self, trainer: object, mixin: type):
        order = type(trainer).__mro__
        self._classes = order[order.index(mixin) + 1 :]
        self._found: dict[str, Any] = {}
        for host in reversed(self._classes):
            self._found.update(own_fields(host))
        self.entered: set[str] = set()

    def find_replaced(self, name: str) -> Callable[..., object] | None:
        """Returns a method of the host if somebody has put something else in its place since, `None` otherwise."""
        now = next(own_fields(host)[name] for host in self._classes if name in own_fields(host))
        return None if now is self._found[name] else self._found[name]

    def find_hidden(self, trainer: object) -> list[str]:
        """Returns which methods of the mixin are never called, because a subclass or somebody else has put another there."""
        fields = [field for owner in type(trainer).__mro__ for field in own_fields(owner).items()]
        ours = {name for name, value in fields if isinstance(value, Override)}
        return sorted(name for name in ours if not isinstance(inspect.getattr_static(trainer, name), Override))


class Override:
    """A method of the mixin, with the signature and the documentation of the host's method it stands in for."""

    def __init__(self, method: Callable[..., object], added: tuple[inspect.Parameter, ...] = ()):
        self.method = method
        self.added = added
        self.name = method.__name__
        self._shown: WeakKeyDictionary[type, FunctionType] = WeakKeyDictionary()

    def __set_name__(self, mixin: type, name: str) -> None:
        self.mixin = mixin

    def __get__(self, trainer: object, cls: type) -> object:
        if cls not in self._shown:
            self._shown[cls] = self._show(getattr(super(self.mixin, cls), self.name, self.method))
        return self._shown[cls] if trainer is None else MethodType(self._shown[cls], trainer)

    def _show(self, host: Callable[..., object]) -> Any:
        @wraps(host)
        def call(trainer: object, /, *args: object, **kwargs: object) -> object:
            return self.method(trainer, *args, **kwargs)

        signature = inspect.signature(host)
        added = [parameter for parameter in self.added if parameter.name not in signature.parameters]
        parameters = sorted([*signature.parameters.values(), *added], key=lambda parameter: parameter.kind)
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return call


def entered_once(method: Callable[..., object]) -> Any:
    """Makes an [`Override`] of `method(trainer, guard, host, /, ...)`, which gets the trainer's guard and calls the host's method as
    `host`, behind the boundary. It goes on to the host's own method if the one that replaced it has come back to us."""
    name = method.__name__

    @wraps(method)
    def call(trainer: Any, /, *args: object, **kwargs: object) -> object:
        if not hasattr(type(trainer), "nanguard"):  # somebody has kept the method since before `detach`
            return getattr(type(trainer), name)(trainer, *args, **kwargs)
        guard, below = trainer.nanguard, getattr(super(override.mixin, trainer), name)
        if guard is None:  # it could not be built
            return below(*args, **kwargs)
        host: HostMethods = guard.host
        is_first = name not in host.entered
        if not is_first and (replaced := host.find_replaced(name)) is not None:
            return replaced(trainer, *args, **kwargs)
        host.entered.add(name)
        try:
            return guard.boundary.around(name, partial(method, trainer, guard), below, *args, **kwargs)
        finally:
            if is_first:
                host.entered.discard(name)

    override = Override(call)
    return override


def takes_also(*added: inspect.Parameter) -> Callable[[Callable[..., object]], Any]:
    """Makes an [`Override`] that takes more parameters than the host's method."""
    return lambda method: Override(method, added)


def detach(trainer: object) -> None:
    """Makes a trainer that was guarded by [`attach`] one of its original class again."""
    _, trainer.__class__ = own_fields(type(trainer))[MADE_HERE]
    for name in OURS:
        own_fields(trainer).pop(name, None)


# ---- copies and pickles ----


class ItsClass:
    """Stands for the class of a trainer among the arguments of [`rebuild`]: a class that is made here cannot be imported."""


def rebuild(make: Callable[[type], type], original: type, function: object, *args: Any) -> object:
    """Builds a copy of a guarded trainer, still without its state: `function(*args)`, of the class `make(original)`."""
    cls = make(original)
    function, *args = (cls if value is ItsClass else value for value in (function, *args))  # type: ignore[assignment]
    return function(*args)


def reduce_guarded(cls: type, reduced: str | tuple) -> str | tuple:
    """Returns how `copy` and `pickle` build a guarded trainer again, given how they would build one of the host's: without
    the guard, which acts on the trainer it was made for. The copy gets its own when it first needs it."""
    if isinstance(reduced, str):
        return reduced
    function, args, *rest = reduced
    rest[:1] = [without_attributes(state, ("nanguard",)) for state in rest[:1]]
    if MADE_HERE not in own_fields(cls):
        return (function, args, *rest)
    make, original = own_fields(cls)[MADE_HERE]
    parts = [ItsClass if value is cls or value is original else value for value in (function, *args)]
    return (rebuild, (make, original, *parts), *rest)


def without_attributes(state: object, names: tuple[str, ...]) -> object:
    """Returns the state of an object, as `copy` and `pickle` get it, without some attributes."""
    if isinstance(state, tuple):  # of a class with slots
        return (without_attributes(state[0], names), *state[1:])
    return {name: value for name, value in state.items() if name not in names} if isinstance(state, dict) else state
