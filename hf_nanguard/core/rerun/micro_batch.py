"""The micro-batches of one optimizer step, held by reference so that the step can be redone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from torch import Tensor

from ..finite import magnitudes
from ..rng import RngState
from ..vocabulary import Cause, Signal, StrEnum
from .loss_terms import Term

Payload = TypeVar("Payload")  # what a loop needs to run a micro-batch again
Weight = TypeVar("Weight")  # how a loop weights the loss of a micro-batch


class BatchAction(StrEnum):
    """What is done about a finding."""

    DROP = "drop"  # train without the micro-batch
    HALT = "halt"  # end the run
    REPAIR = "repair"  # bad entries were replaced before the forward
    OBSERVE = "observe"  # write an event, change nothing
    SUSPECT = "suspect"  # blame it if the loss or gradients are not finite; a loss may ignore such an entry
    REMOVED = "removed"  # the bad samples were removed from the batch


@dataclass(frozen=True)
class Finding:
    """Something known to be wrong with a micro-batch before its gradients are checked. Plain values only: findings are
    pickled by dataloader workers.

    Cause, phase, samples and tokens are those of the event's culprit.
    """

    signal: Signal
    message: str  # one clause for the event message
    action: BatchAction = BatchAction.DROP
    cause: Cause | None = None
    phase: str = "input"
    samples: tuple[int, ...] = ()
    tokens: tuple[tuple[int, int], ...] = ()
    rows: tuple[int, ...] | None = None  # the dataset rows of `samples`, if those are no longer in the micro-batch


@dataclass
class MicroBatch(Generic[Payload]):
    """One forward and backward pass of the group."""

    index: int  # its position in the group
    payload: Payload  # what the loop needs to run it again, by reference
    rng: RngState  # right before its forward
    findings: tuple[Finding, ...] = ()  # what is known to be wrong with it
    # its dataset rows, if known; a tensor is read only when an event needs it
    row_numbers: list[int] | Tensor | None = None
    loss: Tensor | None = None  # detached, once it has run
    ids: tuple[str, ...] = ()  # what the loop knows of each sample that identifies it for the user
    terms: list[Term] = field(default_factory=list)  # of its loss, once they have been read
    left_out: frozenset[str] = frozenset()  # the terms that its loss leaves out when it is run again

    @property
    def term_values(self) -> dict[str, float]:
        """The values of its terms, as read, by name; terms with the same name add up."""
        values: dict[str, float] = {}
        for term in self.terms:
            if term.value is not None:
                values[term.name] = values.get(term.name, 0.0) + term.value
        return values

    @property
    def bad_terms(self) -> list[str]:
        """The terms that are not finite; those that may not be dropped come first."""
        bad = sorted((term for term in self.terms if term.is_bad), key=lambda term: term.drops)
        return list(dict.fromkeys(term.name for term in bad))

    def may_drop(self, name: str) -> bool:
        """Returns whether the loss may leave out a term."""
        return all(term.drops for term in self.terms if term.name == name)

    @property
    def rows(self) -> list[int] | None:
        """The dataset rows as plain numbers."""
        return self.row_numbers.tolist() if isinstance(self.row_numbers, Tensor) else self.row_numbers

    @property
    def suspicion(self) -> Finding | None:
        """What is to blame if its loss or gradients are not finite."""
        return next(iter(self.findings_to(BatchAction.SUSPECT)), None)

    @property
    def must_be_dropped(self) -> bool:
        """Whether a finding says that it cannot be trained on."""
        return bool(self.findings_to(BatchAction.DROP, BatchAction.HALT))

    def findings_to(self, *actions: BatchAction) -> list[Finding]:
        """Returns the findings about which one of these actions is taken."""
        return [finding for finding in self.findings if finding.action in actions]


@dataclass
class AccumulationGroup(Generic[Payload, Weight]):
    """What one optimizer step is made of."""

    weight: Weight  # how the loop weights the loss of each micro-batch, as its runner needs it
    micro_batches: list[MicroBatch[Payload]] = field(default_factory=list)  # in the order in which they ran
    # name, largest magnitude (on the device) and bound
    watched: list[tuple[str, Tensor, float | None]] = field(default_factory=list)
    terms: list[tuple[int, Term]] = field(default_factory=list)  # each with the position of its micro-batch
    # other scalars to read at the end of the step, each with a function that is called with its value
    readings: list[tuple[Tensor, Callable[[float], None]]] = field(default_factory=list)
    failure: str | None = None  # what failed in the guard while it was recorded: then it cannot be redone

    def weigh(self, weight: Weight) -> None:
        """Takes the weight of a group that began before its weight was known."""
        self.weight = weight

    def fail(self, failure: str) -> None:
        """Notes that the guard failed while this group was recorded."""
        self.failure = failure

    @contextmanager
    def kept_as_recorded(self) -> Iterator[None]:
        """What fails in this block does not change how the group was recorded."""
        failure = self.failure
        try:
            yield
        finally:
            self.failure = failure

    @property
    def losses(self) -> list[Tensor]:
        """The losses that were computed, on their device."""
        return [micro.loss for micro in self.micro_batches if micro.loss is not None]

    def watch(self, name: str, tensor: Tensor, bound: float | None) -> None:
        """Measures the largest magnitude of a tensor, to be read at the end of the step."""
        self.watched.append((name, magnitudes([tensor])[0], bound))

    def add_term(self, term: Term) -> None:
        """Adds a term of the micro-batch that is running: the first that has no loss yet."""
        self.terms.append((len(self.losses), term))

    def read_later(self, value_dev: Tensor, on_read: Callable[[float], None]) -> None:
        """Adds a scalar that is read with everything else at the end of the step; `on_read` is called with its value."""
        self.readings.append((value_dev, on_read))

    @property
    def notes(self) -> list[Tensor]:
        """What is read together with the losses: watched tensors, terms, then other readings."""
        watched = [largest for _, largest, _ in self.watched]
        return [*watched, *(term.value_dev for _, term in self.terms), *(value for value, _ in self.readings)]

    def take_notes(self, values: list[float]) -> list[float]:
        """Passes the values, as read, to terms and other readings and returns those of the watched tensors."""
        num_watched, num_first = len(self.watched), len(self.watched) + len(self.terms)
        for (index, term), value in zip(self.terms, values[num_watched:num_first], strict=True):
            if index < len(self.micro_batches):
                self.micro_batches[index].terms.append(replace(term, value=value))
        for (_, on_read), value in zip(self.readings, values[num_first:], strict=True):
            on_read(value)
        return values[:num_watched]

    @property
    def has_bad_term(self) -> bool:
        """Whether a term, as read, is not finite."""
        return any(micro.bad_terms for micro in self.micro_batches)
