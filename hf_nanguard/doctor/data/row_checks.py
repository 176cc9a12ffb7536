"""Checks of rows: what cannot be collated, values that no model takes, empty, long, repeated and constant rows."""

import hashlib
import json
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from ...core.rerun.micro_batch import Finding as BatchFinding
from ...core.vocabulary import Signal
from ...hf.data.checked_collator import check_batch
from ...hf.data.numpy_view import is_viewable, view
from ..rules.finding import Finding, Severity
from ..rules.model_rules import LEARNED_POSITIONS
from .label_checks import by_share, describe, numbers
from .sampled_rows import Sample, SampledRow

IMAGES = ("pixel_values", "images", "image", "input_features", "input_values")
FLAT = 0.02  # of a channel, whose values usually range over 1 to 5: what an image has that was divided by 255 twice
TEXTS = ("text", "prompt", "messages", "completion", "conversations", "chosen", "rejected")


def check_collation(sample: Sample) -> Finding | None:
    """Dataset and collator must not fail."""
    bad = [row for row in sample.rows if row.error is not None]
    if bad:
        what = f"Dataset or collator failed on {describe(bad, sample)}."
        return Finding(Severity.ERROR, what, f"{bad[0].error}.", "Repair or remove these rows.", rows=numbers(bad))
    if sample.batch_error is None:
        return None
    what = "The collator failed on several rows together, though each of them alone is fine."
    change = "Use a collator that pads (DataCollatorWithPadding, DataCollatorForSeq2Seq), or rows of equal length."
    return Finding(Severity.ERROR, what, f"{sample.batch_error}.", change)


def _find(sample: Sample, signal: Signal, word: str = "") -> list[tuple[SampledRow, BatchFinding]]:
    """Returns the rows in which the guard's own check of batches finds a signal."""
    found = []
    for row in sample.rows:
        if row.batch is None:
            continue
        for each in check_batch(dict(row.batch), sample.limits, "observe"):
            if each.signal is signal and word in each.message:
                found.append((row, each))
                break
    return found


def check_ids(sample: Sample) -> Finding | None:
    """Ids must be inside the embedding."""
    change = "Use the tokenizer of this model, or call model.resize_token_embeddings(len(tokenizer))."
    bad = _find(sample, Signal.INPUT_OUT_OF_RANGE, "embedding")
    return _report(bad, sample, Severity.ERROR, "Token ids are outside the embedding", change)


def check_label_values(sample: Sample) -> Finding | None:
    """Labels must be classes or tokens of the model."""
    change = "Set num_labels of the model, number classes from 0, and mask with -100 only."
    bad = _find(sample, Signal.LABEL_OUT_OF_RANGE)
    return _report(bad, sample, Severity.ERROR, "Labels are out of range", change)


def check_finite(sample: Sample) -> Finding | None:
    """Float fields must be finite."""
    severity = Severity.ERROR if sample.limits.known else Severity.WARNING  # a loss of one's own may mask it
    change = "Remove these rows, or fill the missing values."
    return _report(_find(sample, Signal.INPUT_NONFINITE), sample, severity, "Inputs hold NaN or inf", change)


def check_attention(sample: Sample) -> Finding | None:
    """A row without a token to attend to has an undefined softmax."""
    bad = _find(sample, Signal.INPUT_OUT_OF_RANGE, "masks every token")
    why = "The softmax over no token at all is 0/0 in some attention kernels."
    what = "The attention mask hides every token"
    return _report(bad, sample, by_share(len(bad), sample), what, "Remove these rows.", why)


def _report(
    bad: list[tuple[SampledRow, BatchFinding]],
    sample: Sample,
    severity: Severity,
    what: str,
    change: str,
    why: str = "",
) -> Finding | None:
    """Returns a finding about these rows, explained by the first of them unless it says why; `None` without any."""
    if not bad:
        return None
    rows = [row for row, _ in bad]
    why = why or f"In row {rows[0].number}, {bad[0][1].message}."
    return Finding(severity, f"{what} in {describe(rows, sample)}.", why, change, rows=numbers(rows))


def check_empty(sample: Sample) -> Finding | None:
    """Rows without a token or text."""
    bad = [row for row in sample.rows if _is_empty(row)]
    if not bad:
        return None
    why = "There is nothing to learn from; some collators and kernels fail on a sequence of length 0."
    return Finding(
        by_share(len(bad), sample),
        f"There is no text in {describe(bad, sample)}.",
        why,
        "Remove these rows.",
        rows=numbers(bad),
    )


