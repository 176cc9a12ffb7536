"""Which checkpoint a run resumes from: the newest that is good and complete, not the one with the highest number."""

from pathlib import Path
from typing import Any

from ...checkpoints.checkpoint_files import TRAINER_STATE, list_checkpoints
from ...checkpoints.good_checkpoint import choose_checkpoint
from ...checkpoints.scan import scan_checkpoint
from ...core.event import Event
from ...core.journal import Journal
from ...core.vocabulary import Action, Signal
from ...errors import ArgumentError
from ..compat.trainer_protocol import HostTrainer


def choose_resume(asked: Any, trainer: HostTrainer, journal: Journal, acts: bool) -> Any:
    """Returns what to resume from in place of what was asked for, the same on every rank. Every rank must call it.

    `True` and the folder of a run become the newest good checkpoint of the run; which newer ones were skipped, and why, is
    logged and an event. The path of a checkpoint stays, and what is wrong with it is reported before the first step.

    Raises:
        ArgumentError: if the run has checkpoints and none of them is good.
    """
    if asked is None or asked is False:
        return asked
    plan = _plan(asked, trainer) if journal.ranks.rank == 0 else None
    path, message, is_refused = journal.ranks.gather(plan)[0] or (None, None, False)
    if message is None:
        return asked if path is None else path
    if is_refused and acts:
        raise ArgumentError(message)
    action = Action.REFUSED if acts and path is not None and path != str(asked) else Action.OBSERVED
    journal.write_once(Event(0, Signal.CHECKPOINT_NONFINITE, action, message))
    return path if acts and path is not None else asked


def _plan(asked: Any, trainer: HostTrainer) -> tuple[str | None, str | None, bool]:
    """Returns the path to resume from (`None`: as asked), what to say about it, and whether nothing can be resumed from."""
    folder = Path(str(trainer.args.output_dir) if asked is True else str(asked))
    if not list_checkpoints(folder) or (asked is not True and (folder / TRAINER_STATE).exists()):
        return _check_path(folder) if asked is not True else (None, None, False)
    choice = choose_checkpoint(folder, needs_optimizer=not trainer.args.save_only_model)
    if choice.path is None:
        text = f"No checkpoint in {folder} can be resumed from: {choice.format_skipped()}. Train from the start, or name one."
        return None, text, True
    if not choice.skipped:
        return str(choice.path), None, False
    return str(choice.path), f"Resuming from {choice.path}. Skipped {choice.format_skipped()}.", False


def _check_path(folder: Path) -> tuple[str | None, str | None, bool]:
    if not folder.is_dir():
        return None, None, False  # the host says so
    result = scan_checkpoint(folder)
    if result.is_good:
        return None, None, False
    other = choose_checkpoint(folder.parent).path
    hint = "" if other is None or other == folder else f" The newest good checkpoint is {other}."
    return None, f"Resuming from {folder} as asked, but it is not good: {result.why_not_good}.{hint}", False
