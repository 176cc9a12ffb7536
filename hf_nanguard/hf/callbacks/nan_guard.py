"""The guard as one callback in a list: it finds the trainer that calls it, and guards it as [`attach`] does."""

import logging
import weakref
from typing import Any

from transformers import Trainer, TrainerCallback

from ...plain_text import format_error
from ..compat.trainer import find_trainer
from ..compat.unguardable_class import find_own_loop, find_own_super
from ..guarded_trainer import attach
from ..trainer.arguments import GuardArguments
from ..trainer.mixin import GuardedTrainerMixin
from .reduced_guard import ReducedGuard

logger = logging.getLogger("hf_nanguard")


class NanGuardCallback(TrainerCallback):
    """Guards the trainer it is added to: exactly what [`attach`] does, in the constructor's list or by `add_callback`.

    A trainer with a training loop of its own is guarded in a reduced way, which is logged once: a step with a non-finite
    gradient is skipped as a whole and reported, with the parameters named.

    Args:
        guard (`GuardArguments`, *optional*):
            The settings; taken from guarded training arguments or the defaults otherwise.

    It adds the same `nanguard/` metrics to log rows as [`GuardedTrainerMixin`].

    Example:

    ```python
    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[NanGuardCallback()])
    ```
    """

    def __init__(self, guard: GuardArguments | None = None):
        self.arguments = guard
        self._asked: weakref.ref[Trainer] | None = None  # the trainer that was guarded last

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_asked": None}  # a copy belongs to another trainer

    def on_init_end(self, args, state, control, **kwargs):
        self._guard(find_trainer())

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = find_trainer()
        self._guard(trainer)
        if isinstance(trainer, GuardedTrainerMixin):
            trainer.nanguard.join_run()

    def _guard(self, trainer: Trainer | None) -> None:
        """Guards a trainer, once."""
        if trainer is None or (self._asked is not None and self._asked() is trainer):
            return
        why_not = self._attach(trainer)
        self._asked = weakref.ref(trainer)
        if why_not is None:
            return
        trainer.add_callback(ReducedGuard(self.arguments))
        if trainer.args.process_index == 0:
            logger.warning(
                "hf_nanguard: %s is guarded in a reduced way because %s: a step with a non-finite gradient is skipped as a "
                "whole and reported. Rows, redo, autopsies, and checks of labels and inputs need the loop of transformers.",
                type(trainer).__name__,
                why_not,
            )

    def _attach(self, trainer: Trainer) -> str | None:
        """Attaches the guard; returns why that cannot be, `None` if it is done."""
        cls = type(trainer)
        if loop := find_own_loop(cls):
            return f"its {', '.join(loop)} runs a training loop of its own"
        if closed := find_own_super(cls):
            return f"its {', '.join(closed)} calls super(type(self), self)"
        try:
            attach(trainer, self.arguments)
        except (TypeError, AttributeError) as error:  # a metaclass, or slots, of the user's
            trainer.__class__ = cls
            return f"its class cannot be changed ({format_error(error)})"
        return None
