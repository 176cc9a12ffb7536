"""Checks of what the labels teach: the answers and not the questions, no padding, and no start token twice."""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from ...hf.data.numpy_view import is_viewable, view
from ..rules.finding import Finding, Severity
from .label_checks import by_share, describe, find_targets, numbers
from .sampled_rows import Sample, SampledRow
from .text_checks import HIDDEN, MOST, find_messages, squeeze

ANSWER = "assistant"
RUN = 2  # pads in a row at the end of labels, which no text has


def check_answers(sample: Sample) -> Finding | None:
    """Where a part of a conversation is learned, the last answer must be in it."""
    judged: list[SampledRow] = []
    bad: list[SampledRow] = []
    others: set[str] = set()
    for row in sample.rows:
        texts = _find_learned(row, sample)
        if texts is None:
            continue
        learned, messages = texts
        judged.append(row)
        if squeeze(messages[-1][1]) not in learned:
            bad.append(row)
            others |= {role for role, content in messages[:-1] if role != ANSWER and squeeze(content) in learned}
    if len(bad) <= MOST * len(judged) or not bad:
        return None
    instead = f" Learned instead is the text of {' and '.join(sorted(others))}." if others else ""
    what = f"The last answer is not learned in {describe(bad, sample)}."
    why = f"Labels are masked for its tokens, so the model is not trained to give it.{instead}"
    change = "Check the {% generation %} marks of the chat template, or the mask of the prompt: answers must keep their labels. --show 3 prints both."
    return Finding(Severity.ERROR if others else Severity.WARNING, what, why, change, rows=numbers(bad))


def _find_learned(row: SampledRow, sample: Sample) -> tuple[str, list[tuple[str, str]]] | None:
    """Returns the text that is learned of a conversation, and role and text of its messages; `None` if all or nothing of it is learned, if
    it does not end with an answer, or if it is cut off."""
    targets = find_targets(row, sample)
    found = list(find_messages(row))
    if targets is None or not targets.size or not found or found[-1][0] != ANSWER:
        return None
    assert sample.tokenizer is not None
    tokens, limit = found[-1][2], sample.facts.max_length
    is_cut = limit is not None and len(tokens) >= limit
    if is_cut or targets.size >= len(tokens) - 1 or int(targets.max()) >= 2**31 or int(targets.min()) < 0:
        return None
    texts = [(role, HIDDEN.sub("", content)) for role, content, _ in found]
    return squeeze(str(sample.tokenizer.decode(targets.tolist()))), texts


def find_pad(sample: Sample) -> int | None:
    """Returns the padding token of the tokenizer."""
    return sample.facts.pad_id


def check_padding_labels(sample: Sample) -> Finding | None:
    """Padding must not be learned."""
    pad = find_pad(sample)
    assert pad is not None
    run = RUN + int(pad in sample.stop_ids)  # one of them may be the stop token
    bad = []
    for row in sample.rows:
        targets = find_targets(row, sample)
        if targets is not None and targets.size > run and (targets[-run:] == pad).all():
            bad.append(row)
    if not bad:
        return None
    what = f"Padding (id {pad}) is learned in {describe(bad, sample)}."
    why = "Labels end with several pads. The loss is then mostly that of predicting padding, which is soon 0, and answers count little."
    change = "Set the labels of padding to -100: let the collator pad (DataCollatorForSeq2Seq), or mask them where rows are tokenized."
    return Finding(by_share(len(bad), sample, 0.5), what, why, change, rows=numbers(bad))


def check_decoder_start(sample: Sample) -> Finding | None:
    """A decoder's start token is put before the labels by the model, so they must not begin with it."""
    start = sample.decoder_start
    assert start is not None
    bad = [row for row in sample.rows if _begins_with(row.field("labels"), start)]
    if len(bad) <= MOST * len(sample.rows):
        return None
    what = f"Labels begin with the decoder's start token (id {start}) in {describe(bad, sample)}."
    why = "The model puts it before the labels itself, so the decoder sees it twice and learns to repeat it; at generation there is one."
    return Finding(
        Severity.WARNING, what, why, "Cut the first token off the labels in the collator.", rows=numbers(bad)
    )


def _begins_with(labels: Tensor | None, start: int) -> bool:
    return (
        labels is not None
        and labels.ndim == 2
        and labels.shape[1] > 1
        and is_viewable(labels)
        and int(view(labels)[0, 0]) == start
    )


def check_new_tokens(sample: Sample) -> Finding | None:
    """Tokens that were added to a pretrained model need an embedding that is trained."""
    first = sample.first_new_id
    assert first is not None
    bad = [row for row in sample.rows if (_used_ids(row, sample) >= first).any()]
    if not bad:
        return None
    what = f"Tokens that the checkpoint does not have (ids from {first} on) are used in {describe(bad, sample)}, and their embedding is frozen."
    why = "Their rows were made when the embedding was resized. They keep those values, so the model cannot tell what the tokens mean."
    change = (
        "Add trainable_token_indices with these ids to the LoraConfig, or modules_to_save: [embed_tokens, lm_head]."
    )
    return Finding(by_share(len(bad), sample), what, why, change, rows=numbers(bad))


def _used_ids(row: SampledRow, sample: Sample) -> np.ndarray:
    ids = row.field("input_ids")
    if ids is None or not is_viewable(ids):
        return np.zeros(0, dtype=int)
    array = view(ids)
    return array[array != find_pad(sample)]


def check_missing_images(sample: Sample) -> Finding | None:
    """Where the tokens have places for images, the batch must have the images."""
    marks = list(sample.limits.placeholders)
    fields = ("pixel", "image", "video", "input_features", "audio")
    bad = [
        row
        for row in sample.rows
        if isinstance(row.batch, Mapping)
        and np.isin(_used_ids(row, sample), marks).any()
        and not any(name.startswith(fields) and row.field(name) is not None for name in row.batch)
    ]
    if not bad:
        return None
    what = f"Tokens have places for images or sounds, but batches have none in {describe(bad, sample)}."
    why = "The model then embeds the placeholder itself, so it is trained without seeing anything."
    change = (
        "Keep the columns of the processor: remove_unused_columns: false, and a collator that passes pixel_values on."
    )
    return Finding(by_share(len(bad), sample, 0.5), what, why, change, rows=numbers(bad))


def check_two_classes(sample: Sample) -> Finding | None:
    """A model with one label is a regression, so integers 0 and 1 are not classes to it."""
    labels = [row.field("labels") for row in sample.rows]
    found = {
        int(each)
        for each in labels
        if each is not None and each.numel() == 1 and not each.is_floating_point() and is_viewable(each)
    }
    if found != {0, 1}:
        return None
    what = "The model has num_labels=1, and labels are 0 and 1."
    why = "One label is a regression: the loss is the squared distance to 0 or 1, not that of two classes."
    return Finding(
        Severity.WARNING, what, why, "Set num_labels=2 for classes, or give the labels as floats if a number is meant."
    )
