"""The built-in task of `recipes/distill.py`: days and months in their order, two tokenizers, two small models.

The student's tokens are whole words. The teacher splits some words and starts every text with an extra token, so the two
have to be aligned.
"""

import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel, WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from .small_llama import build_llama, train_briefly

DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november", "december",
)  # fmt: skip
BAD_WORD = "undecimber"
SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
WORDS = ("after", "come", *DAYS, *MONTHS, BAD_WORD)
PIECES = {"wednesday": ("wednes", "##day"), "september": ("sept", "##ember"), "november": ("nov", "##ember")}

NUM_VALIDATION = 48


@dataclass
class Task:
    """What a distillation needs."""

    student: nn.Module
    teacher: nn.Module
    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]  # the student's and the teacher's
    train: list[str]
    validation: list[str]


def build_task(num_texts: int, teacher_steps: int, seed: int, spoiled: bool) -> Task:
    """Returns the built-in task; if `spoiled`, the teacher's embedding of a word of one training text is NaN."""
    tokenizers = build_tokenizers()
    teacher = build_teacher(tokenizers[1], teacher_steps, seed)
    if spoiled:
        spoil_word(teacher, tokenizers[1])
    train = build_texts(num_texts, seed=1, bad_text=num_texts // 2 if spoiled else None)
    return Task(
        build_student(len(tokenizers[0]), seed), teacher, tokenizers, train, build_texts(NUM_VALIDATION, seed=2)
    )


def build_texts(num_texts: int, seed: int, bad_text: int | None = None) -> list[str]:
    """Returns texts such as "after may come june july"; one of them may contain the bad word."""
    draw = random.Random(seed)
    texts = []
    for index in range(num_texts):
        words = draw.choice((DAYS, MONTHS))
        start, length = draw.randrange(len(words)), draw.randrange(2, 6)
        listed = [words[(start + i) % len(words)] for i in range(1 + length)]
        first = BAD_WORD if index == bad_text else listed[0]
        texts.append(" ".join(["after", first, "come", *listed[1:]]))
    return texts


def build_tokenizers() -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    """Returns the student's and the teacher's tokenizer."""
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>"}
    student = Tokenizer(WordLevel({word: i for i, word in enumerate((*SPECIAL, *WORDS))}, unk_token="<unk>"))
    pieces = [piece for word in WORDS for piece in PIECES.get(word, (word,))]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys((*SPECIAL, *reversed(pieces))))}
    teacher = Tokenizer(WordPiece(vocabulary, unk_token="<unk>"))
    for tokenizer, begin in ((student, ""), (teacher, "<bos> ")):
        tokenizer.pre_tokenizer = Whitespace()
        ids = [(name, tokenizer.token_to_id(name)) for name in ("<bos>", "<eos>")]
        tokenizer.post_processor = TemplateProcessing(single=f"{begin}$A <eos>", special_tokens=ids)
    return tuple(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names) for tokenizer in (student, teacher))  # type: ignore[return-value]


def build_student(vocab_size: int, seed: int) -> GptOssForCausalLM:
    """Returns a two-layer model with four experts, of which its routers choose two per token.

    Its checkpoints use the names of its modules. For models where they differ (Mixtral), `load_best_model_at_end` of
    transformers does not load routers and experts, with a warning.
    """
    torch.manual_seed(seed)
    config = GptOssConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    return GptOssForCausalLM(config)


def build_teacher(tokenizer: PreTrainedTokenizerFast, num_steps: int, seed: int) -> LlamaForCausalLM:
    """Returns a small model that was briefly trained on the task."""
    model = build_llama(tokenizer, seed, 48)
    train_briefly(model, tokenizer, build_texts(num_steps * 16, seed=seed + 100), num_steps)
    return model


def spoil_word(teacher: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Makes the embedding of the bad word NaN, like a row that was added to a vocabulary and never initialized."""
    with torch.no_grad():
        teacher.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids(BAD_WORD)] = float("nan")
