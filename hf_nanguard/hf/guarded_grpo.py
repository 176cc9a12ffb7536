"""The guarded GRPO trainer and its config."""

from dataclasses import dataclass

from trl import GRPOConfig, GRPOTrainer

from .rl.rl_mixin import ReinforcementMixin
from .trainer.arguments import GuardArguments


@dataclass
class GuardedGRPOConfig(GuardArguments, GRPOConfig):
    """[`~trl.GRPOConfig`] with the settings of the guard; all other defaults are TRL's."""


class GuardedGRPOTrainer(ReinforcementMixin, GRPOTrainer):
    """[`~trl.GRPOTrainer`] with the guard; same constructor, plus `guard`."""
