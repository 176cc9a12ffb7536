"""The micro-batches of one optimizer step, held by reference so that the step can be redone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..finite import magnitudes
from ..rng import RngState
from ..vocabulary import Cause, Signal
from .loss_terms import Term


@dataclass(frozen=True)
class Finding:
    """Something known to be wrong with a micro-batch before its gradients are looked at. Plain values only.

    Args:
        signal (`Signal`):
            What was seen.
        message (`str`):
            One clause for a person.
        verdict (`str`):
            `"drop"`, `"halt"`, `"repair"` (already done) or `"observe"`. `"suspect"`: to blame if the micro-batch turns
            out bad; a loss may know how to leave such an entry out. `"removed"`: the samples were taken out of the batch.
        cause, phase, samples, tokens:
            As in the event's culprit.
        rows (`tuple[int, ...]`, *optional*):
            The dataset rows of `samples`, if those are no longer in the micro-batch.
    """

    signal: Signal
    message: str
    verdict: str = "drop"
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
            Its place in the group.
        payload (`Any`):
            What the loop needs to run it again, by reference.
        rng (`RngState`):
            The random state right before its forward.
        findings (`tuple[Finding, ...]`, *optional*):
            What is known to be wrong with it.
        row_numbers (`list[int]` or `Tensor`, *optional*):
            The dataset rows it was made of, where they are known; a tensor is read only when somebody asks.
        terms (`list[Term]`, *optional*):
            The terms of its loss, once they have been read.
        cut (`frozenset[str]`, *optional*):
            The terms it is run again without.
        is_dropped (`bool`, *optional*):
            Whether the step was redone without it.
    """

    index: int
    payload: Any
    rng: RngState
    findings: tuple[Finding, ...] = ()
    row_numbers: list[int] | Tensor | None = None
    loss: Tensor | None = None
    terms: list[Term] = field(default_factory=list)
    cut: frozenset[str] = frozenset()
    is_dropped: bool = False

    @property
    def term_values(self) -> dict[str, float]:
        """What was read of its terms, by name; terms of one name add up."""
        values: dict[str, float] = {}
        for term in self.terms:
            if term.value is not None:
                values[term.name] = values.get(term.name, 0.0) + term.value
        return values

    @property
    def bad_terms(self) -> list[str]:
        """The terms that are not finite, first those that the loss cannot do without."""
        bad = sorted((term for term in self.terms if term.is_bad), key=lambda term: term.drops)
        return list(dict.fromkeys(term.name for term in bad))

    @property
    def rows(self) -> list[int] | None:
        """The dataset rows as plain numbers."""
        return self.row_numbers.tolist() if isinstance(self.row_numbers, Tensor) else self.row_numbers

    @property
    def suspicion(self) -> Finding | None:
        """What is to blame should its loss or gradients not be finite."""
        return next((finding for finding in self.findings if finding.verdict == "suspect"), None)

    @property
    def must_go(self) -> bool:
        """Whether a finding says that it cannot be trained on."""
        return any(finding.verdict in ("drop", "halt") for finding in self.findings)


@dataclass
class AccumulationGroup:
    """What one optimizer step is made of.

    Args:
        share (`Any`):
            How the loop weighs each micro-batch of the whole group.
        micro_batches (`list[MicroBatch]`, *optional*):
            In the order they ran.
        watched (`list`, *optional*):
            Name, largest magnitude (on the device) and bound of tensors the user watches.
        terms (`list`, *optional*):
            Terms of losses, each with the place of its micro-batch.
        readings (`list`, *optional*):
            Other scalars to read at the end of the step, each with a function that is called with its value.
    """

    share: Any = None
    micro_batches: list[MicroBatch] = field(default_factory=list)
    watched: list[tuple[str, Tensor, float | None]] = field(default_factory=list)
    terms: list[tuple[int, Term]] = field(default_factory=list)
    readings: list[tuple[Tensor, Callable[[float], None]]] = field(default_factory=list)

    @property
    def losses(self) -> list[Tensor]:
        """The losses that were computed, on their device."""
        return [micro.loss for micro in self.micro_batches if micro.loss is not None]

    def watch(self, name: str, tensor: Tensor, bound: float | None) -> None:
        """Keeps the largest magnitude of a tensor for the read at the end of the step."""
        self.watched.append((name, magnitudes([tensor])[0], bound))

    def add_term(self, term: Term) -> None:
        """Notes a term of the micro-batch that is running: the first that has no loss yet."""
        self.terms.append((len(self.losses), term))

    def read_later(self, value_dev: Tensor, on_read: Callable[[float], None]) -> None:
        """Has a scalar read with everything else at the end of the step, and `on_read` called with it."""
        self.readings.append((value_dev, on_read))

    @property
    def notes(self) -> list[Tensor]:
        """What is to be read beside the losses: watched tensors, terms, then other readings."""
        watched = [largest for _, largest, _ in self.watched]
        return [*watched, *(term.value_dev for _, term in self.terms), *(value for value, _ in self.readings)]

    def take_notes(self, values: list[float]) -> list[float]:
        """Hands the values, as read, to terms and other readings and returns those of the watched tensors."""
        num_watched, num_first = len(self.watched), len(self.watched) + len(self.terms)
        for (index, term), value in zip(self.terms, values[num_watched:num_first], strict=True):
            term.value = value
            if index < len(self.micro_batches):
                self.micro_batches[index].terms.append(term)
        for (_, on_read), value in zip(self.readings, values[num_first:], strict=True):
            on_read(value)
        return values[:num_watched]

    @property
    def has_bad_term(self) -> bool:
        """Whether a term was read that is not finite."""
        return any(micro.bad_terms for micro in self.micro_batches)
