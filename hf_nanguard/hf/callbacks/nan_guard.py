"""The guard as one callback in a list: it finds the trainer that calls it, and guards it as [`attach`] does."""

import logging
import weakref
from typing import Any

from transformers import Trainer, TrainerCallback

from ..compat.trainer import find_trainer
from ..compat.training_loop import find_own_loop, find_own_super
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
        self._asked = weakref.ref(trainer)
        cls = type(trainer)
        loop, closed = find_own_loop(cls), find_own_super(cls)
        if not loop and not closed:
            attach(trainer, self.arguments)
            return
        trainer.add_callback(ReducedGuard(self.arguments))
        if trainer.args.process_index == 0:
            own_loop = f"its {', '.join(loop)} runs a training loop of its own"
            why = own_loop if loop else f"its {', '.join(closed)} calls super(type(self), self)"
            logger.warning(
                "hf_nanguard: %s is guarded in a reduced way because %s: a step with a non-finite gradient is skipped as a "
                "whole and reported. Rows, redo, autopsies, and checks of labels and inputs need the loop of transformers.",
                cls.__name__,
                why,
            )
