"""Copies and pickles of a guarded trainer contain the trainer's original class, because the guarded class cannot be imported."""

import copyreg
from collections.abc import Callable
from functools import partial
from typing import Any, SupportsIndex


def reduce_as(original: Any) -> Callable[[object, SupportsIndex], str | tuple]:
    """Returns a `__reduce_ex__` that reduces an instance of a guarded class as one of its original class."""

    from ..hf.trainer.guarded_class import OURS, without_attributes

    def __reduce_ex__(trainer: object, protocol: SupportsIndex) -> str | tuple:  # noqa: N807 - it becomes the method of that name
        reduced = original.__reduce_ex__(trainer, protocol)
        if isinstance(reduced, str):
            return reduced
        function, args, *rest = reduced
        args = tuple(original if value is type(trainer) else value for value in args)
        if rest:
            rest[0] = without_attributes(rest[0], OURS)
        if function is copyreg.__newobj__:  # type: ignore[attr-defined] # pickle would check that the class is the same
            function = partial(function)
        return (function, args, *rest)

    return __reduce_ex__


def restore_state(trainer: Any, state: object) -> None:
    """Restores the state of an object as `copy` and `pickle` do."""
    if hasattr(type(trainer), "__setstate__"):
        trainer.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    trainer.__dict__.update(attributes or {})
    for name, value in (slots or {}).items():
        setattr(trainer, name, value)
