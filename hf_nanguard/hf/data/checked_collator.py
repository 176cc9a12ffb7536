"""Checks a batch where it is collated: on the CPU, in the dataloader's worker, before it reaches a device.

Labels outside the vocabulary would otherwise end the process in a device assert that names no label. The checks read NumPy
views of the CPU tensors, so they add no torch operation and no device read.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sized
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...boundary import Boundary, GuardFailure, attempt
from ...core.rerun.micro_batch import BatchAction, Finding
from ...core.rerun.nested_inputs import quote_name
from ...core.vocabulary import Cause, Signal
from ..compat.prepared_dataset import format_ids, pick_ids
from .batch_limits import IGNORED_LABEL, Limits
from .learning_signal import NoSignal, find_no_signal
from .numpy_view import is_viewable, view
from .remove_samples import Batch, remove_samples

MAX_TOKENS = 16
ID_FIELDS = ("input_ids", "decoder_input_ids", "token_type_ids")
LOSS_ARGUMENTS = frozenset(("shift_labels", "ignore_index"))
"""Fields of a batch by which the hosts' losses take other labels than `labels`, or ignore another one than -100."""


@dataclass(frozen=True)
class BatchNote:
    """What the checks found, as plain values."""

    findings: tuple[Finding, ...] = ()
    no_signal: NoSignal | None = None  # why there is hardly anything to learn from the batch
    num_samples: int | None = None  # if bad samples were removed: how many there were,
    kept: tuple[int, ...] | None = None  # and which are left
    masked: tuple[int, ...] = ()  # samples without an unmasked label, before any was removed
    failure: str | None = None  # why the batch could not be checked
    ids: tuple[str, ...] = ()  # what columns such as `doc_id` say of each sample, if the check reads them


class NotedBatch(NamedTuple):
    """A batch on its way from a worker process to the trainer's, where the note is taken off."""

    batch: object
    note: BatchNote


@dataclass(frozen=True)
class BatchCheck:
    """Checks a batch.

    `verdict` says what to do with a bad batch: `"drop"`, `"drop_samples"`, `"repair"`, `"halt"` or `"observe"`. Unless
    the loop `can_drop` a batch, one that cannot be filled is only observed. `reads_ids` of a stream, whose rows cannot be looked
    up later.
    """

    limits: Limits
    verdict: str
    can_drop: bool = True
    reads_ids: bool = False

    def __call__(self, batch: object, examples: Sized | None = None) -> tuple[object, BatchNote]:
        """Returns the batch, or a copy that is safe to run, and what was found. Samples are removed only from a batch whose
        `examples` are given, because its items are counted after that."""
        failures: list[GuardFailure] = []  # of a worker process, perhaps, so they travel with the batch
        unchecked = lambda *_: (batch, BatchNote(failure=str(failures[0])))  # noqa: E731
        return Boundary(failures.append).call("the check", self._check, batch, examples, otherwise=unchecked)

    def _check(self, batch: object, examples: Sized | None) -> tuple[object, BatchNote]:
        if not isinstance(batch, MutableMapping):
            return batch, BatchNote()
        num_samples = None if examples is None else len(examples)
        checked = copy(batch)  # the collator may keep its batch
        masked = find_masked(batch, self.limits)
        findings = check_batch(checked, self.limits, self.verdict)
        if not self.can_drop:
            findings = [replace(f, action=BatchAction.OBSERVE) if f.action is BatchAction.DROP else f for f in findings]
        note = BatchNote(tuple(findings))
        if self.verdict == "drop_samples" and findings and num_samples is not None:
            note = take_apart(checked, findings, num_samples, self.limits)
        note = replace(note, no_signal=find_no_signal(checked, self.limits), masked=masked)
        return checked if findings else batch, note


@dataclass(frozen=True)
class CheckedCollator:
    """Runs the user's collator and checks the batch, within the iterator of a dataloader."""

    collator: Callable[[list], object]
    check: BatchCheck

    def __call__(self, examples: list) -> object:
        ids = attempt(lambda: read_ids(examples), lambda error: ()) if self.check.reads_ids else ()
        batch, note = self.check(self.collator(examples), examples)
        note = replace(note, ids=ids) if ids else note
        return batch if note == BatchNote() else NotedBatch(batch, note)


def read_ids(examples: Iterable[object]) -> tuple[str, ...]:
    """Returns what identifies each example, nothing if no example has a column for that."""
    ids = tuple(format_ids(pick_ids(each)) if isinstance(each, Mapping) else "" for each in examples)
    return ids if any(ids) else ()


