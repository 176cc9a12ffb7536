"""Tells when supervised training goes on with nothing to learn: hardly a label, one and the same input, zero gradients.

What a batch can teach is judged where it is made, on the CPU; the gradient norm is one that has been read anyway. A
dataset that repeats one example is a common test of a set-up and teaches that example, so equal inputs are news only if
their labels differ, or if every token of every sample is the same.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import numpy as np
from torch import Tensor

from .batch_limits import Limits
from .numpy_view import is_viewable, view

MAX_EMPTY = 0.9  # samples without a single label, as a share of the batch
MIN_TARGETS = 0.001  # labels, as a share of the tokens
INPUTS = ("input_ids", "inputs_embeds", "input_features", "input_values", "pixel_values")


class NoSignal(StrEnum):
    """Why a batch, or a step, has nothing to teach."""

    MASKED = "masked"
    CONSTANT = "constant"
    ZERO = "zero"


TOLD = {
    NoSignal.MASKED: (
        "nearly all labels were masked",
        "Check the chat template and the response marker that decide which tokens have labels, and that sequences are not "
        "cut off before their answers",
    ),
    NoSignal.CONSTANT: (
        "all samples had the same input",
        "Check that tokenizer and image or audio processor get the data they expect and that the collator keeps it",
    ),
    NoSignal.ZERO: (
        "the gradient was exactly zero",
        "Check that the trained parameters take part in the loss and that the loss is not detached or clamped",
    ),
}


def judge_lesson(batch: Mapping, limits: Limits) -> NoSignal | None:
    """Returns why a batch has hardly anything to teach, `None` if it has.

    Args:
        batch (`Mapping`):
            The collated batch, on the CPU.
        limits (`Limits`):
            What the model can take.
    """
    labels = _array(batch.get("labels"))
    if labels is not None and limits.token_labels and labels.ndim == 2:
        targets = ~np.isin(labels[:, 1:] if limits.shifted else labels, limits.ignored)
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
    # One prompt goes with all kinds of images, and a field that is not known here may hold the input proper.
    fields = [_array(value) for name, value in batch.items() if name != "labels" and isinstance(value, Tensor)]
    same = all(array is not None and array.ndim and _all_same(array) for array in fields)
    return NoSignal.CONSTANT if labels is not None and same and not _all_same(labels) else None


def _is_one_token(inputs: np.ndarray, mask: np.ndarray | None) -> bool:
    tokens = inputs[mask.astype(bool)] if mask is not None and mask.shape == inputs.shape else inputs.reshape(-1)
    return tokens.size > len(inputs) and bool((tokens == tokens[0]).all())


def _array(value: Any) -> np.ndarray | None:
    return view(value) if isinstance(value, Tensor) and is_viewable(value) else None


def _all_same(array: np.ndarray) -> bool:
    """Returns whether all samples are equal; two that differ in their first entries are enough to know."""
    first = array[0]
    if len(array) > 1 and not np.array_equal(first.flat[:64], array[-1].flat[:64]):
        return False
    return all(np.array_equal(first, other) for other in array[1:])


class NoSignalDetector:
    """Counts optimizer steps in a row that had nothing to teach.

    Args:
        stall_steps (`int`):
            How many make a stall; 0 turns the watch off.

    Example:

    ```python
    watch = LessonWatch(20)
    message = watch.observe(step, [judge_lesson(batch, limits)], grad_norm=0.3)
    ```
    """

    def __init__(self, stall_steps: int):
        self.stall_steps = stall_steps
        self.run: dict[NoSignal, int] = {}
        self.told: set[NoSignal] = set()

    def observe(self, step: int, lessons: list[NoSignal | None], grad_norm: float | None) -> str | None:
        """Takes note of one optimizer step.

        Args:
            step (`int`):
                The step.
            lessons (`list[NoSignal | None]`):
                What was judged of each of its batches.
            grad_norm (`float`, *optional*):
                The gradient norm before clipping.

        Returns:
            `str | None`: a message for the event `no_learning_signal`, once a stall.
        """
        if not self.stall_steps:
            return None
        now = {
            kind for kind in (NoSignal.MASKED, NoSignal.CONSTANT) if lessons and all(found is kind for found in lessons)
        }
        if grad_norm == 0.0:
            now.add(NoSignal.ZERO)
        self.run = {kind: self.run.get(kind, 0) + 1 for kind in now}
        self.told &= now
        for kind in NoSignal:
            if self.run.get(kind, 0) >= self.stall_steps and kind not in self.told:
                self.told.add(kind)
                why, advice = TOLD[kind]
                num = self.run[kind]
                return f"hardly anything to learn from in {num} steps in a row up to step {step}: {why}. {advice}."
        return None
