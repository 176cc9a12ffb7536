"""Checks of what became of a row's texts: messages that its tokens have lost, a start token put twice, an answer cut by the collator."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from ...hf.data.numpy_view import is_viewable, view
from ..rules.finding import Finding, Severity
from .label_checks import by_share, describe, numbers
from .sampled_rows import CONVERSATIONS, Sample, SampledRow

IDS = {"chosen": ("prompt_ids", "chosen_ids"), "rejected": ("prompt_ids", "rejected_ids")}
HIDDEN = re.compile(r"<think>.*?</think>", re.DOTALL)  # which templates take out of earlier answers
MOST = 0.5
PAIRED = ("dpo", "reward")  # kinds of training whose rows are pairs


def has_messages(sample: Sample) -> bool:
    """Returns whether rows still have the conversations that their tokens were made of."""
    return (
        sample.tokenizer is not None
        and not sample.is_packed
        and any(next(find_messages(row), None) for row in sample.rows)
    )


def find_messages(row: SampledRow) -> Iterator[tuple[str, str, list[int]]]:
    """Yields role and text of each message, with the tokens that should hold it."""
    for name in CONVERSATIONS:
        tokens = [token for part in IDS.get(name, ("input_ids",)) for token in _read_ids(row.source.get(part))]
        messages = row.source.get(name)
        for message in messages if isinstance(messages, list) and tokens else []:
            content = message.get("content") if isinstance(message, Mapping) else None
            if isinstance(content, str) and content.strip():
                yield str(message.get("role")), content, tokens


def _read_ids(value: object) -> list[int]:
    found = value.tolist() if hasattr(value, "tolist") else value
    return found if isinstance(found, list) and all(isinstance(each, int) for each in found) else []


def check_messages(sample: Sample) -> Finding | None:
    """The text of every message must be in the tokens of its row; spaces and cut rows are not judged."""
    assert sample.tokenizer is not None
    rows: dict[str, list[SampledRow]] = defaultdict(list)
    lost: dict[str, list[SampledRow]] = defaultdict(list)
    limit = sample.facts.max_length
    for row in sample.rows:
        texts: dict[int, str] = {}
        for role, content, tokens in find_messages(row):
            if (limit is not None and len(tokens) >= limit) or not all(0 <= token < 2**31 for token in tokens):
                continue
            if id(tokens) not in texts:
                texts = {id(tokens): squeeze(str(sample.tokenizer.decode(tokens)))}
            plain = HIDDEN.sub("", content)
            ids = sample.tokenizer(plain, add_special_tokens=False)["input_ids"]
            known = squeeze(str(sample.tokenizer.decode(ids)))
            _note(rows[role], row)
            if known and known not in texts[id(tokens)] and squeeze(plain) not in texts[id(tokens)]:
                _note(lost[role], row)
    bad = {role: found for role, found in lost.items() if len(found) > MOST * len(rows[role])}
    if not bad:
        return None
    role, found = next(iter(bad.items()))
    what = f"The tokens do not contain the text of the {' and '.join(bad)} message in {describe(found, sample)}."
    why = "The chat template leaves it out, so the model is trained on other conversations than those of the dataset."
    return Finding(Severity.WARNING, what, why, "Check the chat template with tokenizer.apply_chat_template(row, tokenize=False).",
                   rows=numbers(found))  # fmt: skip


def _note(rows: list[SampledRow], row: SampledRow) -> None:
    if not rows or rows[-1] is not row:
        rows.append(row)


def squeeze(text: str) -> str:
    """Returns a text without spaces, which templates trim and tokenizers move."""
    return "".join(text.split())


def has_start_token(sample: Sample) -> bool:
    """Returns whether the tokenizer has a start token of its own."""
    start = None if sample.tokenizer is None else sample.tokenizer.bos_token_id
    return start is not None and start not in sample.stop_ids


def check_start_token(sample: Sample) -> Finding | None:
    """Texts must not begin with two start tokens."""
    assert sample.tokenizer is not None
    start = sample.tokenizer.bos_token_id
    bad = [
        row for row in sample.rows if (ids := _real_ids(row)) is not None and ids.size > 1 and (ids[:2] == start).all()
    ]
    if len(bad) <= MOST * len(sample.rows):
        return None
    what = f"Two start tokens ({sample.tokenizer.bos_token!r}) are at the head of {describe(bad, sample)}."
    why = "The chat template or the text has one, and the tokenizer adds another; at generation there is only one."
    return Finding(Severity.WARNING, what, why, "Tokenize with add_special_tokens=False, or take the start token out of the text or template.",
                   rows=numbers(bad))  # fmt: skip


def _real_ids(row: SampledRow) -> np.ndarray | None:
    ids, mask = row.field("input_ids"), row.field("attention_mask")
    if ids is None or ids.ndim != 2 or len(ids) != 1 or not is_viewable(ids):
        return None
    array = view(ids)[0]
    return array[view(mask)[0] != 0] if mask is not None and mask.shape == ids.shape and is_viewable(mask) else array


def check_collator_cut(sample: Sample) -> Finding | None:
    """The collator must not drop tokens that the row has, unless it cuts at max_length."""
    limit = sample.facts.max_length
    bad = []
    for row in sample.rows:
        given = _read_ids(row.example.get("input_ids")) if isinstance(row.example, Mapping) else []
        ids = row.field("input_ids")
        if ids is None or ids.ndim != 2 or len(ids) != 1 or (limit is not None and len(given) > limit):
            continue
        if ids.shape[1] < len(given):
            bad.append(row)
    if len(bad) <= MOST * len(sample.rows):
        return None
    what = f"The collator drops tokens of {describe(bad, sample)}."
    why = "What it drops, often the end of the answer and its stop token, is not learned."
    return Finding(
        Severity.WARNING,
        what,
        why,
        "Raise the length to which the collator cuts, or shorten rows before.",
        rows=numbers(bad),
    )


def has_classes(sample: Sample) -> bool:
    """Returns whether the labels are classes of a model of the hosts, one for each row."""
    return sample.limits.known and not sample.limits.token_labels and len(_read_classes(sample)) >= 16


def check_classes(sample: Sample) -> Finding | None:
    """Rows must be of more than one class."""
    found = set(_read_classes(sample))
    if len(found) > 1:
        return None
    what = f"All {len(_read_classes(sample))} rows of the sample have the label {found.pop()}."
    why = "The model learns to answer that whatever the input is. A dataset sorted by class looks like that as well, if only its head is used."
    return Finding(
        Severity.WARNING, what, why, "Check how labels are made, and shuffle the dataset before taking a part of it."
    )


def _read_classes(sample: Sample) -> list[int]:
    labels = [row.field("labels") for row in sample.rows]
    return [
        int(each)
        for each in labels
        if each is not None and each.numel() == 1 and not each.is_floating_point() and is_viewable(each)
    ]


def has_pairs(sample: Sample) -> bool:
    """Returns whether rows are pairs of a chosen and a rejected text, which the collator puts one below the other."""
    first = next((row.field("input_ids") for row in sample.rows if row.field("input_ids") is not None), None)
    return sample.facts.task in PAIRED and first is not None and first.ndim == 2 and len(first) == 2


def check_pairs(sample: Sample) -> Finding | None:
    """The two texts of a pair must differ, also after they were cut."""
    bad = [
        row
        for row in sample.rows
        if (ids := row.field("input_ids")) is not None
        and len(ids) == 2
        and bool((ids[0] == ids[1]).all())
        and ((mask := row.field("attention_mask")) is None or bool((mask[0] == mask[1]).all()))
    ]
    if not bad:
        return None
    length = sample.facts.max_length
    what = f"Chosen and rejected are the same tokens in {describe(bad, sample)}."
    why = "The loss of such a pair has no gradient: nothing tells the better answer from the worse one."
    change = (
        f"Raise max_length (now {length}), if they differ behind the cut, or remove these rows."
        if length
        else "Remove these rows."
    )
    return Finding(by_share(len(bad), sample, 0.5), what, why, change, rows=numbers(bad))
