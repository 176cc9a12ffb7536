"""How a guarded run ends before its time: the last good state on disk, and a sentence that says where."""

import logging
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...core.monitors.weights import find_bad_weights
from ...core.step.guard import Guard
from ...errors import NonFiniteError

logger = logging.getLogger("hf_nanguard")


class Ending:
    """Ends a run, and sees to it that nothing bad is saved.

    Args:
        trainer (`Trainer`):
            The guarded trainer.
        guard (`Guard`):
            Its guard.
    """

    def __init__(self, trainer: Any, guard: Guard):
        self.trainer = trainer
        self.guard = guard
        self.last_good: Path | None = None
        self.saves = True  # a trial leaves no weights behind, not even those of its last good step

    def may_save(self, model: nn.Module) -> bool:
        """Looks at weights and optimizer state before a checkpoint is made of them; returns whether one may be. The run
        ends if not."""
        reason = self.guard.monitor_set.check_before_save(self.trainer.state.global_step)
        if reason is not None:
            self.halt(model, reason)
        return reason is None

    def halt(self, model: nn.Module, message: str) -> None:
        """Ends the run in order: the last good state saved, then an error or a clean stop. Every rank must call it."""
        trainer, ranks = self.trainer, self.guard.ranks
        folder = Path(str(trainer.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        bad_weights = ranks.any(bool(find_bad_weights(trainer.model)))
        if bad_weights or ranks.any(not self.guard.monitor_set.is_sound()):
            what = "weights themselves are" if bad_weights else "state of the optimizer, or a buffer, is"
            message += f" Nothing was saved, for the {what} not finite."
            if self.last_good is not None:
                message += f" The last good checkpoint is {self.last_good}."
        elif trainer.is_in_train and self.saves:  # else there is no optimizer to save, and nothing was trained
            # a folder of that name may be of an earlier run
            if self.last_good != folder or not ranks.any(folder.is_dir()):
                trainer._save_checkpoint(model, None)
            message += f" The last good state is in {folder}."
        logger.error("hf_nanguard: %s", message)
        if self.guard.policy.on_halt == "raise":
            raise NonFiniteError(message)
        trainer.control.should_training_stop = True
