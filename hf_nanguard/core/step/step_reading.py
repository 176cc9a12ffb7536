"""What became of a step, what was read of it, and which micro-batch is to blame, as values and as events."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from ...plain_text import format_rows
from ..autopsy.evidence.verdict import Verdict
from ..event import Culprit, Event, Failure, JsonValue
from ..rerun.micro_batch import AccumulationGroup, BatchAction, Finding, MicroBatch
from ..rng import RngState
from ..vocabulary import Action, Cause, Signal
from .bad_gradients import Census, describe
from .decision import Decision, StepAction


@dataclass(frozen=True)
class StepOutcome:
    """What became of a step."""

    stepped: bool = True  # whether the optimizer may step
    norm: Tensor | None = None  # to clip by; `None` if the step is skipped
    redone: list[Tensor] | None = None  # losses to log in place of the group's own if it was redone or skipped
    fresh: bool = False  # whether the gradients differ from those that the loop computed
    num_dropped: int = 0  # micro-batches of this rank
    clip_to: float | None = None  # a tighter bound for the norm than that of the loop
    halt: str | None = None  # why the run has to end
    scaler_skips: bool = False  # the loss scaler is about to skip it, as it does while it searches its scale
    failure: Failure | None = None  # why the run cannot continue from its current state; the caller rewinds or halts it
    rewound: bool = False  # whether the run went back to a snapshot after the step
    moves_schedule: bool = False  # whether the schedule goes on although the step is skipped, because it is to blame


@dataclass(frozen=True)
class StepReading:
    """What was read of a step."""

    step: int
    group: AccumulationGroup
    losses: list[float]  # on this rank
    norm: float  # of the gradients, on the host
    norm_dev: Tensor  # the same on the device
    decision: Decision
    clipped: bool = False  # whether the gradients were clipped already, so that they no longer show which one was bad
    census: Census = field(default_factory=Census)  # filled once the gradients have been checked
    learning_rate: float | None = None
    rng_after: RngState | None = None  # the random state after the group had run, kept if its norm is not finite

    @property
    def measured(self) -> dict[str, JsonValue]:
        """What was measured of the whole step, for events."""
        rate: dict[str, JsonValue] = {} if self.learning_rate is None else {"learning_rate": self.learning_rate}
        if not math.isfinite(self.norm) and any(micro.must_be_dropped for micro in self.group.micro_batches):
            return rate  # the gradients were made NaN to tell all ranks, or are those of a batch that is dropped anyway
        return {"grad_norm": self.norm, **rate}

    @property
    def bad_loss(self) -> tuple[int, float] | None:
        """Position and value of the first loss that is not finite."""
        return next(((i, loss) for i, loss in enumerate(self.losses) if not math.isfinite(loss)), None)

    @property
    def bad_place(self) -> int | None:
        """Position of the first loss that is not finite, or was not before a term was dropped."""
        if self.bad_loss is not None:
            return self.bad_loss[0]
        return next((micro.index for micro in self.group.micro_batches if micro.bad_terms), None)

    @property
    def suspected(self) -> bool:
        """Whether a loss is not finite and something in its batch may be the cause."""
        return self.bad_loss is not None and self.group.micro_batches[self.bad_loss[0]].suspicion is not None

    def drops(self, micro: MicroBatch) -> bool:
        """Whether a micro-batch is left out because its own loss is not finite."""
        is_bad = micro.index < len(self.losses) and not math.isfinite(self.losses[micro.index])
        return is_bad and self.decision.action is not StepAction.STEP and self.decision.signal is Signal.LOSS_NONFINITE

    @property
    def finite_losses(self) -> list[Tensor]:
        """The losses that are finite, on their device."""
        return [loss for loss, value in zip(self.group.losses, self.losses, strict=True) if math.isfinite(value)]

    def describe(self) -> str:
        """Returns one clause that says what is wrong."""
        what = describe(self.census)
        if self.bad_place is not None:
            loss = None if self.bad_loss is None else self.bad_loss[1]
            what = describe_loss(self.group.micro_batches[self.bad_place], loss)
        return f"{what} at step {self.step}"

    def list_findings(self, *actions: BatchAction) -> list["BadMicroBatch"]:
        """Returns the micro-batches with findings about which one of these actions is taken, once for each finding."""
        return [
            BadMicroBatch.of_finding(micro, finding, self.step)
            for micro in self.group.micro_batches
            for finding in micro.findings_to(*actions)
        ]

    def as_values(self, place: int | None = None) -> dict[str, JsonValue]:
        """Returns what was measured, for the event, with the terms of the micro-batch at a position, or of the last."""
        shown = self.bad_loss[1] if self.bad_loss is not None else (self.losses[-1] if self.losses else None)
        terms = self.group.micro_batches[-1 if place is None else place].term_values if self.group.terms else {}
        found = {"terms": terms} if terms else {}
        return {"loss": shown, **self.measured, **found, **self.census.as_values()}

    def event(
        self,
        action: Action,
        message: str,
        signal: Signal | None = None,
        cause: Cause | None = None,
        blamed: "BadMicroBatch | None" = None,
        **values: JsonValue,
    ) -> Event:
        """Returns the event of the whole step, with the micro-batch to blame if it is known."""
        place = self.bad_place if blamed is None else blamed.micro.index
        phase = "loss" if place is not None and self.census.suspect is None else "backward"
        rows = None if place is None else self.group.micro_batches[place].rows
        term = None if place is None else next(iter(self.group.micro_batches[place].bad_terms), None)
        term = term if blamed is None else blamed.culprit.term
        culprit = Culprit(phase=phase, parameter=self.census.suspect, term=term, rows=rows)
        signal = signal or self.decision.signal or Signal.GRAD_NONFINITE
        event = Event(
            self.step,
            signal,
            action,
            message,
            place,
            values={**self.as_values(place), **values},
            culprit=culprit,
            cause=cause,
        )
        return event if blamed is None or blamed.verdict is None else explain_event(event, blamed.verdict)


def describe_loss(micro: MicroBatch, loss: float | None) -> str:
    """Returns a clause about a non-finite loss and the terms to blame, or about the terms that it has dropped."""
    if loss is None or math.isfinite(loss):
        return " and ".join(f"{name} is {micro.term_values[name]}" for name in micro.bad_terms)
    return f"loss is {loss}" + (f", from {' and '.join(micro.bad_terms)}" if micro.bad_terms else "")


@dataclass(frozen=True)
class BadMicroBatch:
    """A micro-batch that is to blame, before it is known what will be done about it."""

    micro: MicroBatch
    signal: Signal
    what: str  # one clause, without its dataset rows
    culprit: Culprit
    values: Mapping[str, JsonValue] = field(default_factory=dict)
    cause: Cause | None = None
    verdict: Verdict | None = None
    removable_terms: frozenset[str] = frozenset()  # terms without which its gradients are finite
    note: str = ""  # said after the rows

    @property
    def message(self) -> str:
        """What is wrong, with the dataset rows to blame if an autopsy has found them, else those of the micro-batch."""
        culprit = self.culprit if self.verdict is None else self.verdict.explain(self.culprit)
        return f"{self.what}{format_rows(culprit.rows)}{self.note}"

    @property
    def begins_here(self) -> bool:
        """Whether an autopsy has found the origin on this rank; sharded gradients show the faults of all ranks."""
        origin = None if self.verdict is None else self.verdict.origin
        return origin is not None and not origin.outside

    @property
    def can_be_spared(self) -> bool:
        """Whether it is finite without some terms of its loss, all of which may be dropped."""
        return bool(self.removable_terms) and all(self.micro.may_drop(name) for name in self.removable_terms)

    @classmethod
    def of_finding(cls, micro: MicroBatch, finding: Finding, step: int) -> "BadMicroBatch":
        """Blames a micro-batch for what was found in it before it ran."""
        rows = micro.rows if finding.rows is None else list(finding.rows)
        if rows is not None and finding.rows is None and finding.samples:
            rows = [rows[sample] for sample in finding.samples if sample < len(rows)]
        culprit = Culprit(
            phase=finding.phase,
            samples=list(finding.samples) or None,
            rows=rows,
            tokens=[list(token) for token in finding.tokens] or None,
        )
        what = f"{finding.message} in micro-batch {micro.index} of step {step}"
        return cls(micro, finding.signal, what, culprit, {}, finding.cause)

    @classmethod
    def of_run(
        cls, micro: MicroBatch, loss: float, census: Census, step: int, removable_terms: frozenset[str] = frozenset()
    ) -> "BadMicroBatch":
        """Blames a micro-batch whose gradients were bad when it ran alone, and the terms without which they were not."""
        finite = math.isfinite(loss) and not micro.bad_terms
        if finite:
            what = describe(census) + (
                f", but not without {' and '.join(sorted(removable_terms))}" if removable_terms else ""
            )
        else:
            what = describe_loss(micro, loss)
        term = next(iter([*micro.bad_terms, *sorted(removable_terms)]), None)
        culprit = Culprit(phase="backward" if finite else "loss", parameter=census.suspect, term=term, rows=micro.rows)
        signal = Signal.GRAD_NONFINITE if finite else Signal.LOSS_NONFINITE
        terms = {"terms": micro.term_values} if micro.terms else {}
        return cls(
            micro,
            signal,
            f"{what} in micro-batch {micro.index} of step {step}",
            culprit,
            {"loss": loss, **terms, **census.as_values()},
            removable_terms=removable_terms,
            note="" if finite or census.bad else "; its gradients are finite",
        )

    def event(self, action: Action, reading: StepReading, note: str = "") -> Event:
        """Returns the event of an action that was taken."""
        event = Event(
            reading.step,
            self.signal,
            action,
            self.message + note,
            self.micro.index,
            values={**self.values, **reading.measured},
            culprit=self.culprit,
            cause=self.cause,
        )
        return event if self.verdict is None else explain_event(event, self.verdict)


def explain_event(event: Event, verdict: Verdict) -> Event:
    """Returns the event with what an autopsy found: culprit, cause, remedies, bundle."""
    clears_data = verdict.blame.scope == "every_sample"
    return replace(
        event,
        message=event.message + ("; all its samples fail, the data is probably not the cause" if clears_data else ""),
        values={**event.values, "autopsy": verdict.as_values()},
        culprit=verdict.explain(event.culprit or Culprit()),
        cause=event.cause if event.cause is not None and verdict.origin is None else verdict.cause,
        remedies=verdict.remedies,
        bundle=verdict.bundle,
    )
