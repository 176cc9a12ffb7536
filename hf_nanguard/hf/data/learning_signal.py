"""Detects training that goes on with nothing to learn from: hardly any label, one input, equal rewards, zero gradients.

Supervised batches are classified where they are made, on the CPU; an online trainer classifies its steps by its rewards.
The gradient norm is one that has been read anyway. A dataset that repeats one example is a common test of a set-up and
that example can be learned, so equal inputs count only if their labels differ, or if every token of every sample is the
same. GRPO's loss is 0.0 in healthy runs too, so the loss says nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from ...core.event import Culprit, Event
from ...core.journal import Journal
from ...core.rerun.micro_batch import AccumulationGroup
from ...core.vocabulary import Action, Signal, StrEnum
from .batch_limits import IGNORED_LABEL, Limits
from .numpy_view import is_viewable, view
from .remove_samples import Batch

MAX_EMPTY = 0.9  # samples without a single label, as a share of the batch
MIN_TARGETS = 0.001  # labels, as a share of the tokens
INPUTS = ("input_ids", "inputs_embeds", "input_features", "input_values", "pixel_values")


class NoSignal(StrEnum):
    """Why a batch or a step has nothing to learn from."""

    MASKED = "masked"
    CONSTANT = "constant"
    EQUAL_REWARDS = "equal_rewards"
    ZERO_GRADIENT = "zero_gradient"


REASONS = {
    NoSignal.MASKED: (
        "nearly all labels were masked",
        "Check the chat template and the response marker that decide which tokens have labels, and that sequences are not "
        "cut off before their answers.",
    ),
    NoSignal.CONSTANT: (
        "all samples had the same input",
        "Check that tokenizer and image or audio processor get the data they expect and that the collator keeps it.",
    ),
    NoSignal.EQUAL_REWARDS: (
        "the rewards were equal within every group",
        "Check that the reward functions give different completions different rewards and that sampling varies.",
    ),
    NoSignal.ZERO_GRADIENT: (
        "the gradient was exactly zero",
        "Check that the trained parameters take part in the loss and that the loss is not detached or clamped.",
    ),
}
"""For each kind: what happened, and what to check."""


@dataclass(frozen=True)
class StepSignal:
    """What one optimizer step could learn from."""

    missing: NoSignal | None  # why it could learn nothing; None if it could
    phase: str = "backward"  # the phase in which the cause lies, as in [`Culprit`]
    evidence: str = ""  # a sentence for the event's message
    is_global: bool = False  # every rank classifies the step alike, so that one event is enough

    @classmethod
    def of_batches(cls, batches: Sequence[NoSignal | None], grad_norm: float | None) -> "StepSignal":
        """Classifies a supervised step: by its batches if all lack the same, else by its gradient norm."""
        kind = batches[0] if batches and len(set(batches)) == 1 else None
        missing = NoSignal.ZERO_GRADIENT if kind is None and grad_norm == 0.0 else kind
        return cls(missing, "input" if any(batches) else "backward")


def find_no_signal(batch: Batch, limits: Limits) -> NoSignal | None:
    """Returns why there is hardly anything to learn from a batch, `None` if there is enough."""
    labels = _array(batch.get("labels"))
    if not limits.known or (labels is not None and not labels.ndim):
        return None
    if labels is not None and limits.token_labels and labels.ndim == 2:
        targets = (labels[:, 1:] if limits.shifted else labels) != IGNORED_LABEL
        mask = _array(batch.get("attention_mask"))
        num_tokens = labels.size if mask is None or mask.shape != labels.shape else np.count_nonzero(mask)
        num_targets = np.count_nonzero(targets)
        # Long texts with an answer of a few tokens each are healthy.
        few = num_targets <= len(labels) and num_targets < MIN_TARGETS * num_tokens
        if num_targets and (few or np.mean(~targets.any(axis=1)) >= MAX_EMPTY):
            return NoSignal.MASKED
    inputs = [_array(batch[name]) for name in INPUTS if name in batch]
    first = inputs[0] if inputs else None
    if first is None or first.ndim < 2:
        return None
    if len(inputs) == 1 and first.ndim == 2 and _is_one_token(first, _array(batch.get("attention_mask"))):
        return NoSignal.CONSTANT
    # The same prompt may be used with different images, and an unknown field may be the actual input.
    fields = [_array(value) for name, value in batch.items() if name != "labels" and isinstance(value, Tensor)]
    same = all(array is not None and array.ndim and _all_same(array) for array in fields)
    return NoSignal.CONSTANT if labels is not None and same and not _all_same(labels) else None


def _is_one_token(inputs: np.ndarray, mask: np.ndarray | None) -> bool:
    tokens = inputs[mask.astype(bool)] if mask is not None and mask.shape == inputs.shape else inputs.reshape(-1)
    return tokens.size > len(inputs) and bool((tokens == tokens[0]).all())


def _array(value: object) -> np.ndarray | None:
    return view(value) if isinstance(value, Tensor) and is_viewable(value) else None


def _all_same(array: np.ndarray) -> bool:
    """Returns whether all samples are equal; compares the first entries of two samples first, because that is cheap."""
    first = array[0]
    if len(array) > 1 and not np.array_equal(first.flat[:64], array[-1].flat[:64]):
        return False
    return all(np.array_equal(first, other) for other in array[1:])


class NoSignalDetector:
    """Counts optimizer steps in a row that had nothing to learn from, and emits `no_learning_signal` once per streak of
    `stall_steps`; 0 turns the detector off."""

    def __init__(self, stall_steps: int, journal: Journal):
        self.stall_steps = stall_steps
        self.journal = journal
        self.begin_run()

    def begin_run(self) -> None:
        """Counts from zero."""
        self.num_steps = 0
        self.first_step = 0
        self.kinds: list[NoSignal] = []

    def observe(self, step: int, signal: StepSignal, grad_norm: float | None) -> None:
        """Counts one optimizer step; its gradient norm before clipping is shown in the event."""
        if signal.missing is None:
            self.num_steps, self.kinds = 0, []
            return
        self.first_step = self.first_step if self.num_steps else step
        self.num_steps += 1
        if signal.missing not in self.kinds:
            self.kinds.append(signal.missing)
        if self.num_steps == self.stall_steps:
            self._emit(step, signal, grad_norm)

    def _emit(self, step: int, signal: StepSignal, grad_norm: float | None) -> None:
        what, advice = zip(*(REASONS[kind] for kind in self.kinds), strict=True)
        message = (
            f"No learning signal in {self.num_steps} optimizer steps in a row ({self.first_step} to {step}): "
            f"{' or '.join(what)}. {' '.join((*filter(None, [signal.evidence]), *advice))}"
        )
        write = self.journal.write_once if signal.is_global else self.journal.write
        values, culprit = {"grad_norm": grad_norm}, Culprit(phase=signal.phase)
        write(Event(step, Signal.NO_LEARNING_SIGNAL, Action.OBSERVED, message, values=values, culprit=culprit))


class OnlineData(Protocol):
    """The data of an online trainer (GRPO, RLOO): sampled and scored while the run goes on.

    Handed to the trainer guard once.
    """

    def add_readings(self, group: AccumulationGroup) -> None:
        """Adds scalars to what is read at the end of the step, right before it is settled."""

    def step_signal(self, grad_norm: float | None) -> StepSignal | None:
        """Returns what the step that was just settled could learn from, `None` if that is not known; the norm is that before
        clipping."""

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of a log row, counted since the last call."""
