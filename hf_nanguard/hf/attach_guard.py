"""`attach(trainer)`: guards a trainer that is already built."""

import logging
from typing import Any

from transformers import Trainer

from ..errors import ArgumentError
from ..own_fields import own_fields
from ..plain_text import format_error
from .guarded_trainer import guarded
from .trainer.arguments import Given, read_guard_arguments
from .trainer.guarded_class import MADE_HERE
from .trainer.mixin import GuardedTrainerMixin

logger = logging.getLogger("hf_nanguard")


def attached_class(original: Any) -> type:
    """Returns the class of a trainer that was guarded by [`attach`]. A script that asks for its `__class__` gets the original."""
    body = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__class__": property(lambda trainer: original, own_fields(object)["__class__"].__set__),
        MADE_HERE: (attached_class, original),
    }
    return type(original.__name__, (guarded(original),), body)


def attach_if_possible(trainer: Trainer, guard: Given) -> str | None:
    """Guards a trainer as [`attach`] does; if its class refuses that, leaves it as it was and returns why."""
    cls = type(trainer)
    try:
        attach(trainer, guard)
    except (TypeError, AttributeError) as error:  # a metaclass, or slots, of the user's
        trainer.__class__ = cls
        return f"its class cannot be changed ({format_error(error)})"
    return None


def attach(trainer: Trainer, guard: Given = None) -> Trainer:
    """Guards a trainer that is already built: one line, everything on.

    Args:
        trainer (`Trainer`):
            Any trainer, before `train()`. Its type becomes a guarded subclass of the same name; its `__class__` stays.
        guard (`GuardArguments` or `dict`, *optional*):
            The settings, or their fields by name; taken from its arguments or the defaults otherwise.

    Returns:
        `Trainer`: the same object.

    Example:

    ```python
    trainer = SFTTrainer(model, args=args, train_dataset=dataset)
    attach(trainer)
    trainer.train()
    ```
    """
    if not isinstance(trainer, Trainer):
        raise ArgumentError(
            f"attach() must be given a Trainer, got {type(trainer).__name__}. For other loops use Guard."
        )
    guard = read_guard_arguments(guard)
    if isinstance(trainer, GuardedTrainerMixin):
        kept = "stay as they are" if guard is None else "are replaced by those given now"
        logger.warning("hf_nanguard: this trainer is guarded already; its settings %s.", kept)
        trainer.note_request()
        if guard is not None:
            trainer.begin_guarding(guard)
        return trainer
    trainer.__class__ = attached_class(type(trainer))
    trainer.begin_guarding(guard)  # type: ignore[attr-defined]
    return trainer
