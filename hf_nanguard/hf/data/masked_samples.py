"""Counts samples without an unmasked label: they train nothing, and a batch in which others have labels looks healthy."""

from dataclasses import replace

from ...core.event import Culprit, Event
from ...core.journal import Journal
from ...core.vocabulary import Action, Cause, Signal
from ...plain_text import format_rows

MAX_ROWS = 100


class MaskedSamples:
    """Writes an event about the first batch with such samples, and one at the end of a run with their number and rows."""

    def __init__(self, journal: Journal):
        self.journal = journal
        self.begin_run()

    def begin_run(self) -> None:
        """Forgets what an earlier run has counted."""
        self.num_samples = 0
        self.rows: dict[int, None] = {}  # in the order of their first use

    def count(self, step: int, samples: tuple[int, ...], rows: list[int] | None) -> None:
        if not samples:
            return
        theirs = [rows[sample] for sample in samples] if rows is not None and max(samples) < len(rows) else []
        if not self.num_samples:
            what = "a sample has" if len(samples) == 1 else f"{len(samples)} samples have"
            message = (
                f"At step {step}, {what} no unmasked label{format_rows(theirs)}; their number is reported at the end."
            )
            self._write(step, message, theirs, samples)
        self.num_samples += len(samples)
        self.rows.update(dict.fromkeys(theirs))

    def report(self, step: int) -> None:
        """Reports the count at the end of a run."""
        if self.num_samples:
            what = "1 sample of this run" if self.num_samples == 1 else f"{self.num_samples} samples of this run"
            self._write(step, f"{what} had no unmasked label{format_rows(list(self.rows))}.", list(self.rows))
        self.begin_run()

    def _write(self, step: int, message: str, rows: list[int], samples: tuple[int, ...] = ()) -> None:
        values = {"num_samples": len(samples) or self.num_samples, "num_rows": len(rows)}
        culprit = Culprit(phase="input", samples=list(samples) or None, rows=rows[:MAX_ROWS] or None)
        event = Event(step, Signal.LABELS_MASKED, Action.OBSERVED, message, values=values, culprit=culprit)
        self.journal.write(replace(event, cause=Cause.ALL_LABELS_MASKED))
