"""Says when a run has had nothing to learn from for long: an online one by its rewards, any other by its batches."""

from typing import Any

from ...core.event import Culprit, Event
from ...core.step.guard import Guard
from ...core.vocabulary import Action, Signal
from ..data.learning_signal import NoSignal, NoSignalDetector
from ..rl.equal_rewards import StallWatch
from ..rl.reward_check import name_functions
from ..rl.rollout import Rollout


class LearningWatch:
    """Watches the steps of a guarded trainer for something to learn.

    Args:
        trainer (`Trainer`):
            The trainer.
        guard (`Guard`):
            Its guard.
    """

    def __init__(self, trainer: Any, guard: Guard):
        self.trainer = trainer
        self.guard = guard
        self.stall = StallWatch(guard.policy.stall_steps)
        self.lessons = NoSignalDetector(guard.policy.stall_steps)

    def observe(self, lessons: list[NoSignal | None], rollout: Rollout | None) -> None:
        """Takes note of a step that has been decided.

        Args:
            lessons (`list[NoSignal | None]`):
                What was judged of its batches.
            rollout (`Rollout`, *optional*):
                What is known of its completions, in an online trainer.
        """
        step, norm, journal = self.trainer.state.global_step, self.guard.last_norm, self.guard.journal
        signal, action = Signal.NO_LEARNING_SIGNAL, Action.OBSERVED
        if rollout is None:
            message = self.lessons.observe(step, lessons, norm)
            culprit = Culprit(phase="input" if any(lessons) else "backward")
            if message is not None:  # of this rank's batches
                journal.write(
                    Event(step, signal, action, message, None, journal.ranks.rank, {"grad_norm": norm}, culprit)
                )
            return
        names = name_functions(self.trainer) if "reward_funcs" in vars(self.trainer) else []
        if not names:
            return
        message = self.stall.observe(step, rollout.all_equal, norm, names)
        rollout.all_equal = None
        if message is not None:
            journal.write_once(Event(step, signal, action, message, culprit=Culprit(phase="reward")))