def take_apart(batch: Batch, findings: list[Finding], num_samples: int, limits: Limits) -> BatchNote:
    """Removes the bad samples from a batch and returns its note; if they cannot be removed, the whole batch is dropped."""
    drops = [finding for finding in findings if finding.action is BatchAction.DROP]
    bad = {sample for finding in drops for sample in finding.samples}
    kept = remove_samples(batch, bad, num_samples) if bad and all(finding.samples for finding in drops) else None
    if kept is None:
        return BatchNote(tuple(findings))
    removed = [
        replace(finding, action=BatchAction.REMOVED, message=f"{finding.message}; they were removed from the batch")
        for finding in drops
    ]
    rest = check_batch(batch, limits, "drop")  # the remaining samples may have no label left
    return BatchNote((*removed, *rest), None, num_samples, kept)


def name_rows(note: BatchNote, rows: list[int] | None) -> tuple[BatchNote, list[int] | None]:
    """Returns the note with the rows of the samples that were removed, and the rows of those that are left."""
    if note.kept is not None and len(note.ids) == note.num_samples:
        note = replace(note, ids=tuple(note.ids[sample] for sample in note.kept))
    if note.kept is None or rows is None or len(rows) != note.num_samples:
        return note, rows if note.kept is None else None
    findings = tuple(
        replace(finding, rows=tuple(rows[sample] for sample in finding.samples))
        if finding.action is BatchAction.REMOVED
        else finding
        for finding in note.findings
    )
    return replace(note, findings=findings), [rows[sample] for sample in note.kept]


def check_batch(batch: Batch, limits: Limits, verdict: str) -> list[Finding]:
    """Checks a batch and, unless `verdict` is `"observe"`, makes it safe to run: bad entries are filled before they reach a
    kernel, so that a rank whose batch is bad can still take part in collective operations. Where the limits are not known,
    nothing is certain to be bad, and nothing is changed."""
    verdict = verdict if limits.known else "drop"
    certain = verdict == "drop_samples"  # a sample that is suspected costs no more than itself; a target may be missing
    action = BatchAction.DROP if certain else BatchAction(verdict)
    findings: list[Finding] = []
    wrong_length = check_length(batch, limits, action) if limits.known else None
    if wrong_length is not None:
        findings.append(wrong_length)
    for name, value in list(batch.items()):
        if not isinstance(value, Tensor) or not is_viewable(value):
            continue
        found: Finding | None = None
        bad: np.ndarray | None = None
        if value.is_floating_point():
            found, bad = check_finite(name, value, action)
            fill = 0
        elif name == "labels" and not LOSS_ARGUMENTS.intersection(batch):
            found, bad = check_labels(value, limits, action)
            fill = IGNORED_LABEL if limits.token_labels else 0
        elif name in ID_FIELDS and (num_ids := limits.num_rows(name)) is not None:
            found, bad = check_ids(name, value, num_ids, limits.placeholders, action)
            fill = 0
        elif name == "attention_mask":
            found = check_mask(value, action)
        if found is None:
            continue
        if certain and found.action is BatchAction.SUSPECT and name != "labels":
            found = replace(found, action=BatchAction.DROP)
        findings.append(found)
        if bad is not None and found.action not in (BatchAction.OBSERVE, BatchAction.SUSPECT):
            batch[name] = value.masked_fill(torch.from_numpy(np.asarray(bad)), fill)
    return findings


