"""The guarded `Trainer`, and how any other trainer class or instance becomes guarded."""

import logging
from functools import cache
from typing import Any

from transformers import Trainer

from ..errors import ArgumentError
from .rl.rl_mixin import ReinforcementMixin
from .trainer.arguments import Given, read_guard_arguments
from .trainer.guarded_class import MADE_HERE
from .trainer.mixin import GuardedTrainerMixin

logger = logging.getLogger("hf_nanguard")


class GuardedTrainer(GuardedTrainerMixin, Trainer):
    """[`~transformers.Trainer`] with the guard; same constructor, plus `guard`."""


@cache
def guarded(trainer_class: Any) -> type:
    """Returns a guarded subclass of any Trainer class: DPO, KTO, RLOO, Reward, Distillation, Seq2Seq, your own.

    Args:
        trainer_class (`type[Trainer]`):
            The class to guard. A guarded one is returned as it is.

    Example:

    ```python
    trainer = guarded(DPOTrainer)(model, args=DPOConfig(...), train_dataset=dataset)
    ```
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise ArgumentError(f"guarded() must be given a Trainer class, got {trainer_class!r}.")
    if issubclass(trainer_class, GuardedTrainerMixin):
        return trainer_class
    generates = hasattr(trainer_class, "_generate_and_score_completions")  # the mark of TRL's online trainers
    mixin = ReinforcementMixin if generates else GuardedTrainerMixin
    body = {"__doc__": f"`{trainer_class.__name__}` with the guard.", "__module__": trainer_class.__module__}
    return type(
        f"Guarded{trainer_class.__name__}", (mixin, trainer_class), {**body, MADE_HERE: (guarded, trainer_class)}
    )


def attached_class(original: Any) -> type:
    """Returns the class of a trainer that was guarded by [`attach`]. A script that asks for its `__class__` gets the original."""
    body = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__class__": property(lambda trainer: original, vars(object)["__class__"].__set__),
        MADE_HERE: (attached_class, original),
    }
    return type(original.__name__, (guarded(original),), body)


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
        trainer.needs_callback = False
        if guard is not None:
            trainer.begin_guarding(guard)
        return trainer
    trainer.__class__ = attached_class(type(trainer))
    trainer.begin_guarding(guard)  # type: ignore[attr-defined]
    return trainer
