"""Teaches a chat model to count, with a loss that is the mean over each answer."""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

output_dir = sys.argv[1]
torch.manual_seed(0)

words = ["<pad>", "<bos>", "<eos>", "<unk>", "count", "from", *map(str, range(30))]
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

rows = []
for start in range(20):
    prompt = tokenizer(f"count from {start}").input_ids
    if start == 9:
        prompt = prompt * 6  # a question so long that nothing of its answer is left once it is cut
    answer = [*tokenizer(" ".join(str(start + k) for k in range(1, 6))).input_ids, tokenizer.eos_token_id]
    labels = [-100] * len(prompt) + answer
    rows.append({"input_ids": (prompt + answer)[:16], "labels": labels[:16]})
dataset = Dataset.from_list(rows)


def mean_of_answers(outputs, labels, num_items_in_batch=None):
    targets = labels[:, 1:]
    mask = (targets != -100).float()
    scores = outputs.logits[:, :-1].float().log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    return -((scores * mask).sum(1) / mask.sum(1)).mean()


trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=output_dir, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=5, max_length=None,
        learning_rate=1e-3, report_to="none", use_cpu=True, bf16=False, save_strategy="no", logging_steps=1,
        disable_tqdm=True, gradient_checkpointing=False, train_sampling_strategy="sequential",
    ),
    train_dataset=dataset,
    processing_class=tokenizer,
    compute_loss_func=mean_of_answers,
)  # fmt: skip
trainer.train()
trainer.save_model(output_dir)
