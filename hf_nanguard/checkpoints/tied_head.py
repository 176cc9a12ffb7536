"""Finds a language model head that should share the weight of the embedding and no longer does."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint_files import read_json
from .tensor_check import as_plain, widen

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight", "shared.weight")
HEADS = ("lm_head.weight", "embed_out.weight", "predictions.decoder.weight")


def is_tied(folder: Path) -> bool:
    """Returns whether the model's config says that head and embedding are one weight."""
    try:
        config = read_json(folder / "config.json")
    except ValueError:
        return False
    parts = [config, *config.values()] if isinstance(config, dict) else []
    said = [part.get("tie_word_embeddings") for part in parts if isinstance(part, dict)]
    return True in said and False not in said


def find_untied(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Returns a head and its embedding if both were saved and differ: a merge or an edit has changed one of them, and
    loading the model overwrites one with the other."""
    embedding = next((name for name in tensors if name.endswith(EMBEDDINGS)), None)
    head = next((name for name in tensors if name.endswith(HEADS)), None)
    if embedding is None or head is None or tensors[head].layout is not torch.strided:
        return None
    pair = as_plain(tensors[head]), as_plain(tensors[embedding])
    if pair[0] is None or pair[1] is None or torch.equal(widen(pair[0]), widen(pair[1])):
        return None
    return head, embedding
