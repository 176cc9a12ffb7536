"""The guarded SFT trainer and its config."""

from dataclasses import dataclass

from trl import SFTConfig, SFTTrainer

from .trainer.arguments import GuardArguments
from .trainer.mixin import GuardedTrainerMixin


@dataclass
class GuardedSFTConfig(GuardArguments, SFTConfig):
    """[`~trl.SFTConfig`] with the settings of the guard; all other defaults are TRL's."""


class GuardedSFTTrainer(GuardedTrainerMixin, SFTTrainer):
    """[`~trl.SFTTrainer`] with the guard; same constructor, plus `guard`."""
