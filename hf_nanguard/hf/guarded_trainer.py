"""The guarded `Trainer`, and how any other trainer class becomes guarded."""

from functools import cache

from transformers import Trainer

from ..errors import ArgumentError
from .compat.unguardable_class import find_own_super
from .rl.rl_mixin import ReinforcementMixin
from .trainer.guarded_class import MADE_HERE
from .trainer.mixin import GuardedTrainerMixin


class GuardedTrainer(GuardedTrainerMixin, Trainer):
    """[`~transformers.Trainer`] with the guard; same constructor, plus `guard`."""


def generates(trainer_class: type) -> bool:
    """Returns whether a Trainer class is one of TRL's online trainers, by its mark."""
    return hasattr(trainer_class, "_generate_and_score_completions")


@cache
def guarded(trainer_class: object) -> type:
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
    if closed := find_own_super(trainer_class):
        raise ArgumentError(
            f"{trainer_class.__name__} cannot be guarded: its {', '.join(closed)} calls super(type(self), self), which never ends "
            "in a subclass. Write super() there."
        )
    mixin = ReinforcementMixin if generates(trainer_class) else GuardedTrainerMixin
    body = {"__doc__": f"`{trainer_class.__name__}` with the guard.", "__module__": trainer_class.__module__}
    return type(
        f"Guarded{trainer_class.__name__}", (mixin, trainer_class), {**body, MADE_HERE: (guarded, trainer_class)}
    )
