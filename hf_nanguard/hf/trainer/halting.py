"""Ends a guarded run early, in order: the last good state is saved, and a sentence says where."""

import logging
from pathlib import Path

from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...core.step.guard import Guard
from ...errors import NonFiniteError
from ..compat.trainer_protocol import HostTrainer
from .checkpoint_custody import CheckpointCustody

logger = logging.getLogger("hf_nanguard")


class Halting:
    """Ends a run."""

    def __init__(self, trainer: HostTrainer, guard: Guard, custody: CheckpointCustody):
        self.trainer = trainer
        self.guard = guard
        self.custody = custody
        self.saves = True

    def save_nothing(self) -> None:
        """Makes a halt save no state: a measured run leaves no weights behind."""
        self.saves = False

    def may_save(self, model: nn.Module) -> bool:
        """Returns whether weights and optimizer state are finite, so that a checkpoint may be saved. If not, the run ends."""
        reason = self.guard.monitor_set.check_before_save(self.trainer.state.global_step)
        if reason is not None:
            self.halt(model, reason)
        return reason is None

    def halt(self, model: nn.Module, message: str) -> None:
        """Saves the last good state and ends the run, by an error or a clean stop. Every rank must call it."""
        trainer, ranks = self.trainer, self.guard.ranks
        folder = Path(str(trainer.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        last_good = self.custody.last_good
        bad_weights = ranks.any(bool(self.custody.find_bad_weights()))
        if bad_weights or ranks.any(not self.guard.monitor_set.is_sound()):
            what = "weights contain" if bad_weights else "optimizer state or a buffer contains"
            message += f" No checkpoint was saved because the {what} NaN or inf."
            if last_good is not None:
                message += f" The last good checkpoint is {last_good}."
        elif trainer.is_in_train and self.saves:  # else there is no optimizer to save
            # a folder of that name may belong to an earlier run
            if last_good != folder or not ranks.any(folder.is_dir()):
                trainer._save_checkpoint(model, None)
            message += f" The last good state is in {folder}."
        first, earlier = self.guard.escalation.first_bad_step, self.custody.find_earlier(folder)
        if first is not None and earlier is not None:
            message += (
                f" The first of the bad steps is {first}; resume from {earlier}, the last checkpoint from before it."
            )
        self.stop(model, message)

    def stop(self, model: nn.Module, message: str) -> None:
        """Ends the run as it is."""
        logger.error("hf_nanguard: %s", message)
        if self.guard.policy.on_halt == "raise":
            raise NonFiniteError(message)
        self.trainer.control.should_training_stop = True
