"""What is held of a micro-batch so that the trainer can run it again: its prepared inputs, and its weight in the loss."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...core.torch_private import write_count


@dataclass(frozen=True)
class HeldInputs:
    """The inputs of a micro-batch as `_prepare_inputs` returned them: a copy of the dictionary, not of the tensors."""

    inputs: object
    versions: tuple[int, ...]

    @classmethod
    def of(cls, inputs: object) -> "HeldInputs":
        """Holds prepared inputs by reference."""
        return cls(copy(inputs) if isinstance(inputs, Mapping) else inputs, _versions(inputs))

    def again(self) -> object:
        """Returns the inputs for another run. The loss may change the dictionary it gets."""
        return copy(self.inputs) if isinstance(self.inputs, Mapping) else self.inputs

    @property
    def written(self) -> bool:
        """Whether a tensor among them was changed in place since."""
        return _versions(self.inputs) != self.versions

    @property
    def has_labels(self) -> bool:
        return isinstance(self.inputs, Mapping) and "labels" in self.inputs


def _versions(inputs: object) -> tuple[int, ...]:
    values = inputs.values() if isinstance(inputs, Mapping) else ()
    return tuple(write_count(v) for v in values if isinstance(v, Tensor) and not v.is_inference())


class Replayer(Protocol):
    """What the runner needs of whoever stands between a trainer and its inputs."""

    num_backwards: int  # largest number of backward passes in one training_step, counted on several ranks

    def replaying(self, held: HeldInputs) -> AbstractContextManager[None]:
        """Makes `_prepare_inputs` return held inputs inside the block."""


@dataclass(frozen=True)
class LossWeight:
    """How the Trainer weighs a micro-batch: by the number of them, or by the items of the whole group."""

    steps: float  # that per-batch means are divided by; not whole when ranks have different numbers left
    num_items: Tensor | int | None  # that token losses are divided by
    even: bool = True  # whether all ranks run as many micro-batches, so that metrics may be reduced across them
    completion_items: Tensor | int | None = None  # of the whole group, for a trainer that counts them itself
