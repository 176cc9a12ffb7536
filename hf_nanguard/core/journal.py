"""The journal of a run: writes events to a sink and to the log; rank 0 writes the decisions of all ranks."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..boundary import Boundary, GuardFailure
from ..plain_text import printable, show
from .event import Culprit, Event, JsonObject, JsonValue
from .event_summary import EventSummary
from .ranks import Ranks
from .vocabulary import Action, Signal

logger = logging.getLogger("hf_nanguard")

EventSink = Callable[[JsonObject], None]


def log_block(text: str) -> None:
    """Logs lines that belong together; the first is not put behind a progress bar."""
    logger.warning(f"\n{text}")


class Journal:
    """Writes events; `on_event` is called with each of them as a dictionary of the public schema.

    Without `text`, text of the data that sources have quoted is left out of events and log. Whoever has the journal has the
    boundary too, behind which an error is reported here.
    """

    def __init__(
        self, ranks: Ranks, on_event: EventSink | None = None, text: bool = True, boundary: Boundary | None = None
    ):
        self.ranks = ranks
        self.boundary = boundary or Boundary(partial(self.write_failure, 0), ranks)
        self.on_event = on_event
        self.text = text
        self.written: set[Signal] = set()  # the first event of each signal is logged as a warning
        self.begin_run()

    def begin_run(self) -> None:
        """Begins the summary of another run."""
        self.summary = EventSummary()
        self.describe_rows(None)

    def describe_rows(self, rows_of: str | None) -> None:
        """Takes which dataset the rows of events are of, if it is not the one that the user has."""
        self.rows_of = rows_of
        self._has_said_rows = rows_of is None

    def write(self, event: Event, error: BaseException | None = None) -> None:
        """Writes an event of this rank, and logs it with the traceback of an error, whose text may contain data."""
        self._write(self._of_rank(event).as_dict(), error if self.text else None)

    def write_once(self, event: Event) -> None:
        """Writes an event that is the same on every rank, on rank 0 only."""
        if self.ranks.rank == 0:
            self.write(event)

    def write_failure(self, step: int, failure: GuardFailure) -> None:
        """Writes what happened to a part of the guard on this rank."""
        values: dict[str, JsonValue] = {
            "part": failure.part,
            "num_failures": failure.number,
            "turned_off": failure.is_last,
        }
        culprit = Culprit(source=failure.place)
        self.write(Event(step, Signal.GUARD_FAILED, Action.OBSERVED, str(failure), values=values, culprit=culprit))

    def write_shared(self, events: list[Event]) -> None:
        """Writes this rank's events and, on rank 0, those of all others. Every rank must call it."""
        for rank, dicts in enumerate(self.ranks.gather([self._of_rank(event).as_dict() for event in events])):
            if rank == self.ranks.rank or self.ranks.rank == 0:
                for event in dicts:
                    self._write(event)

    def log(self, block: str) -> None:
        log_block(show(block, self.text))

    def _of_rank(self, event: Event) -> Event:
        if self.rows_of is not None and event.culprit is not None and event.culprit.rows:
            event = replace(event, values={**event.values, "rows_of": self.rows_of})
        return replace(event, rank=self.ranks.rank) if event.rank is None else event

    def _write(self, event: JsonObject, error: BaseException | None = None) -> None:
        event = show(event, self.text)
        event["message"] = printable(event["message"])
        self.summary.add(event)
        if self.on_event is not None:
            self.boundary.call("on_event", self.on_event, event)
        signal = Signal(event["signal"])
        loud = signal not in self.written or event["action"] in (Action.HALTED, Action.REWOUND)
        self.written.add(signal)
        level, message = logging.WARNING if loud else logging.INFO, event["message"]
        logger.log(level, "[%s] %s: %s", signal, event["action"], message, exc_info=error)
        if not self._has_said_rows and (rows_of := event["values"].get("rows_of")):
            self._has_said_rows = True
            logger.warning("hf_nanguard: dataset rows are those of %s.", rows_of)
