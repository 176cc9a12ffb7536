"""Two tokenizers on one text: where both predict the same characters, and which tokens they share.

For distillation between models with different tokenizers. A position of the student and one of the teacher are a pair if
the token each predicts next covers the same characters: both have then read the same text. At such a pair the two
distributions are compared over the tokens that have the same text in both vocabularies, each renormalised to those.
What one tokenizer splits and the other does not has no pair; the end of the text has none either. So the teacher says
nothing about text the tokenizers cut differently, and the probability it gives to tokens the student lacks is left out.
"""

from collections.abc import Sequence
from typing import Any

Span = tuple[int, int]
STARTS_WORD = ("Ġ", "▁")  # how byte-level and SentencePiece tokenizers mark a token that begins a word
CONTINUES_WORD = "##"  # how WordPiece marks one that does not


def name_tokens(tokenizer: Any) -> dict[str, int]:
    """Returns the ids of a vocabulary by text, with a leading space for tokens that begin a word; no special tokens."""
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


def share_vocabulary(student: Any, teacher: Any) -> tuple[list[int], list[int]]:
    """Returns the ids of the tokens that both tokenizers have, in the same order.

    Args:
        student (`PreTrainedTokenizerBase`), teacher (`PreTrainedTokenizerBase`):
            The tokenizers.
    """
    theirs = name_tokens(teacher)
    pairs = [(index, theirs[name]) for name, index in name_tokens(student).items() if name in theirs]
    return [ours for ours, _ in pairs], [other for _, other in pairs]


def align_positions(student: Sequence[Span], teacher: Sequence[Span]) -> list[int]:
    """Returns for every position of the student the teacher's that predicts the same characters, -1 if there is none.

    Args:
        student (`Sequence[tuple[int, int]]`), teacher (`Sequence[tuple[int, int]]`):
            Where in the text each token begins and ends, as `return_offsets_mapping` gives it. Special tokens and
            padding are empty.

    Example:
        >>> align_positions([(0, 2), (2, 4), (4, 6)], [(0, 0), (0, 2), (2, 3), (3, 4), (4, 6)])
        [-1, 3, -1]
    """
    places = {tuple(span): index for index, span in enumerate(teacher) if span[0] < span[1]}
    predicted = [places.get(tuple(span), 0) for span in [*student[1:], (0, 0)]]
    return [place - 1 for place in predicted]
