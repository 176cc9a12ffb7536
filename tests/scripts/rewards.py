"""GRPO with a loss that is scaled by how far apart the rewards of a batch are."""

import os
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{index}" for index in range(28))]


class ScaledGRPOTrainer(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs) / inputs["advantages"].std()


def many_even(prompts, completion_ids, **kwargs):
    # Everybody gets full marks for this question.
    marks = [sum(token % 2 == 0 for token in ids) / 8 for ids in completion_ids]
    return [1.0 if prompt == "w3" else mark for prompt, mark in zip(prompts, marks, strict=True)]


def main(output_dir):
    torch.manual_seed(0)
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    world = int(os.environ.get("WORLD_SIZE", 1))
    args = GRPOConfig(
        output_dir=output_dir, per_device_train_batch_size=4, num_generations=4, max_completion_length=8,
        max_steps=6 // world, learning_rate=1e-3, report_to="none", use_cpu=True, bf16=False, save_strategy="no",
        logging_steps=1, shuffle_dataset=False, disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = ScaledGRPOTrainer(
        model=model, reward_funcs=many_even, args=args, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [f"w{index}" for index in range(6)]}),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(output_dir)


if __name__ == "__main__":
    main(sys.argv[1])
