"""Alignment of two tokenizers: positions at which both predict the same characters, and the tokens they share.

For distillation between models with different tokenizers. A position of the student and one of the teacher are a pair if
their next tokens cover the same characters, because both models have then read the same text. At a pair, the two
distributions are compared over the tokens with the same text in both vocabularies, each renormalized to those. Text that
the tokenizers split differently has no pair, and neither has the end of the text, so the teacher does not affect them. Its
probability of tokens that the student lacks is ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .small_llama import MASKED

Span = tuple[int, int]
STARTS_WORD = ("Ġ", "▁")  # byte-level and SentencePiece tokenizers mark a token that begins a word
CONTINUES_WORD = "##"  # WordPiece marks a token that does not


def name_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Returns token ids by text, which has a leading space if the token begins a word, without special tokens."""
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    marks_starts = any(token.startswith(STARTS_WORD) for token in vocabulary)

    def name(token: str) -> str:
        if token.startswith(STARTS_WORD):
            return f" {token[1:]}"
        if token.startswith(CONTINUES_WORD):
            return token.removeprefix(CONTINUES_WORD)
        return token if marks_starts else f" {token}"

    return {name(token): index for token, index in vocabulary.items() if index not in special}


def share_vocabulary(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Returns the ids of the tokens that both tokenizers have, in the same order."""
    theirs = name_tokens(teacher)
    pairs = [(index, theirs[name]) for name, index in name_tokens(student).items() if name in theirs]
    return [ours for ours, _ in pairs], [other for _, other in pairs]


def align_positions(student: Sequence[Span], teacher: Sequence[Span]) -> list[int]:
    """Returns the teacher's position that predicts the same characters for every position of the student, -1 if there is none.

    Both are begins and ends of tokens in the text, as from `return_offsets_mapping`; special tokens and padding are empty.

    Example:
        >>> align_positions([(0, 2), (2, 4), (4, 6)], [(0, 0), (0, 2), (2, 3), (3, 4), (4, 6)])
        [-1, 3, -1]
    """
    places = {tuple(span): index for index, span in enumerate(teacher) if span[0] < span[1]}
    predicted = [places.get(tuple(span), 0) for span in [*student[1:], (0, 0)]]
    return [place - 1 for place in predicted]


@dataclass
class AlignedCollator:
    """Tokenizes rows with a `text` with both tokenizers, truncated to `max_length` tokens, and aligns their positions."""

    student: PreTrainedTokenizerBase
    teacher: PreTrainedTokenizerBase
    max_length: int

    def __call__(self, rows: list[dict[str, str]]) -> dict[str, Tensor]:
        texts = [row["text"] for row in rows]
        ours, theirs = (
            tokenizer(
                texts, return_tensors="pt", padding=True, padding_side="right", truncation=True,
                max_length=self.max_length, return_offsets_mapping=True,
            )
            for tokenizer in (self.student, self.teacher)
        )  # fmt: skip
        spans = zip(ours["offset_mapping"].tolist(), theirs["offset_mapping"].tolist(), strict=True)
        return {
            "input_ids": ours["input_ids"],
            "attention_mask": ours["attention_mask"],
            "labels": ours["input_ids"].masked_fill(ours["attention_mask"] == 0, MASKED),
            "teacher_input_ids": theirs["input_ids"],
            "teacher_attention_mask": theirs["attention_mask"],
            "teacher_positions": torch.tensor([align_positions(*pair) for pair in spans]),
        }
