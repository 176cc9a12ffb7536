"""Ends a guarded run early, in order: the reason is logged, the last good state is saved, and a sentence says where."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...boundary import attempt
from ...core.event import Failure
from ...core.step.guard import Guard
from ...errors import NonFiniteError
from ...plain_text import format_error, show
from ..compat.trainer_protocol import HostTrainer
from .checkpoint_custody import CheckpointCustody

logger = logging.getLogger("hf_nanguard")


@dataclass(eq=False, repr=False)
class Halting:
    """Ends a run."""

    trainer: HostTrainer
    guard: Guard
    custody: CheckpointCustody

    def __post_init__(self) -> None:
        self.policy, self.monitor_set = self.guard.policy, self.guard.monitor_set
        self.recovery, self.escalation = self.guard.recovery, self.guard.escalation

    saves: bool = True

    def save_nothing(self) -> None:
        """Makes a halt save no state: a measured run leaves no weights behind."""
        self.saves = False

    def may_save(self, model: nn.Module) -> bool:
        """Returns whether weights and optimizer state are finite, so that a checkpoint may be saved. If not, the run ends."""
        failure = self.monitor_set.check_before_save(self.trainer.state.global_step)
        return failure is None or self.recover(model, failure, self.trainer.state.global_step)

    def recover(self, model: nn.Module, failure: Failure, step: int, repeats: Callable[[], bool] | None = None) -> bool:
        """Rewinds a run that cannot continue from its current state, or ends it; returns whether it was rewound. Every rank
        must call it.

        `step` is the next one, if it can be rewound; `repeats` returns whether the last batches are bad with the weights of now
        as well.
        """
        reason = self.recovery.resolve(failure, step, repeats)
        if reason is not None:
            self.halt(model, reason)
        return reason is None

    def halt(self, model: nn.Module, message: str) -> None:
        """Saves the last good state and ends the run, by an error or a clean stop. Every rank must call it."""
        self.stop(model, message + self._save_good(model) + self._find_earlier())

    def stop(self, model: nn.Module, message: str) -> None:
        """Ends the run as it is, and says why: in the error, or in the log if the run stops without one."""
        message = show(message, self.policy.bundle_text)
        if self.policy.on_halt == "raise":
            raise NonFiniteError(message)
        logger.error("hf_nanguard: %s", message)
        self.trainer.control.should_training_stop = True

    @property
    def _folder(self) -> Path:
        """The checkpoint of the current step. A folder of that name may belong to an earlier run."""
        trainer = self.trainer
        return Path(str(trainer.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"

    def _save_good(self, model: nn.Module) -> str:
        """Saves the state if it is finite; returns a sentence about where the last good one is."""
        trainer, ranks, folder, last_good = self.trainer, self.guard.ranks, self._folder, self.custody.last_good
        last = "" if last_good is None else f" The last good checkpoint is {last_good}."
        bad_weights = ranks.any(bool(self.custody.find_bad_weights()))
        if bad_weights or ranks.any(not self.monitor_set.is_sound()):
            what = "weights contain" if bad_weights else "optimizer state or a buffer contains"
            return f" No checkpoint was saved because the {what} NaN or inf.{last}"
        if not trainer.is_in_train or not self.saves:  # there is no optimizer to save
            return ""
        if last_good != folder or not ranks.any(folder.is_dir()):

            def save() -> None:
                trainer._save_checkpoint(model, None)

            why = attempt(save, format_error)  # each of the host's writers has its own error for a full disk
            if why is not None:
                return f" The last good state could not be saved ({why}).{last}"
        return f" {self._describe_state(folder)}"

    def _describe_state(self, folder: Path) -> str:
        """Returns what the finite state in a folder is: the last good one, unless loss or gradients were out of line before the halt."""
        watch = self.guard.loss_watch
        if watch.divergence.is_reported:
            since = watch.divergence.since
            return f"A finite state, but not a good one: its loss has diverged since step {since}. It is in {folder}."
        if self.guard.is_suspect:
            what = "A finite state, saved while loss or gradient norm were far above their usual level"
            return f"{what}, is in {folder}."
        return f"The last good state is in {folder}."

    def _find_earlier(self) -> str:
        """Returns a sentence about the checkpoint from before the bad steps, if that is not the last one."""
        first, earlier = self.escalation.first_bad_step, self.custody.find_earlier(self._folder)
        if first is None or earlier is None:
            return ""
        return f" The first of the bad steps is {first}; resume from {earlier}, the last checkpoint from before it."
