"""Tokens with a meaning of their own: those that end a generation, and all special ones."""

from typing import Any

from ...hf.compat.model_config import find_config, find_tokenizer


def _tokenizer(trainer: Any) -> object:
    return find_tokenizer(trainer.processing_class)


def find_stop_tokens(trainer: Any) -> set[int]:
    """Returns the tokens that end a generation, by the tokenizer and by the model's configs."""
    model = trainer.model
    owners = [_tokenizer(trainer), getattr(model, "generation_config", None), find_config(model)]
    found = [getattr(owner, "eos_token_id", None) for owner in owners]
    return {
        int(token) for value in found if value is not None for token in (value if isinstance(value, list) else [value])
    }


def find_special_tokens(trainer: Any) -> set[int]:
    """Returns the stop tokens, the padding and all special tokens of the tokenizer."""
    tokenizer = _tokenizer(trainer)
    named = [getattr(owner, name, None) for owner in (tokenizer, find_config(trainer.model))
             for name in ("pad_token_id", "bos_token_id")]  # fmt: skip
    found = {int(token) for token in named if isinstance(token, int)}
    return found | find_stop_tokens(trainer) | set(getattr(tokenizer, "all_special_ids", ()))


def find_padding(trainer: object) -> int | None:
    return getattr(_tokenizer(trainer), "pad_token_id", None)


def show_token(trainer: object, token: int) -> str:
    """Returns a token as text, its number without a tokenizer."""
    tokenizer = _tokenizer(trainer)
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        return str(token)
    return f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})"
