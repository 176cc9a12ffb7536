"""Checks of labels: rows without any, rows that the host removes, stop tokens that are never learned."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...core.rerun.nested_inputs import quote_name
from ...hf.data.batch_limits import IGNORED_LABEL
from ...hf.data.checked_collator import find_masked
from ...hf.data.numpy_view import is_viewable, view
from ...plain_text import format_rows, quote
from ..rules.finding import Finding, Severity
from .sampled_rows import Sample, SampledRow

FEW = 0.01  # a smaller share of rows is worth a note only


def by_share(num_bad: int, sample: Sample, error_from: float | None = None) -> Severity:
    """Returns how bad it is that so many of the rows are bad."""
    share = num_bad / max(len(sample.rows), 1)
    if error_from is not None and share >= error_from:
        return Severity.ERROR
    return Severity.WARNING if share >= FEW else Severity.NOTE


def describe(rows: Sequence[SampledRow], sample: Sample) -> str:
    """Returns how many rows and which."""
    share = len(rows) / max(len(sample.rows), 1)
    return f"{len(rows)} of {len(sample.rows)} rows ({share:.1%}){format_rows([row.number for row in rows])}"


def numbers(rows: Sequence[SampledRow]) -> tuple[int, ...]:
    return tuple(row.number for row in rows)


def has_token_labels(sample: Sample) -> bool:
    """Returns whether rows have labels that are tokens, for a loss of the hosts."""
    return (
        sample.limits.known
        and sample.limits.token_labels
        and any(row.field("labels") is not None for row in sample.rows)
    )


def has_answers(sample: Sample) -> bool:
    """Returns whether labels are tokens that the model is to generate, not those of a masked text."""
    return has_token_labels(sample) and (sample.limits.shifted or sample.is_seq2seq)


def _is_masked(row: SampledRow, sample: Sample) -> bool:
    """Returns whether none of the labels of a row is a target."""
    labels = row.field("labels")
    if row.batch is None or labels is None or not labels.numel():
        return False
    return len(find_masked(dict(row.batch), sample.limits)) == len(labels)


def check_masked(sample: Sample) -> Finding | None:
    """Rows without an unmasked label train nothing."""
    bad = [row for row in sample.rows if _is_masked(row, sample)]
    if not bad:
        return None
    what = f"No label is left in {describe(bad, sample)}."
    why = "All their labels are masked (-100), so they train nothing; a batch of them has a loss of 0/0 or 0."
    length = sample.facts.max_length
    change = "Raise max_length" if length is not None else "Check the chat template and the mask of the answers"
    change += f" (now {length}), so that answers are not cut off, or remove these rows." if length else "."
    if sample.response_template is not None:
        why += f" The collator did not find its response template {sample.response_template!r} in them."
        change = "Correct response_template: it must be tokenized as it is inside a text, with the spaces or newlines before it."
    return Finding(by_share(len(bad), sample, 0.5), what, why, change, rows=numbers(bad))


def check_removed(sample: Sample) -> Finding | None:
    """Rows that the host has removed without a word."""
    removed, given = sample.prepared.removed, sample.prepared.num_given
    if not removed:
        return None
    what = f"The trainer removed {len(removed)} of {given} rows ({len(removed) / given:.1%}){format_rows(removed)}."
    why = f"Truncation to max_length={sample.facts.max_length} left nothing to learn from in them."
    severity = Severity.NOTE if len(removed) < FEW * given else Severity.WARNING
    return Finding(severity, what, why, "Raise max_length, or shorten the prompts.", rows=tuple(removed))


def check_stop_token(sample: Sample) -> Finding | None:
    """A stop token that is never a label is never learned."""
    targets = [found for row in sample.rows if (found := find_targets(row, sample)) is not None and found.size]
    if not targets or any(np.isin(found, list(sample.stop_ids)).any() for found in targets):
        return None
    ends = _name(sample, int(np.bincount([int(found[-1]) for found in targets]).argmax()))
    stops = ", ".join(_name(sample, token) for token in sorted(sample.stop_ids))
    what = f"The stop token {stops} is not a label in any of {len(targets)} rows."
    why = f"The model never learns to stop: generation ends at {stops}, but most answers here end with {quote(ends)}."
    change = "End answers with the stop token (eos_token of SFTConfig, or the chat template), give pads a token of their own, or raise max_length."
    is_instruction = any(found.size < row_size for found, row_size in _sizes(sample))
    severity = Severity.WARNING if sample.facts.task == "sft" or is_instruction else Severity.NOTE
    return Finding(severity, what, why, change)


def _sizes(sample: Sample) -> list[tuple[np.ndarray, int]]:
    """Returns the targets of each row, and how many labels it has besides pads."""
    rows = [(row, find_targets(row, sample)) for row in sample.rows]
    return [
        (found, _count_tokens(row) - int(sample.limits.shifted))
        for row, found in rows
        if found is not None and found.size
    ]


def _count_tokens(row: SampledRow) -> int:
    mask, labels = row.field("attention_mask"), row.field("labels")
    assert labels is not None
    return (
        int(view(mask).sum())
        if mask is not None and mask.shape == labels.shape and is_viewable(mask)
        else labels.numel()
    )


def find_targets(row: SampledRow, sample: Sample) -> np.ndarray | None:
    """Returns the labels that the loss takes, of all samples of a row one after the other."""
    labels = row.field("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2 or not is_viewable(labels):
        return None
    array = view(labels)[:, 1:] if sample.limits.shifted else view(labels)
    return array[array != IGNORED_LABEL]


def _name(sample: Sample, token: int) -> str:
    text = "" if sample.tokenizer is None else sample.tokenizer.convert_ids_to_tokens(token)
    return f"{text!r} (id {token})" if text else f"id {token}"


def check_missing_labels(sample: Sample) -> Finding | None:
    """The loss of a model of the hosts needs labels."""
    batches = [row.batch for row in sample.rows if row.batch is not None]
    names = sample.label_names or ("labels",)
    if not batches or any(name in batch for batch in batches for name in (*names, "labels", "label", "return_loss")):
        return None
    what = f"Batches have no {' or '.join(names)}, only {', '.join(map(quote_name, sorted(batches[0])))}."
    why = "The model computes its loss from labels: without them it returns none, and the first step fails."
    change = (
        "Use a collator that makes labels (DataCollatorForLanguageModeling with mlm=False), or add a column labels."
    )
    return Finding(Severity.ERROR, what, why, change)
