"""Which checkpoint a run resumes from: the newest that is good and complete, not the one with the highest number."""

from dataclasses import astuple, dataclass
from pathlib import Path

from ...checkpoints.checkpoint_files import TRAINER_STATE, is_interrupted, list_checkpoints
from ...checkpoints.good_checkpoint import choose_checkpoint
from ...checkpoints.good_record import read_good
from ...checkpoints.scan import scan_checkpoint
from ...core.event import Event
from ...core.journal import Journal
from ...core.vocabulary import Action, Signal
from ...errors import ArgumentError
from ..compat.trainer_protocol import HostTrainer


@dataclass(frozen=True)
class ResumeChoice:
    """What a run resumes from.

    Attributes:
        path (`Any`):
            What `train()` is given.
        last_good (`str`, *optional*):
            That one, if it is good, or another good one of the run; `None` if there is none, or it is not known.
    """

    path: object
    last_good: str | None = None


@dataclass(frozen=True)
class _Plan:
    """What the first rank has found. Plain values only."""

    path: str | None = None  # to resume from; `None`: as asked
    message: str | None = None
    is_refused: bool = False  # whether nothing can be resumed from
    begins: bool = False  # whether the run begins anew
    last_good: str | None = None


def choose_resume(
    asked: object, trainer: HostTrainer, journal: Journal, acts: bool, repairs: bool = False
) -> ResumeChoice:
    """Returns what to resume from in place of what was asked for, the same on every rank. Every rank must call it.

    `True` and the folder of a run become the newest good checkpoint of the run; which newer ones were skipped, and why, is
    logged and an event. If all are saves that were interrupted, and the run never had a good checkpoint, it begins anew. The path
    of a checkpoint stays, and what is wrong with it is reported before the first step; if `repairs` is true, a bad one is
    replaced by the newest good one before it. If the run has checkpoints and none of them is good, it is an `ArgumentError`.
    """
    if asked is None or asked is False:
        return ResumeChoice(asked)
    mine = astuple(_plan(asked, trainer, repairs)) if journal.ranks.rank == 0 else None
    plan = _Plan(*(journal.ranks.gather(mine)[0] or ()))
    if plan.message is not None:
        if plan.is_refused and acts:
            raise ArgumentError(plan.message)
        is_other = plan.begins or (plan.path is not None and plan.path != str(asked))
        action = Action.REFUSED if acts and is_other else Action.OBSERVED
        journal.write_once(Event(0, Signal.CHECKPOINT_NONFINITE, action, plan.message))
        if not acts:
            return ResumeChoice(asked, plan.last_good)
    if plan.begins:
        return ResumeChoice(None)
    return ResumeChoice(asked if plan.path is None else plan.path, plan.last_good)


def _plan(asked: object, trainer: HostTrainer, repairs: bool) -> _Plan:
    folder = Path(str(trainer.args.output_dir) if asked is True else str(asked))
    needs_optimizer = not trainer.args.save_only_model
    if not list_checkpoints(folder) or (asked is not True and (folder / TRAINER_STATE).exists()):
        return _check_path(folder, needs_optimizer, repairs) if asked is not True else _Plan()
    choice = choose_checkpoint(folder, needs_optimizer)
    if choice.path is None and read_good(folder) is None and all(is_interrupted(path) for path, _ in choice.skipped):
        text = f"Training begins anew because the run was interrupted in its first save: {choice.format_skipped()}."
        return _Plan(message=text, begins=True)
    if choice.path is None:
        text = f"No checkpoint in {folder} can be resumed from: {choice.format_skipped()}. Train from the start, or name one."
        return _Plan(message=text, is_refused=True)
    path = str(choice.path)
    text = f"Resuming from {choice.path}. Skipped {choice.format_skipped()}."
    return _Plan(path, text if choice.skipped else None, last_good=path)


def _check_path(folder: Path, needs_optimizer: bool, repairs: bool) -> _Plan:
    if not folder.is_dir():
        return _Plan()  # the host says so
    result = scan_checkpoint(folder)
    if result.is_good:
        return _Plan(last_good=str(folder))
    other = choose_checkpoint(folder.parent, needs_optimizer, before=folder if repairs else None)
    good = None if other.path is None else str(other.path)
    if good is None or not repairs:
        hint = "" if good is None else f" The newest good checkpoint is {good}."
        text = f"Resuming from {folder} as asked, but it is not good: {result.why_not_good}.{hint}"
        return _Plan(message=text, last_good=good)
    skipped = f" Also skipped {other.format_skipped()}." if other.skipped else ""
    text = (
        f"Resuming from {good} and not from {folder} (nanguard_on_bad_start='repair'), which is not good: "
        f"{result.why_not_good}.{skipped}"
    )
    return _Plan(good, text, last_good=good)
