"""The micro-batches of one optimizer step, held by reference so that the step can be redone."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .finite import magnitudes
from .rng import RngState
from .signal import Cause, Signal


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
            out bad; a loss may know how to leave such an entry out.
        cause, phase, samples, tokens:
            As in the event's culprit.
    """

    signal: Signal
    message: str
    verdict: str = "drop"
    cause: Cause | None = None
    phase: str = "input"
    samples: tuple[int, ...] = ()
    tokens: tuple[tuple[int, int], ...] = ()


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
    """

    index: int
    payload: Any
    rng: RngState
    findings: tuple[Finding, ...] = ()
    row_numbers: list[int] | Tensor | None = None
    loss: Tensor | None = None

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
class Group:
    """What one optimizer step is made of.

    Args:
        share (`Any`):
            How the loop weighs each micro-batch of the whole group.
        micro_batches (`list[MicroBatch]`, *optional*):
            In the order they ran.
        watched (`list`, *optional*):
            Name, largest magnitude (on the device) and bound of tensors the user watches.
    """

    share: Any = None
    micro_batches: list[MicroBatch] = field(default_factory=list)
    watched: list[tuple[str, Tensor, float | None]] = field(default_factory=list)

    @property
    def losses(self) -> list[Tensor]:
        """The losses that were computed, on their device."""
        return [micro.loss for micro in self.micro_batches if micro.loss is not None]

    def watch(self, name: str, tensor: Tensor, bound: float | None) -> None:
        """Keeps the largest magnitude of a tensor for the read at the end of the step."""
        self.watched.append((name, magnitudes([tensor])[0], bound))
