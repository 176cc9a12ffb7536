"""A small Llama for built-in tasks, and a short training of it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

MASKED = -100


def build_llama(
    tokenizer: PreTrainedTokenizerBase, seed: int, hidden_size: int, dropout: float = 0.0
) -> LlamaForCausalLM:
    """Returns an untrained Llama of two layers; the random state of the process is not changed."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=2 * hidden_size, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, attention_dropout=dropout,
        tie_word_embeddings=False, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def train_briefly(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, texts: list[str], num_steps: int, num_learned: int = 0
) -> None:
    """Trains a model on texts in `num_steps` batches; if `num_learned` is given, only on as many last tokens of each."""
    size = len(texts) // max(num_steps, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(num_steps):
        batch = tokenizer(texts[step * size : (step + 1) * size], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, MASKED)
        if num_learned:
            labels[:, :-num_learned] = MASKED
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
