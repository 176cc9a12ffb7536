"""The guard as one callback in a list: it finds the trainer that calls it, and guards it as [`attach`] does."""

import logging
import weakref
from typing import cast

from transformers import Trainer, TrainerCallback

from ..attach_guard import attach_if_possible
from ..compat.trainer import find_trainer
from ..compat.unguardable_class import find_obstacle
from ..trainer.arguments import Given, read_guard_arguments
from ..trainer.mixin import GuardedTrainerMixin
from .harmless_callback import HarmlessCallback, harmless
from .reduced_guard import ReducedGuard

logger = logging.getLogger("hf_nanguard")


@harmless
class NanGuardCallback(HarmlessCallback):
    """Guards the trainer it is added to: exactly what [`attach`] does, in the constructor's list or by `add_callback`.

    A training loop other than that of transformers is guarded in a reduced way, which is logged once: a step with a
    non-finite gradient is skipped as a whole and reported, with the parameters named. If the callback is removed, the next
    `train()` is not guarded.

    Args:
        guard (`GuardArguments` or `dict`, *optional*):
            The settings; taken from guarded training arguments or the defaults otherwise.

    It adds the same `nanguard/` metrics to log rows as [`GuardedTrainerMixin`].

    Example:

    ```python
    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[NanGuardCallback()])
    ```
    """

    def __init__(self, guard: Given = None):
        self.arguments = read_guard_arguments(guard)
        self._obstacle: str | None = None  # why the trainer is guarded in a reduced way

    _of_one_trainer = (*HarmlessCallback._of_one_trainer, "_asked", "_reduced")
    _asked: weakref.ref[Trainer] | None = None  # that trainer
    _reduced: TrainerCallback = TrainerCallback()  # its guard during a run

    def on_init_end(self, args, state, control, **kwargs):
        self._guard(find_trainer())

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.on_train_end(args, state, control)
        self._guard(find_trainer())
        if self._obstacle is not None and model is not None:
            self._reduced = ReducedGuard(self.arguments)
            self._reduced.on_train_begin(args, state, control, model=model, **kwargs)
        elif self._obstacle is not None:
            logger.warning(
                "hf_nanguard: nothing is guarded because the training loop passes no model to its callbacks."
            )

    def on_step_begin(self, args, state, control, **kwargs):
        self._reduced.on_step_begin(args, state, control, **kwargs)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._reduced.on_pre_optimizer_step(args, state, control, **kwargs)

    def on_step_end(self, args, state, control, **kwargs):
        self._reduced.on_step_end(args, state, control, **kwargs)

    def on_train_end(self, args, state, control, **kwargs):
        self._reduced.on_train_end(args, state, control, **kwargs)
        self._reduced = TrainerCallback()

    def _guard(self, trainer: Trainer | None) -> None:
        """Guards a trainer, once; if that cannot be, says what is guarded in its place."""
        if isinstance(trainer, GuardedTrainerMixin) and self in trainer.asked_by:
            self._obstacle = None
            return
        if trainer is not None and self._asked is not None and self._asked() is trainer:
            return
        said, self._obstacle = self._obstacle, self._find_obstacle(trainer)
        self._asked = None if trainer is None or self._obstacle is None else weakref.ref(trainer)
        if self._obstacle is not None and (trainer is not None or said != self._obstacle):
            logger.warning(
                "hf_nanguard: %s is guarded in a reduced way because %s: if the loop calls on_step_begin before the forward "
                "and on_pre_optimizer_step before the optimizer, a step with a non-finite gradient is skipped as a whole and "
                "reported. Rows, redo, autopsies, and checks of labels and inputs need the loop of transformers.",
                "the model" if trainer is None else type(trainer).__name__,
                self._obstacle,
            )

    def _find_obstacle(self, trainer: Trainer | None) -> str | None:
        """Attaches the guard; returns why that cannot be, `None` if it is done."""
        if trainer is None:
            return "the loop that calls NanGuardCallback is not that of a Trainer"
        needs_callback = trainer.needs_callback if isinstance(trainer, GuardedTrainerMixin) else True
        obstacle = find_obstacle(trainer) or attach_if_possible(trainer, self.arguments)
        if obstacle is None:
            cast(GuardedTrainerMixin, trainer).note_request(self, needs_callback)
        return obstacle