def _where(bad: np.ndarray) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Returns the samples with a bad entry and, for sequences, the first bad positions."""
    samples = tuple(int(i) for i in np.flatnonzero(bad.reshape(bad.shape[0], -1).any(axis=1))) if bad.ndim else ()
    tokens = tuple((int(s), int(t)) for s, t in np.argwhere(bad)[:MAX_TOKENS]) if bad.ndim == 2 else ()
    return samples, tokens


def check_finite(name: str, value: Tensor, action: BatchAction) -> tuple[Finding | None, np.ndarray | None]:
    """Finds NaN and inf in a float input; an additive attention mask may hold -inf.

    NaN may be a missing target and -inf a bias that masks, so such a batch is dropped only if its loss or gradients are not
    finite either.
    """
    array = view(value)
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(array.max()) and (np.isfinite(array.min()) or "mask" in name):
            return None, None
    bad = np.isnan(array) | np.isposinf(array) if "mask" in name else ~np.isfinite(array)
    samples, tokens = _where(bad)
    kind = "NaN" if np.isnan(array).any() else "inf"
    action = BatchAction.SUSPECT if action is BatchAction.DROP else action
    message = f"{quote_name(name)} holds {kind} in {int(bad.sum())} entries of samples {list(samples[:8])}"
    return Finding(Signal.INPUT_NONFINITE, message, action, Cause.INPUT_NONFINITE, "input", samples, tokens), bad


def check_labels(labels: Tensor, limits: Limits, action: BatchAction) -> tuple[Finding | None, np.ndarray | None]:
    """Finds labels that the loss cannot take, and a batch whose labels are all masked."""
    array = view(labels)
    if limits.num_labels is None or labels.dtype == torch.bool:
        return None, None
    if array.min() < 0 or array.max() >= limits.num_labels:
        bad = ((array < 0) & (array != IGNORED_LABEL)) | (array >= limits.num_labels)
        if bad.any():
            samples, tokens = _where(bad)
            example = int(array[bad][0])
            message = f"label {example} of sample {samples[0] if samples else 0} is outside 0..{limits.num_labels - 1}"
            return Finding(
                Signal.LABEL_OUT_OF_RANGE, message, action, Cause.LABEL_OUT_OF_RANGE, "input", samples, tokens
            ), bad
    samples = find_masked({"labels": labels}, limits)
    if samples and len(samples) == len(array):
        message = f"none of the {len(samples)} samples has an unmasked label"
        message = "the only sample has no unmasked label" if len(samples) == 1 else message
        # A masked batch cannot be filled with anything true: "repair" leaves it out as well.
        action = BatchAction.DROP if action is BatchAction.REPAIR else action
        return Finding(Signal.LABELS_MASKED, message, action, Cause.ALL_LABELS_MASKED, "input", samples), None
    return None, None


def find_masked(batch: Batch, limits: Limits) -> tuple[int, ...]:
    """Returns the samples of a batch of token labels that have no unmasked one."""
    labels = batch.get("labels")
    if not limits.known or not limits.token_labels or LOSS_ARGUMENTS.intersection(batch):
        return ()
    if not isinstance(labels, Tensor) or not is_viewable(labels) or labels.ndim != 2:
        return ()
    array = view(labels)
    return tuple(np.flatnonzero(((array[:, 1:] if limits.shifted else array) == IGNORED_LABEL).all(axis=1)).tolist())


def check_mask(mask: Tensor, action: BatchAction) -> Finding | None:
    """Finds samples without a single token to attend to. Most models handle them, so the batch is dropped only if its loss or
    gradients are not finite."""
    if mask.ndim != 2:
        return None
    empty = tuple(int(sample) for sample in np.flatnonzero(~view(mask).any(axis=1)))
    if not empty:
        return None
    message = f"attention_mask of samples {list(empty[:8])} masks every token"
    action = {BatchAction.DROP: BatchAction.SUSPECT, BatchAction.HALT: action}.get(action, BatchAction.OBSERVE)
    return Finding(Signal.INPUT_OUT_OF_RANGE, message, action, None, "input", empty)


def check_length(batch: Batch, limits: Limits, action: BatchAction) -> Finding | None:
    """Finds a batch of sequences without a token, or with more than the model has positions. Unless it is only observed it gets
    one token, or as many as there are positions, or no rank could run it."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not len(ids):
        return None
    if limits.num_positions is not None and ids.shape[1] > limits.num_positions and "position_ids" not in batch:
        return _cut_length(batch, ids, limits.num_positions, action)
    if ids.shape[1]:
        return None
    if action is not BatchAction.OBSERVE:
        for name, value in list(batch.items()):
            if isinstance(value, Tensor) and value.shape == ids.shape:
                fill = {"labels": IGNORED_LABEL, "attention_mask": 1}.get(name, 0)
                batch[name] = value.new_full((len(ids), 1), fill)
    message = f"input_ids of all {len(ids)} samples hold no token"
    action = BatchAction.DROP if action is BatchAction.REPAIR else action
    return Finding(Signal.INPUT_OUT_OF_RANGE, message, action, None, "input", tuple(range(len(ids))))


def _cut_length(batch: Batch, ids: Tensor, most: int, action: BatchAction) -> Finding:
    """Cuts sequences that are longer than the model allows; the attention mask tells which samples have such."""
    mask = batch.get("attention_mask")
    samples = tuple(range(len(ids)))
    if isinstance(mask, Tensor) and is_viewable(mask) and mask.shape == ids.shape:
        samples = tuple(np.flatnonzero(view(mask).sum(axis=1) > most).tolist()) or samples
    if action is not BatchAction.OBSERVE:
        for name, value in list(batch.items()):
            if isinstance(value, Tensor) and value.shape[:2] == ids.shape:
                batch[name] = value[:, :most]
    message = (
        f"input_ids of samples {list(samples[:8])} hold up to {ids.shape[1]} tokens, and the model has {most} positions"
    )
    return Finding(Signal.INPUT_OUT_OF_RANGE, message, action, None, "input", samples)


def check_ids(
    name: str, ids: Tensor, num_ids: int, placeholders: tuple[int, ...], action: BatchAction
) -> tuple[Finding | None, np.ndarray | None]:
    """Finds ids outside their embedding, except those that the model replaces itself."""
    array = view(ids)
    if array.min() >= 0 and array.max() < num_ids:
        return None, None
    bad = ((array < 0) | (array >= num_ids)) & ~np.isin(array, placeholders)
    if not bad.any():
        return None, None
    samples, tokens = _where(bad)
    message = f"{name} holds {int(array[bad][0])} in sample {samples[0] if samples else 0}, outside the embedding of {num_ids} {'row' if num_ids == 1 else 'rows'}"
    return Finding(Signal.INPUT_OUT_OF_RANGE, message, action, None, "input", samples, tokens), bad
