"""Which checkpoints of a run are good, and which states are not saved because they are not finite."""

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ...core.event import Culprit, Event, JsonValue
from ...core.finite import is_sharded
from ...core.monitors.weights import find_bad_weights
from ...core.step.guard import Guard
from ...core.vocabulary import Action, Signal
from ..compat.trainer_protocol import HostTrainer
from .checkpoint_rotation import SavedCheckpoints
from .resume_choice import ResumeChoice, choose_resume

logger = logging.getLogger("hf_nanguard")


class CheckpointCustody:
    """Knows the good checkpoints of a run, and refuses to save non-finite states."""

    def __init__(self, trainer: HostTrainer, guard: Guard):
        self.trainer = trainer
        self.guard = guard
        self.find_accepted = guard.monitor_set.find_accepted
        self.policy, self.journal, self.escalation = guard.policy, guard.journal, guard.escalation
        self.has_run = False
        self._resumed: ResumeChoice | None = None  # until its first epoch begins
        self.saved = SavedCheckpoints(trainer, guard.journal, guard.policy.acts, self.find_accepted, self._is_suspect)

    @property
    def last_good(self) -> Path | None:
        """The newest checkpoint that is good."""
        return self.saved.last_good

    def begin_run(self) -> None:
        """Forgets the checkpoints of an earlier run."""
        self.has_run = True
        self.saved.begin_run()

    def end_run(self) -> None:
        """Ends the custody of a run that has come to its end."""
        self.saved.end_run()

    def saving(self, folder: Path) -> AbstractContextManager[None]:
        """Surrounds the save of a checkpoint."""
        return nullcontext() if self.policy.mode == "off" else self.saved.saving(folder)

    def choose_resume(self, asked: object) -> object:
        """Returns what `train()` resumes from, given what it was asked to."""
        policy = self.policy
        if policy.mode == "off":
            return asked
        repairs = policy.on_bad_start == "repair"
        self._resumed = choose_resume(asked, self.trainer, self.journal, policy.acts, repairs)
        return self._resumed.path

    def note_resumed(self, folder: Path) -> None:
        """Notes the checkpoint that was resumed from as the last good one; the good one before it if it is known to be bad."""
        chosen, self._resumed = self._resumed, None
        if chosen is None:  # the guard began after the host had chosen
            chosen = choose_resume(str(folder), self.trainer, self.journal, acts=False)
        if chosen.last_good is not None:
            self.saved.note_good(Path(chosen.last_good))

    def may_load_best(self) -> bool:
        """Returns whether the best checkpoint may be loaded at the end of a run."""
        return self.policy.mode == "off" or self.saved.may_load_best()

    def _is_suspect(self) -> bool:
        """Returns whether a state of now may hold what makes steps bad: among them, or while loss or norm are out of line."""
        return self.escalation.first_bad_step is not None or self.guard.is_suspect

    def find_earlier(self, folder: Path) -> Path | None:
        """Returns the checkpoint from before the bad steps, unless it is the last one: one that was saved among them may
        hold what makes them bad."""
        earlier = self.saved.before_bad
        is_other = earlier is not None and earlier not in (folder, self.last_good) and earlier.is_dir()
        return earlier if is_other else None

    def find_bad_weights(self) -> dict[str, str]:
        """Returns the kind of each parameter of this rank that is not finite, unless it was so by design."""
        return find_bad_weights(self.trainer.model, self.find_accepted())

    def may_write(self, folder: str) -> bool:
        """Returns whether the model may be written to a folder by whoever asks; not if a run has made it non-finite.

        Ranks do not ask each other, because a script may save on its first rank only; sharded parameters take all of them.
        """
        model, ranks = self.trainer.model, self.guard.ranks
        bad = self.find_bad_weights() if self.has_run else {}
        if any(map(is_sharded, model.parameters())):
            bad = {name: kind for found in ranks.gather(bad) for name, kind in found.items()}
        if not bad:
            return True
        acts, name = self.policy.acts, next(iter(bad))
        done = "was not saved to {} because" if acts else "was saved to {} although"
        others = f", as do {len(bad) - 1} other parameters" if len(bad) > 1 else ""
        message = f"the model {done.format(folder)} {name} contains NaN or inf{others}."
        action, step = Action.REFUSED if acts else Action.OBSERVED, self.trainer.state.global_step
        culprit = Culprit(phase="parameter", parameter=name)
        values: dict[str, JsonValue] = {"folder": folder, "num_bad_parameters": len(bad)}
        self.journal.write(Event(step, Signal.CHECKPOINT_NONFINITE, action, message, values=values, culprit=culprit))
        hint = "" if self.last_good is None else f" The last good checkpoint is {self.last_good}."
        logger.error("hf_nanguard: %s%s", message, hint)
        return not acts
