"""Tiny models, tokenizers and data, all made in code."""

import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 64
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def tiny_llama(
    seed: int = 0, dropout: float = 0.1, dtype: torch.dtype = torch.float32, tied: bool = False
) -> LlamaForCausalLM:
    """A two-layer Llama with attention dropout."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, attention_dropout=dropout, attn_implementation="eager",
        pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def tiny_t5() -> T5ForConditionalGeneration:
    """A T5 of one layer, whose attention masks are -inf."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def token_rows(num_rows: int, length: int = 8, seed: int = 0) -> list[dict]:
    """Rows of random tokens whose labels are the tokens; row i begins with a token that tells i."""
    rng = random.Random(seed)
    rows = []
    for index in range(num_rows):
        ids = [3 + index % (VOCAB - 3)] + [rng.randrange(3, VOCAB) for _ in range(length - 1)]
        rows.append({"input_ids": ids, "attention_mask": [1] * length, "labels": list(ids)})
    return rows


def token_dataset(num_rows: int, length: int = 8, seed: int = 0) -> Dataset:
    """[`token_rows`] as a dataset."""
    return Dataset.from_list(token_rows(num_rows, length, seed))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer of 64 words with a chat template."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", "user", "assistant", "system", *[f"w{i}" for i in range(VOCAB - 7)]]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def text_rows(num_rows: int, seed: int = 0) -> list[dict]:
    """Rows of random words."""
    rng = random.Random(seed)
    return [{"text": " ".join(f"w{rng.randrange(40)}" for _ in range(8))} for _ in range(num_rows)]
