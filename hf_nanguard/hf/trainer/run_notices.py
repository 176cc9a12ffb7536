"""What is said of a run when it begins, resumes and ends: what cannot be guarded, removed rows, and a summary of its events."""

import logging
from typing import Any

from ...core.event import Culprit, Event
from ...core.journal import log_block
from ...core.step.guard import Guard
from ...core.vocabulary import Action, Signal
from ...plain_text import format_rows
from ..compat import trainer as compat
from ..compat.accelerate import dispatches_batches, steps_in_backward
from ..compat.prepared_dataset import PreparedRows, count_loaded_rows, is_hf_stream
from ..compat.trainer_protocol import HostTrainer
from ..data.masked_samples import MAX_ROWS
from .arguments import GuardArguments
from .run_record import RunRecord

logger = logging.getLogger("hf_nanguard")


def log_limits(trainer: HostTrainer, guard: Guard) -> None:
    """Logs what the guard cannot do for this trainer."""
    if guard.policy.precision == "auto" and not isinstance(trainer.args, GuardArguments):
        logger.warning(
            "hf_nanguard: nanguard_precision='auto' has no effect here because the trainer was built with %s. Set it in a "
            "guarded config, e.g. GuardedTrainingArguments.",
            type(trainer.args).__name__,
        )
    if steps_in_backward(trainer):
        logger.warning(
            "hf_nanguard: DeepSpeed steps its engine inside the backward. Bad labels and inputs are filled before "
            "they reach it (nanguard_on_bad_input='repair'), but a bad loss or gradient is only reported, whatever "
            "nanguard_on_nonfinite says. Use DDP or FSDP2 to have it contained."
        )
    if dispatches_batches(trainer):
        logger.warning(
            "hf_nanguard: rank 0 dispatches the batches of this dataset, so labels and inputs are not checked before "
            "the forward and rows are not known. Set accelerator_config={'dispatch_batches': False} to change that."
        )


def report_removed_rows(trainer: HostTrainer, guard: Guard, prepared: PreparedRows) -> None:
    """Reports the rows that the host has removed before the run, which it does without a word."""
    name = type(trainer).__name__
    if not (removed := prepared.removed):
        return
    message = (
        f"{name} removed {len(removed)} of {prepared.num_given} rows of the training dataset{format_rows(removed)} "
        "because truncation to max_length left nothing to learn from in them."
    )
    values: dict[str, Any] = {"num_rows": len(removed), "num_given": prepared.num_given}
    culprit = Culprit(phase="input", rows=removed[:MAX_ROWS])
    guard.journal.write(Event(0, Signal.LABELS_MASKED, Action.OBSERVED, message, values=values, culprit=culprit))


def check_resumed_rate(trainer: HostTrainer, guard: Guard) -> None:
    """Warns that a resumed run keeps the learning rate of its checkpoint, whatever it was given. Several rates are those of
    parameter groups, which the arguments do not know."""
    asked, restored = trainer.args.learning_rate, compat.base_rates(trainer)
    if len(restored) == 1 and asked not in restored and guard.ranks.rank == 0:
        logger.warning(
            "hf_nanguard: learning_rate=%g was asked for, but the schedule of the checkpoint is resumed with %g. For "
            "another rate, load the weights of the checkpoint into the model and train without resume_from_checkpoint, or "
            "remove optimizer.pt and scheduler.pt from a copy of the checkpoint.",
            asked,
            max(restored),
        )


def log_unknown_copy(guard: Guard, name: str) -> None:
    """Warns about something that may be a copy of the weights, which a rewind does not put back."""
    if guard.ranks.rank == 0:
        logger.warning(
            "hf_nanguard: %s holds tensors as large as the trained weights. A rewind does not put them back because they "
            "do not have the shapes of the parameters.", name,
        )  # fmt: skip


def log_summary(guard: Guard, record: RunRecord) -> None:
    """Ends a run that had events with what they were, which dataset its rows are of, and where to read more."""
    rows_of = guard.journal.rows_of
    about_rows = None if rows_of is None else f"dataset rows are those of {rows_of}"
    notes = [note for note in (guard.recovery.format_end(), about_rows) if note is not None]
    text = guard.journal.summary.format_end(record.directory.parent, *notes)
    if text is not None and guard.ranks.rank == 0:
        log_block(text)


def describe_rows(trainer: HostTrainer, prepared: PreparedRows) -> str | None:
    """Returns which dataset the rows of events are of, unless it is the one that the user has."""
    loaded = count_loaded_rows(trainer.train_dataset)
    size = None
    if loaded is not None:
        size = len(trainer.train_dataset) if prepared.user_rows is None else prepared.num_given
    if loaded == size and not prepared.is_rebuilt:
        return None
    sizes = "" if loaded == size else f": it has {size} rows, its files had {loaded}"
    kind = "stream" if is_hf_stream(trainer.train_dataset) else "dataset"
    return f"the prepared {kind} that {type(trainer).__name__} trains on{sizes}"
