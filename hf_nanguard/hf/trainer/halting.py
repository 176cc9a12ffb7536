"""Ends a guarded run early, in order: the last good state is saved, and a sentence says where."""

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...core.event import Culprit, Event, JsonValue
from ...core.monitors.weights import find_bad_weights
from ...core.rerun.runner import is_sharded
from ...core.step.guard import Guard
from ...core.vocabulary import Action, Signal
from ...errors import NonFiniteError
from ..compat.trainer import keeping_checkpoint
from ..compat.trainer_protocol import HostTrainer

logger = logging.getLogger("hf_nanguard")


class Halting:
    """Ends a run, and keeps non-finite states from being saved."""

    def __init__(self, trainer: HostTrainer, guard: Guard):
        self.trainer = trainer
        self.guard = guard
        self.saves = True
        self.has_run = False
        self.forget_checkpoints()

    def begin_run(self) -> None:
        """Notes that the model is about to be trained."""
        self.has_run = True
        self.forget_checkpoints()

    def forget_checkpoints(self) -> None:
        """Forgets the checkpoints of an earlier run."""
        self.last_good: Path | None = None
        self.before_bad: Path | None = None  # the last one from before the first bad step of a period of bad steps

    def save_nothing(self) -> None:
        """Makes a halt save no state: a measured run leaves no weights behind."""
        self.saves = False

    def note_saved(self, folder: Path) -> None:
        """Notes a checkpoint whose state was finite, saved by this run or resumed from."""
        self.last_good = folder
        if self.guard.escalation.first_bad_step is None:
            self.before_bad = folder

    def keeping_checkpoint(self) -> AbstractContextManager[None]:
        """Returns a context, for a save among bad steps, in which the host deletes any checkpoint but that from before them."""
        bad = self.guard.escalation.first_bad_step is not None
        return keeping_checkpoint(self.before_bad) if bad and self.before_bad is not None else nullcontext()

    def may_save(self, model: nn.Module) -> bool:
        """Returns whether weights and optimizer state are finite, so that a checkpoint may be saved. If not, the run ends."""
        reason = self.guard.monitor_set.check_before_save(self.trainer.state.global_step)
        if reason is not None:
            self.halt(model, reason)
        return reason is None

    def may_write(self, folder: str) -> bool:
        """Returns whether the model may be written to a folder by whoever asks; not if a run has made it non-finite.

        Ranks do not ask each other, because a script may save on its first rank only; sharded parameters take all of them.
        """
        model, ranks = self.trainer.model, self.guard.ranks
        bad = find_bad_weights(model, self.guard.monitor_set.find_accepted()) if self.has_run else {}
        if any(map(is_sharded, model.parameters())):
            bad = {name: kind for found in ranks.gather(bad) for name, kind in found.items()}
        if not bad:
            return True
        acts, name = self.guard.policy.acts, next(iter(bad))
        done = "was not saved to {} because" if acts else "was saved to {} although"
        others = f", as do {len(bad) - 1} other parameters" if len(bad) > 1 else ""
        message = f"the model {done.format(folder)} {name} contains NaN or inf{others}."
        action, step = Action.REFUSED if acts else Action.OBSERVED, self.trainer.state.global_step
        culprit = Culprit(phase="parameter", parameter=name)
        values: dict[str, JsonValue] = {"folder": folder, "num_bad_parameters": len(bad)}
        self.guard.journal.write(
            Event(step, Signal.CHECKPOINT_NONFINITE, action, message, None, ranks.rank, values, culprit)
        )
        hint = "" if self.last_good is None else f" The last good checkpoint is {self.last_good}."
        logger.error("hf_nanguard: %s%s", message, hint)
        return not acts

    def halt(self, model: nn.Module, message: str) -> None:
        """Saves the last good state and ends the run, by an error or a clean stop. Every rank must call it."""
        trainer, ranks = self.trainer, self.guard.ranks
        folder = Path(str(trainer.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        bad_weights = ranks.any(bool(find_bad_weights(trainer.model, self.guard.monitor_set.find_accepted())))
        if bad_weights or ranks.any(not self.guard.monitor_set.is_sound()):
            what = "weights contain" if bad_weights else "optimizer state or a buffer contains"
            message += f" No checkpoint was saved because the {what} NaN or inf."
            if self.last_good is not None:
                message += f" The last good checkpoint is {self.last_good}."
        elif trainer.is_in_train and self.saves:  # else there is no optimizer to save
            # a folder of that name may belong to an earlier run
            if self.last_good != folder or not ranks.any(folder.is_dir()):
                trainer._save_checkpoint(model, None)
            message += f" The last good state is in {folder}."
        message += self._name_earlier(folder)
        logger.error("hf_nanguard: %s", message)
        if self.guard.policy.on_halt == "raise":
            raise NonFiniteError(message)
        trainer.control.should_training_stop = True

    def _name_earlier(self, folder: Path) -> str:
        """Names the checkpoint from before the bad steps: one that was saved among them may hold what makes them bad."""
        first, earlier = self.guard.escalation.first_bad_step, self.before_bad
        if first is None or earlier is None or earlier in (folder, self.last_good) or not earlier.is_dir():
            return ""
        return f" The first of the bad steps is {first}; resume from {earlier}, the last checkpoint from before it."
