"""How a guarded trainer is copied and pickled: as the trainer it was before, for its class is found nowhere."""

import copyreg
from collections.abc import Callable
from functools import partial
from typing import Any


def reduce_as(original: Any) -> Callable[[Any, Any], Any]:
    """Returns a `__reduce_ex__` that describes an instance of a guarded class as one of the class it came from.

    Args:
        original (`type`):
            That class, which a pickle can name.
    """

    def __reduce_ex__(trainer: Any, protocol: Any) -> Any:  # noqa: N807 - it becomes the method of that name
        made = original.__reduce_ex__(trainer, protocol)
        if isinstance(made, str):
            return made
        function, given, *rest = made
        given = tuple(original if value is type(trainer) else value for value in given)
        if rest:
            rest[0] = _leave_out(rest[0])
        if function is copyreg.__newobj__:  # type: ignore[attr-defined] # pickle would see that the class is another one
            function = partial(function)
        return (function, given, *rest)

    return __reduce_ex__


def _leave_out(state: Any) -> Any:
    if isinstance(state, tuple):  # of a class with slots
        return (_leave_out(state[0]), *state[1:])
    return {name: value for name, value in state.items() if name != "nanguard"} if isinstance(state, dict) else state


def restore_state(trainer: Any, state: Any) -> None:
    """Does what `copy` and `pickle` do with the state of an object of this class."""
    if any("__setstate__" in vars(owner) for owner in type(trainer).__mro__):
        trainer.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    vars(trainer).update(attributes or {})
    for name, value in (slots or {}).items():
        setattr(trainer, name, value)
