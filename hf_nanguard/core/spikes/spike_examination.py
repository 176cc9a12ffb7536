"""What the examination of a finite spike found, as plain values and as part of an event."""

import math
from dataclasses import dataclass, field, replace

from ..event import Culprit, Event, JsonObject, JsonValue
from ..vocabulary import Action, Signal, StrEnum

MAX_SHOWN = 64
MAX_NAMED = 8


class SpikeVerdict(StrEnum):
    """What a spike comes from.

    ROWS           a few samples are out of line, and without them loss and norm are usual
    LABELS         the same of samples of one class: a wrong label, or a rare group that is not learned yet
    BATCH          no sample is to blame alone, and other data passes with the same weights
    LEARNING_RATE  no data passes, and the last update has moved the weights by a sizable part of themselves
    STATE          no data passes, and the moments of the optimizer contradict each other
    """

    ROWS = "rows"
    LABELS = "labels"
    BATCH = "batch"
    LEARNING_RATE = "learning_rate"
    STATE = "state"


@dataclass(frozen=True)
class SampleReading:
    """A sample run alone, as if it were the whole step."""

    micro_step: int
    sample: int
    row: int | None
    loss: float
    norm: float
    rank: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether both can be compared with those of others."""
        return 0.0 < self.loss < math.inf and 0.0 < self.norm < math.inf

    def as_values(self) -> JsonObject:
        """Returns it for an event."""
        return {
            "micro_step": self.micro_step, "sample": self.sample, "row": self.row, "loss": self.loss,
            "grad_norm": self.norm, "rank": self.rank,
        }  # fmt: skip


@dataclass(frozen=True)
class SpikeExamination:
    """What became of an examination. The same on every rank."""

    verdict: SpikeVerdict | None  # `None` if what was measured does not decide it
    why: str  # one clause for the message
    blamed: list[SampleReading] = field(default_factory=list)
    readings: list[SampleReading] = field(default_factory=list)  # of all samples that were run
    noticed: list[int] = field(default_factory=list)  # rows whose class a model that has learned almost excludes
    without: tuple[float, float] | None = None  # loss and norm of the micro-batch without those to blame
    usual: tuple[float | None, float | None] = (None, None)  # loss and norm of the run
    update: float | None = None  # what the last update was, relative to the weights
    window: JsonObject | None = None  # the steps since the last snapshot with and without the rows to blame
    num_runs: int = 0
    seconds: float = 0.0
    is_undecided: bool = False  # whether no data at hand passes, so that only later steps can tell data from weights

    @property
    def rows(self) -> list[int]:
        """The dataset rows that are to blame, or suspect."""
        return sorted({reading.row for reading in self.blamed if reading.row is not None})

    def as_values(self) -> dict[str, JsonValue]:
        """Returns it for the `values` of an event; of many samples the largest are shown."""
        shown = sorted(self.readings, key=lambda reading: -reading.loss)[:MAX_SHOWN]
        without = None if self.without is None else {"loss": self.without[0], "grad_norm": self.without[1]}
        return {
            "verdict": None if self.verdict is None else str(self.verdict),
            "why": self.why,
            "rows": self.rows,
            "samples": [reading.as_values() for reading in shown],
            "num_samples": len(self.readings),
            "without": without,
            "usual": {"loss": self.usual[0], "grad_norm": self.usual[1]},
            "relative_update": self.update,
            "window": self.window,
            "num_replays": self.num_runs,
            "seconds": self.seconds,
        }

    def explain(self, event: Event) -> Event:
        """Returns the event of the spike with what was found."""
        culprit = event.culprit or Culprit()
        if self.blamed:
            samples = [reading.sample for reading in self.blamed]
            is_one = len({(reading.rank, reading.micro_step) for reading in self.blamed}) == 1
            culprit = replace(culprit, rows=self.rows or None, samples=samples if is_one else None)
            if is_one:
                event = replace(event, micro_step=self.blamed[0].micro_step, rank=self.blamed[0].rank)
        message = f"{event.message.rstrip('.')}; {self.why}"
        return replace(
            event, message=message, culprit=culprit, values={**event.values, "examination": self.as_values()}
        )

    def name_blamed(self) -> str:
        """Returns whom it blames, for a message."""
        rows = self.rows
        if len(rows) < len(self.blamed):  # rows are not known, or one was used several times
            places = [f"{each.sample} of micro-batch {each.micro_step}" for each in self.blamed[:MAX_NAMED]]
            return f"sample{'s' * (len(self.blamed) > 1)} {', '.join(places)}"
        more = ", ..." if len(rows) > MAX_NAMED else ""
        return f"dataset row{'s' * (len(rows) > 1)} {', '.join(map(str, rows[:MAX_NAMED]))}{more}"


class SpikeReport:
    """The examination of one step, if there was any, on its way into an event."""

    def __init__(self, found: SpikeExamination | None):
        self.found = found
        self.is_told = False

    @property
    def has_news(self) -> bool:
        """Whether rows were found that no event names yet."""
        return self.found is not None and bool(self.found.blamed) and not self.is_told

    def explain(self, event: Event, has_passed: bool = False) -> Event:
        """Returns the event of the spike with what was found. `has_passed` says that later steps were usual again."""
        if self.found is None:
            return event
        self.is_told = True
        found = self.found
        if has_passed and found.is_undecided:
            why = f"{found.why}, and the steps after it were usual again"
            found = replace(found, verdict=SpikeVerdict.BATCH, why=why)
        return found.explain(event)

    def make_event(self, step: int) -> Event:
        """Returns an event of the rows by themselves."""
        assert self.found is not None
        worst = max(self.found.blamed, key=lambda reading: reading.loss)
        values = {"loss": worst.loss, "grad_norm": worst.norm}
        message = f"a batch of step {step} is out of line with the recent ones"
        return self.explain(Event(step, Signal.LOSS_SPIKE, Action.OBSERVED, message, values=values))
