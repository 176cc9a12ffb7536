"""In the script of `nanguard run --resume`: `train()` without a checkpoint continues from the newest good one.

A script calls `train()` once for each output folder; a second call there starts as it would without us.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

from .run_progress import Progress


def resume_training(trainer_class: Any, progress: Progress, reason: str | None, say: Callable[[str], None]) -> None:
    """Makes `train()` of all trainers resume, note their steps, and save on SIGTERM by the host's own mechanism.

    `reason` is why the script was restarted, `None` at its first start. It becomes an event of the run.
    """
    train, resumed = trainer_class.train, set()
    watched: WeakSet = WeakSet()

    def train_on(trainer: Any, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
        folder = Path(trainer.args.output_dir).absolute()
        if trainer not in watched:
            watched.add(trainer)
            watch_training(trainer, progress)
        if not resume_from_checkpoint and trial is None and folder not in resumed:
            resumed.add(folder)
            resume_from_checkpoint = find_checkpoint(trainer, say)
            if reason is not None:
                emit_restart(trainer, reason, resume_from_checkpoint)
        return train(trainer, resume_from_checkpoint, trial, *args, **kwargs)

    train_on.__wrapped__ = train  # type: ignore[attr-defined] # what inspect.signature shows
    trainer_class.train = train_on
    note_errors(progress)


def find_checkpoint(trainer: Any, say: Callable[[str], None]) -> str | None:
    """Returns the newest good checkpoint of the trainer's output folder. The first rank looks, and all take what it finds."""
    from accelerate.utils import broadcast_object_list

    from ..checkpoints.good_checkpoint import choose_checkpoint

    found: list[str | None] = [None]
    if trainer.args.process_index == 0:
        choice = choose_checkpoint(Path(trainer.args.output_dir), needs_optimizer=True)
        found = [None if choice.path is None else str(choice.path)]
        skipped = f" (not from {choice.format_skipped()})" if choice.skipped else ""
        if choice.path is not None or skipped:
            say(f"training resumes from {found[0] or 'its beginning'}{skipped}.")
    broadcast_object_list(found)
    return found[0]


def emit_restart(trainer: Any, reason: str, checkpoint: str | None) -> None:
    """Writes the event of a restart, if the trainer is guarded."""
    from ..core.event import Event
    from ..core.vocabulary import Action, Signal
    from ..hf.trainer.mixin import GuardedTrainerMixin

    if not isinstance(trainer, GuardedTrainerMixin) or trainer.args.process_index != 0 or not trainer.nanguard.on:
        return
    text = f"The run was restarted after {reason}; it resumes from {checkpoint or 'its beginning'}."
    values: dict[str, Any] = {"reason": reason, "checkpoint": checkpoint}
    step = int(checkpoint.rpartition("-")[2]) if checkpoint is not None else 0
    event = Event(step, Signal.RUN_RESTARTED, Action.REWOUND, text, values=values)
    trainer.nanguard.guard.journal.write(event)


def watch_training(trainer: Any, progress: Progress) -> None:
    """Notes each step of the first rank, and has the host save a checkpoint when SIGTERM arrives."""
    from transformers import TrainerCallback
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

    class StepNote(TrainerCallback):
        """Notes the step that begins."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                progress.write_step(state.global_step)

    trainer.add_callback(StepNote())
    if not trainer.args.enable_jit_checkpoint:
        trainer.args.enable_jit_checkpoint = True
        on_preemption = JITCheckpointCallback()
        on_preemption.set_trainer(trainer)
        trainer.add_callback(on_preemption)


def note_errors(progress: Progress) -> None:
    """Notes the class of an uncaught error for the supervisor, before it is shown."""
    show = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        progress.write_error(kind.__name__)
        show(kind, error, trace)

    sys.excepthook = note
