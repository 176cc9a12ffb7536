"""The micro-batches of one optimizer step, held by reference so that the step can be redone."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from torch import Tensor

from ..finite import magnitudes
from ..rng import RngState
from ..vocabulary import Cause, Signal
from .loss_terms import Term


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

    Args:
        signal (`Signal`):
            What was found.
        message (`str`):
            One clause for the event message.
        action (`BatchAction`, *optional*, defaults to `BatchAction.DROP`):
            What is done about it.
        cause, phase, samples, tokens:
            As in the event's culprit.
        rows (`tuple[int, ...]`, *optional*):
            The dataset rows of `samples`, if those are no longer in the micro-batch.
    """

    signal: Signal
    message: str
    action: BatchAction = BatchAction.DROP
    cause: Cause | None = None
    phase: str = "input"
    samples: tuple[int, ...] = ()
    tokens: tuple[tuple[int, int], ...] = ()
    rows: tuple[int, ...] | None = None


@dataclass
class MicroBatch:
    """One forward and backward pass of the group.

    Args:
        index (`int`):
            Its position in the group.
        payload (`Any`):
            What the loop needs to run it again, by reference.
        rng (`RngState`):
            The random state right before its forward.
        findings (`tuple[Finding, ...]`, *optional*):
            What is known to be wrong with it.
        row_numbers (`list[int]` or `Tensor`, *optional*):
            Its dataset rows, where they are known; a tensor is read only when an event needs it.
        loss (`Tensor`, *optional*):
            Its loss, detached, once it has run.
        terms (`list[Term]`, *optional*):
            The terms of its loss, once they have been read.
        left_out (`frozenset[str]`, *optional*):
            The terms that its loss leaves out when it is run again.
    """

    index: int
    payload: Any
    rng: RngState
    findings: tuple[Finding, ...] = ()
    row_numbers: list[int] | Tensor | None = None
    loss: Tensor | None = None
    terms: list[Term] = field(default_factory=list)
    left_out: frozenset[str] = frozenset()

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
class AccumulationGroup:
    """What one optimizer step is made of.

    Args:
        weight (`Any`, *optional*):
            How the loop weighs the loss of each micro-batch, as its runner needs it.
        micro_batches (`list[MicroBatch]`, *optional*):
            In the order in which they ran.
        watched (`list`, *optional*):
            Name, largest magnitude (on the device) and bound of each tensor the user watches.
        terms (`list`, *optional*):
            Terms of losses, each with the position of its micro-batch.
        readings (`list`, *optional*):
            Other scalars to read at the end of the step, each with a function that is called with its value.
    """

    weight: Any = None
    micro_batches: list[MicroBatch] = field(default_factory=list)
    watched: list[tuple[str, Tensor, float | None]] = field(default_factory=list)
    terms: list[tuple[int, Term]] = field(default_factory=list)
    readings: list[tuple[Tensor, Callable[[float], None]]] = field(default_factory=list)

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
        """Has a scalar read with everything else at the end of the step, and `on_read` called with it."""
        self.readings.append((value_dev, on_read))

    @property
    def notes(self) -> list[Tensor]:
        """What is read together with the losses: watched tensors, then terms."""
        return [*(largest for _, largest, _ in self.watched), *(term.value_dev for _, term in self.terms)]

    def take_notes(self, values: list[float]) -> list[float]:
        """Passes the values of the terms, as read, to their micro-batches and returns those of the watched tensors."""
        for (index, term), value in zip(self.terms, values[len(self.watched) :], strict=True):
            if index < len(self.micro_batches):
                self.micro_batches[index].terms.append(replace(term, value=value))
        return values[: len(self.watched)]

    @property
    def has_bad_term(self) -> bool:
        """Whether a term, as read, is not finite."""
        return any(micro.bad_terms for micro in self.micro_batches)
