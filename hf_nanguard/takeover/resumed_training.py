"""In the script of `nanguard run --resume`: `train()` continues from the newest good checkpoint.

A script may look for checkpoints itself: a bad one is replaced, and after a restart so is one that is older than what the run
has saved since. It may also save to a new folder at each start: then the folder of the attempt before is looked at. A script
calls `train()` once for each output folder; a second call there starts as it would without us.
"""

import atexit
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

from .run_progress import Progress


def resume_training(trainer_class: Any, progress: Progress, reason: str | None, say: Callable[[str], None]) -> None:
    """Makes `train()` of all trainers resume, note their steps, and save on SIGTERM by the host's own mechanism.

    `reason` is why the script was restarted, `None` at its first start. It becomes an event of the run.
    """
    from ..hf.compat.trainer import ending_when_complete

    train, resumed = trainer_class.train, list[Path]()
    watched: WeakSet = WeakSet()

    def train_on(
        trainer: Any, resume_from_checkpoint: object = None, trial: object = None, *args: object, **kwargs: object
    ) -> object:
        folder = Path(trainer.args.output_dir).absolute()
        if trainer not in watched:
            watched.add(trainer)
            watch_training(trainer, progress)
        if trial is None and folder not in resumed:
            search = Search(folder, len(resumed), progress, is_restart=reason is not None)
            resumed.append(folder)
            resume_from_checkpoint = find_checkpoint(trainer, resume_from_checkpoint, search, say)
            if reason is not None:
                emit_restart(trainer, reason, resume_from_checkpoint)
        with ending_when_complete(trainer):
            return train(trainer, resume_from_checkpoint, trial, *args, **kwargs)

    train_on.__wrapped__ = train  # type: ignore[attr-defined] # what inspect.signature shows
    trainer_class.train = train_on
    note_errors(progress)
    if reason is None:
        progress.begin()


@dataclass(frozen=True)
class Search:
    """Where checkpoints are looked for: `position` counts the trainings of the script."""

    folder: Path
    position: int
    progress: Progress
    is_restart: bool

    def choose(self, asked: object) -> tuple[object, str]:
        """Returns what to resume from in place of what the script asks for, and which newer ones were skipped."""
        from ..checkpoints.checkpoint_files import CHECKPOINT, TRAINER_STATE
        from ..checkpoints.good_checkpoint import choose_checkpoint
        from ..checkpoints.scan import scan_checkpoint

        earlier = map(Path, self.progress.note_folder(self.position, str(self.folder)))
        skipped, otherwise = [], None
        if isinstance(asked, (str, os.PathLike)):
            newest = choose_checkpoint(self.folder, needs_optimizer=True).path if self.is_restart else None
            if newest is not None and self.progress.is_of_this_run(newest / TRAINER_STATE):
                return str(newest), ""
            named = Path(asked)
            result = scan_checkpoint(named) if CHECKPOINT.search(str(asked)) and named.is_dir() else None
            if result is None or result.is_good:
                return asked, ""
            skipped.append(f"{asked}: {result.why_not_good}")
            is_own = Path(asked).absolute().parent == self.folder
            otherwise = None if is_own else asked  # the guard judges that of another run
        for folder in (self.folder, *earlier):
            choice = choose_checkpoint(folder, needs_optimizer=True)
            skipped += [choice.format_skipped()] if choice.skipped else []
            if choice.path is not None:
                return str(choice.path), "; ".join(skipped)
        return otherwise, "; ".join(skipped)


def find_checkpoint(trainer: Any, asked: object, search: Search, say: Callable[[str], None]) -> object:
    """Returns what to resume from: the newest good checkpoint of the run, or what the script asks for, if it is a good checkpoint
    and an earlier attempt has saved none. The first rank looks, and all take what it finds."""
    from accelerate.utils import broadcast_object_list

    found = [asked]
    if trainer.args.process_index == 0:
        found[0], skipped = search.choose(asked)
        if skipped or (found[0] is not None and found[0] != asked):
            say(f"training resumes from {found[0] or 'its beginning'}{f' (not from {skipped})' if skipped else ''}.")
    broadcast_object_list(found)
    return found[0]


def emit_restart(trainer: object, reason: str, checkpoint: object) -> None:
    """Writes the event of a restart, if the trainer is guarded."""
    from ..core.event import Event
    from ..core.vocabulary import Action, Signal
    from ..hf.trainer.mixin import GuardedTrainerMixin

    if not isinstance(trainer, GuardedTrainerMixin) or trainer.args.process_index != 0 or not trainer.nanguard.on:
        return
    text = f"The run was restarted after {reason}; it resumes from {checkpoint or 'its beginning'}."
    values: dict[str, Any] = {"reason": reason, "checkpoint": None if checkpoint is None else str(checkpoint)}
    number = str(checkpoint or "").rpartition("-")[2]
    step = int(number) if number.isdecimal() else 0
    event = Event(step, Signal.RUN_RESTARTED, Action.REWOUND, text, values=values)
    trainer.nanguard.guard.journal.write(event)


def watch_training(trainer: Any, progress: Progress) -> None:
    """Notes each step of the first rank, and has the host save a checkpoint when SIGTERM arrives."""
    from transformers import TrainerCallback
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

    class StepNote(TrainerCallback):
        def on_step_begin(self, args: object, state: Any, control: object, **kwargs: object) -> None:
            if state.is_world_process_zero:
                progress.write_step(state.global_step)

    trainer.add_callback(StepNote())
    if not trainer.args.enable_jit_checkpoint:
        trainer.args.enable_jit_checkpoint = True
        on_preemption = JITCheckpointCallback()
        on_preemption.set_trainer(trainer)
        trainer.add_callback(on_preemption)


def note_errors(progress: Progress) -> None:
    """Notes the class of an uncaught error for the supervisor, before it is shown; of a rank also whether its process was killed."""
    show = sys.excepthook
    rank = os.environ.get("RANK", "")
    if rank.isdecimal():
        progress.begin_rank(int(rank))
        atexit.register(progress.end_rank, int(rank))

    def note(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        progress.write_error(kind.__name__)
        show(kind, error, trace)

    sys.excepthook = note
