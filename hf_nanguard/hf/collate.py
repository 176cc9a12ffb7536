"""Checks of a batch where it is made: on the CPU, in the worker, before it reaches a device.

Labels out of the vocabulary would otherwise end the process in a device assert that names nothing. The arrays are
looked at through NumPy views of the CPU tensors, so no torch operation and no device read is added.
"""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.group import Finding
from ..core.signal import Cause, Signal
from .fact import Limits

NOTE = "nanguard_note"
IGNORED = -100
MAX_TOKENS = 16


@dataclass(frozen=True)
class BatchNote:
    """What the checks found, as plain values; it travels with the batch and is taken out before the model sees it."""

    findings: tuple[Finding, ...] = ()


class CheckedCollator:
    """Runs the user's collator and checks what it made.

    Args:
        collator (`Callable`):
            The user's own.
        limits (`Limits`):
            What the model can take.
        verdict (`str`):
            What is to be done with a bad batch: `"drop"`, `"repair"`, `"halt"` or `"observe"`.
        can_drop (`bool`, *optional*, defaults to `True`):
            Whether the loop can leave a batch out; if not, one that cannot be filled is only observed.
    """

    def __init__(self, collator: Callable, limits: Limits, verdict: str, can_drop: bool = True):
        self.collator = collator
        self.limits = limits
        self.verdict = verdict
        self.can_drop = can_drop

    def __call__(self, examples: list) -> Any:
        batch = self.collator(examples)
        if not isinstance(batch, MutableMapping):
            return batch
        findings = check_batch(batch, self.limits, self.verdict)
        if not self.can_drop:
            findings = [replace(f, verdict="observe") if f.verdict == "drop" else f for f in findings]
        if findings:
            batch[NOTE] = BatchNote(tuple(findings))
        return batch


def check_batch(batch: MutableMapping, limits: Limits, verdict: str) -> list[Finding]:
    """Checks a batch and, unless `verdict` is `"observe"`, makes it safe to run: bad entries are filled in place of
    reaching a kernel, so that a rank whose batch is bad can still take part in what all ranks do together.

    Args:
        batch (`MutableMapping`):
            The collated batch, on the CPU.
        limits (`Limits`):
            What the model can take.
        verdict (`str`):
            As in [`CheckedCollator`].
    """
    findings: list[Finding] = []
    for name, value in list(batch.items()):
        if not isinstance(value, Tensor) or not _is_viewable(value):
            continue
        found: Finding | None = None
        bad: np.ndarray | None = None
        if value.is_floating_point():
            found, bad = check_finite(name, value, verdict)
            fill = 0
        elif name == "labels":
            found, bad = check_labels(value, limits, verdict)
            fill = IGNORED if limits.token_labels else 0
        elif name in ("input_ids", "decoder_input_ids") and limits.num_ids is not None:
            found, bad = check_ids(name, value, limits, verdict)
            fill = 0
        elif name == "attention_mask":
            found = check_mask(value)
        if found is None:
            continue
        findings.append(found)
        if bad is not None and found.verdict not in ("observe", "suspect"):
            batch[name] = value.masked_fill(torch.from_numpy(np.asarray(bad)), fill)
    return findings


def _is_viewable(tensor: Tensor) -> bool:
    """Returns whether NumPy can look at the tensor: not a sparse, nested, quantized or 8-bit float one."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.numel() > 0 and not (tensor.is_floating_point() and tensor.element_size() < 2)


def view(tensor: Tensor) -> np.ndarray:
    """Returns the memory of a CPU tensor as an array, bfloat16 as the float32 it rounds from."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return np.from_dlpack(tensor.float() if tensor.dtype == torch.bfloat16 else tensor)


