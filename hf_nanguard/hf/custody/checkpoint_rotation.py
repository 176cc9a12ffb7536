"""Which checkpoints of a run are good: each is read back after it was saved, and only then older ones are deleted.

with saved.saving(folder):      the host saves; its rotation waits
    host._save_checkpoint()
on rank 0:                      the files are scanned
bad:                            moved to _bad_checkpoints/, an event, "best" is what it was before
good:                           recorded in nanguard/good.json
rotation                        the last good checkpoint, and the last from before bad steps, are never deleted
"""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import TrainerState

from ...checkpoints.bad_checkpoint import mark_incomplete, quarantine, remove_mark
from ...checkpoints.good_record import GoodRecord, digest_folder, read_good, write_good
from ...checkpoints.scan import scan_checkpoint
from ...checkpoints.scan_result import NONFINITE
from ...core.event import Culprit, Event, JsonValue
from ...core.journal import Journal
from ...core.vocabulary import Action, Signal
from ...plain_text import first_line
from ..compat.trainer import deferred_rotation, rotate
from ..compat.trainer_protocol import HostTrainer

logger = logging.getLogger("hf_nanguard")

Best = tuple[float | None, int | None, str | None]


@dataclass(eq=False, repr=False)
class SavedCheckpoints:
    """The checkpoints that a run saves."""

    trainer: HostTrainer
    journal: Journal
    acts: bool  # whether bad ones are moved, or only reported
    find_accepted: Callable[[], Collection[str]] = frozenset  # the tensors that were not finite before the run
    is_suspect: Callable[[], bool] = lambda: False  # whether a state of now may hold what makes steps bad

    def __post_init__(self) -> None:
        self.ranks = self.journal.ranks
        self.begin_run()

    def begin_run(self) -> None:
        """Forgets the checkpoints of an earlier run."""
        self.last_good: Path | None = None
        self.before_bad: Path | None = None  # the last from before a period of bad steps, or of spikes that lead to it
        self._best: Best = (None, None, None)  # as of the last good save
        self._accepted: set[str] = set()  # tensors of the last checkpoint that are not finite by design

    def note_good(self, folder: Path) -> None:
        """Notes a good checkpoint, saved by this run or resumed from."""
        self.last_good = folder
        self._best = _best_of(self.trainer.state)
        if not self.is_suspect():
            self.before_bad = folder

    @contextmanager
    def saving(self, folder: Path) -> Iterator[None]:
        """Surrounds the save of a checkpoint on every rank. If it fails, nothing is deleted and nothing becomes good."""
        with deferred_rotation() as rotations:
            yield
        self.ranks.any(False)  # waits until every rank has written its part
        if self.trainer.args.should_save:
            remove_mark(folder)  # the host removes that of a preemption after this
        reason = self._agree(self._check(folder) if self.trainer.args.should_save else None)
        if reason is None:
            self.note_good(folder)
            self._record(folder, self.trainer.state.global_step)
        else:
            self._reject(folder, reason)
        for call in rotations:
            rotate(call, self._protected())

    def _protected(self) -> set[Path]:
        kept = {self.last_good, self.before_bad if self.is_suspect() else None} if self.acts else {None}
        return {path for path in kept if path is not None}

    def _agree(self, reason: str | None) -> str | None:
        """Returns the first reason of any rank: one that saves has looked, and all do the same."""
        return next((each for each in self.ranks.gather(reason) if each is not None), None)

    def _check(self, folder: Path) -> str | None:
        """Reads a checkpoint back; returns why it is not good. What was not finite before the run is so by design."""
        self._accepted = set()
        if not folder.is_dir():  # another way to save, e.g. one of a subclass
            return None
        result = scan_checkpoint(folder)
        bad = {finding.tensor for finding in result.findings if finding.problem in NONFINITE and finding.tensor}
        if bad:
            self._accepted = bad & self._list_accepted()
            result.accept(self._accepted)
        return None if result.is_good else result.why_not_good

    def _list_accepted(self) -> set[str]:
        """Returns the tensors in which NaN or inf is not the doing of the run, by the names that they may have in a file."""
        model = self.trainer.model
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        names = frozen | set(self.find_accepted())
        return names | {name.replace(".default.", ".") for name in names}  # PEFT leaves out the name of the adapter

    def end_run(self) -> None:
        """Records the best checkpoint as the last good one if it is the only one left: with `save_total_limit=1` the host deletes
        all others at the end of a run."""
        state, last = self.trainer.state, self.last_good
        if last is not None and not last.is_dir() and state.best_model_checkpoint is not None:
            self.last_good = Path(state.best_model_checkpoint)
            self._record(self.last_good, state.best_global_step or state.global_step)

    def _record(self, folder: Path, step: int) -> None:
        """Writes good.json; a failure is logged, because the checkpoint is good anyway."""
        if not self.trainer.args.should_save or not folder.is_dir():
            return
        rows = [row for row in self.trainer.state.log_history if row.get("step") == step]
        metric: dict[str, JsonValue] = {
            name: value for row in rows for name, value in row.items() if name.endswith("loss")
        }
        try:
            before = read_good(folder.parent)  # what it accepts was not found again
            accepted = sorted({*self._accepted, *(before.accepted if before is not None else ())})
            record = GoodRecord(step, folder.name, digest_folder(folder), metric or None, accepted)
            write_good(folder.parent, record)
        except OSError as error:
            logger.warning("hf_nanguard: good.json was not written (%s).", first_line(error))

    def _reject(self, folder: Path, reason: str) -> None:
        """Reports a bad checkpoint and moves it away, so that it is never the newest or the best."""
        moved = self._move(folder) if self.acts else None
        done = "was saved although it is not good" if moved is None else f"was moved to {moved} because it is not good"
        hint = "" if self.last_good is None else f" The last good checkpoint is {self.last_good}."
        message = f"checkpoint {folder} {done}: {reason}.{hint}"
        step, action = self.trainer.state.global_step, Action.REFUSED if self.acts else Action.OBSERVED
        good = None if self.last_good is None else str(self.last_good)
        values: dict[str, JsonValue] = {"folder": str(folder), "moved_to": moved, "last_good": good}
        self.journal.write_once(
            Event(step, Signal.CHECKPOINT_NONFINITE, action, message, values=values, culprit=Culprit(phase="parameter"))
        )
        if self.acts and self.trainer.state.best_global_step == step:
            state = self.trainer.state
            state.best_metric, state.best_global_step, state.best_model_checkpoint = self._best

    def _move(self, folder: Path) -> str | None:
        """Moves a bad checkpoint on the rank that has saved it; returns where it is, on every rank."""
        moved: str | None = None
        if self.trainer.args.should_save:
            try:
                moved = str(quarantine(folder, self.trainer.args.save_total_limit))
            except OSError as error:
                logger.error("hf_nanguard: %s could not be moved (%s).", folder, first_line(error))
                _mark(folder)
        return self._agree(moved)

    def may_load_best(self) -> bool:
        """Returns whether the best checkpoint is good, on every rank. A bad one is reported and forgotten."""
        path = self.trainer.state.best_model_checkpoint
        if path is None:
            return True
        reason = self._agree(self._check(Path(path)) if self.trainer.args.should_save else None)
        if reason is None:
            return True
        message = f"the best checkpoint {path} {'was not loaded because it' if self.acts else ''} is not good: {reason}"
        action = Action.REFUSED if self.acts else Action.OBSERVED
        event = Event(self.trainer.state.global_step, Signal.CHECKPOINT_NONFINITE, action, " ".join(message.split()))
        self.journal.write_once(event)
        if self.acts:
            self.trainer.state.best_model_checkpoint = None
        return not self.acts


def _best_of(state: TrainerState) -> Best:
    return state.best_metric, state.best_global_step, state.best_model_checkpoint


def _mark(folder: Path) -> None:
    try:
        mark_incomplete(folder)
    except OSError as error:
        logger.error("hf_nanguard: %s could not be marked as bad either (%s).", folder, first_line(error))