def _is_empty(row: SampledRow) -> bool:
    ids = row.field("input_ids")
    if ids is not None:
        return ids.numel() == 0
    if not isinstance(row.example, Mapping):
        return False
    texts = [row.example[name] for name in TEXTS if name in row.example]
    return bool(texts) and not any(text.strip() if isinstance(text, str) else text for text in texts)


def _length(row: SampledRow) -> int:
    ids, mask = row.field("input_ids"), row.field("attention_mask")
    if ids is None or ids.ndim != 2:
        return 0
    if mask is not None and mask.shape == ids.shape and is_viewable(mask):
        return int(view(mask).sum(axis=1).max())
    return int(ids.shape[1])


def check_long(sample: Sample) -> Finding | None:
    """Rows longer than the model's positions, and the share of rows that were cut off."""
    positions, length = sample.facts.max_positions, sample.facts.max_length
    bad = (
        [row for row in sample.rows if positions is not None and _length(row) > positions]
        if not sample.is_packed
        else []
    )
    if bad:
        what = f"Sequences are longer than the {positions} positions of the model in {describe(bad, sample)}."
        is_table = sample.facts.model_type in LEARNED_POSITIONS
        why = (
            "Its positions are a table: an index error."
            if is_table
            else "The model was not trained for such positions."
        )
        severity = Severity.ERROR if is_table else by_share(len(bad), sample)
        return Finding(severity, what, why, "Truncate them (max_length).", rows=numbers(bad))
    if length is None or sample.is_packed or sample.facts.is_online:
        return None
    cut = [row for row in sample.rows if _length(row) >= length]
    if not cut:
        return None
    what = f"Truncation to max_length={length} cuts off {describe(cut, sample)}."
    why = "What is behind the cut, often the end of the answer and its stop token, is not learned."
    severity = Severity.WARNING if len(cut) > len(sample.rows) / 2 else Severity.NOTE
    return Finding(severity, what, why, "Raise max_length, or split long rows.", rows=numbers(cut))


def check_duplicates(sample: Sample) -> Finding | None:
    """Rows that occur more than once."""
    seen: set[bytes] = set()
    bad = []
    for row in sample.rows:
        key = _digest(row.example)
        if key in seen:
            bad.append(row)
        seen.add(key)
    if not bad or len(sample.rows) < 2:
        return None
    what = f"{describe(bad, sample)} repeat another row of the sample."
    why = "They count more than once, and end up in training and evaluation data alike."
    is_odd = len(bad) > len(sample.rows) / 2 and sample.facts.is_pretrained and not sample.facts.is_online
    severity = Severity.WARNING if is_odd else Severity.NOTE
    return Finding(severity, what, why, "Remove duplicates, unless they are meant.", rows=numbers(bad))


def _digest(example: object) -> bytes:
    def plain(value: object) -> object:
        if isinstance(value, Tensor) and is_viewable(value):
            value = view(value)
        if isinstance(value, np.ndarray):
            return [str(value.dtype), value.shape, hashlib.blake2b(np.ascontiguousarray(value).tobytes()).hexdigest()]
        return repr(value)

    return hashlib.blake2b(json.dumps(example, default=plain, skipkeys=True).encode()).digest()


def check_images(sample: Sample) -> Finding | None:
    """Images, spectrograms and waveforms of one value hold no content."""
    bad = [row for row in sample.rows if any(_is_constant(row.field(name)) for name in IMAGES)]
    if not bad:
        return None
    what = f"All pixels have (nearly) the same value in {describe(bad, sample)}."
    why = "An image that could not be read, or that was scaled twice, looks like that."
    return Finding(
        by_share(len(bad), sample),
        what,
        why,
        "Look at these images, and at the processor's rescale factor.",
        rows=numbers(bad),
    )


def _is_constant(value: Tensor | None) -> bool:
    if value is None or not value.is_floating_point() or not is_viewable(value) or value.ndim < 2:
        return False
    array = view(value)
    if array.ndim >= 4:  # images: each channel has a value of its own
        return bool((array.max(axis=(-1, -2)) - array.min(axis=(-1, -2)) <= FLAT).all())
    return array[0].size > 1 and bool(array.min() == array.max())