def _where(bad: np.ndarray) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Returns the samples with a bad entry and, for sequences, the first bad positions."""
    samples = tuple(int(i) for i in np.flatnonzero(bad.reshape(bad.shape[0], -1).any(axis=1))) if bad.ndim else ()
    tokens = tuple((int(s), int(t)) for s, t in np.argwhere(bad)[:MAX_TOKENS]) if bad.ndim == 2 else ()
    return samples, tokens


def check_finite(name: str, value: Tensor, verdict: str) -> tuple[Finding | None, np.ndarray | None]:
    """Looks for NaN and inf in a float input; an additive attention mask may hold -inf.

    NaN may be a missing target and -inf a bias that masks, so a batch is not dropped for it unless its loss or gradients
    are not finite either.
    """
    array = view(value)
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(array.max()) and (np.isfinite(array.min()) or "mask" in name):
            return None, None
    bad = np.isnan(array) | np.isposinf(array) if "mask" in name else ~np.isfinite(array)
    samples, tokens = _where(bad)
    kind = "NaN" if np.isnan(array).any() else "inf"
    verdict = "suspect" if verdict == "drop" else verdict
    message = f"{name} holds {kind} in {int(bad.sum())} entries of samples {list(samples[:8])}"
    return Finding(Signal.INPUT_NONFINITE, message, verdict, Cause.INPUT_NONFINITE, "input", samples, tokens), bad


def check_labels(labels: Tensor, limits: Limits, verdict: str) -> tuple[Finding | None, np.ndarray | None]:
    """Looks for labels the loss cannot take, and for a batch whose labels are all masked."""
    array = view(labels)
    if limits.num_labels is None or labels.dtype == torch.bool:
        return None, None
    if array.min() < 0 or array.max() >= limits.num_labels:
        bad = ((array < 0) & ~np.isin(array, limits.ignored)) | (array >= limits.num_labels)
        if bad.any():
            samples, tokens = _where(bad)
            example = int(array[bad][0])
            message = f"label {example} of sample {samples[0] if samples else 0} is outside 0..{limits.num_labels - 1}"
            return Finding(
                Signal.LABEL_OUT_OF_RANGE, message, verdict, Cause.LABEL_OUT_OF_RANGE, "input", samples, tokens
            ), bad
    if not limits.token_labels or array.ndim != 2:
        return None, None
    targets = array[:, 1:] if limits.shifted else array
    if np.isin(targets, limits.ignored).all():
        samples = tuple(range(array.shape[0]))
        message = f"all labels of {array.shape[0]} samples are masked, so nothing can be learned from them"
        # A masked batch cannot be filled with anything true: "repair" leaves it out as well.
        verdict = "drop" if verdict == "repair" else verdict
        return Finding(Signal.LABELS_MASKED, message, verdict, Cause.ALL_LABELS_MASKED, "input", samples), None
    return None, None


def check_mask(mask: Tensor) -> Finding | None:
    """Looks for samples without a single token to attend to; they are legal, so they are only observed."""
    if mask.ndim != 2:
        return None
    empty = tuple(int(sample) for sample in np.flatnonzero(~view(mask).any(axis=1)))
    if not empty:
        return None
    message = f"attention_mask of samples {list(empty[:8])} masks every token"
    return Finding(Signal.INPUT_OUT_OF_RANGE, message, "observe", None, "input", empty)


def check_ids(name: str, ids: Tensor, limits: Limits, verdict: str) -> tuple[Finding | None, np.ndarray | None]:
    """Looks for ids outside the embedding, but for those the model itself replaces."""
    array = view(ids)
    if array.min() >= 0 and array.max() < limits.num_ids:
        return None, None
    bad = ((array < 0) | (array >= limits.num_ids)) & ~np.isin(array, limits.placeholders)
    if not bad.any():
        return None, None
    samples, tokens = _where(bad)
    message = f"{name} holds {int(array[bad][0])} in sample {samples[0] if samples else 0}, outside the embedding of {limits.num_ids} rows"
    return Finding(Signal.INPUT_OUT_OF_RANGE, message, verdict, None, "input", samples, tokens), bad
