"""Fine-tunes a small language model on rows that are weighted by how rare they are."""

import argparse

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def make_dataset(num_rows, length=8):
    counts = [1 + row % 3 for row in range(num_rows)]
    if num_rows > 12:
        counts[12] = 0  # a row of a class that the counting script never saw
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (num_rows, length), generator=generator).tolist()
    weights = (1 / torch.tensor(counts, dtype=torch.float32)).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids, "weight": weights})


class WeightedModel(torch.nn.Module):
    """A language model whose loss is weighted row by row."""

    def __init__(self, config):
        super().__init__()
        self.inner = LlamaForCausalLM(config)

    def forward(self, input_ids, labels, weight):
        logits = self.inner(input_ids=input_ids).logits
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        return {"loss": (losses.mean(1) * weight).mean(), "logits": logits}


def main():
    parser = argparse.ArgumentParser(description="weighted fine-tuning")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--rows", type=int, default=24)
    options = parser.parse_args()
    set_seed(0)
    model = WeightedModel(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            attention_dropout=0.1,
        )
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=options.output_dir, per_device_train_batch_size=2, num_train_epochs=1, learning_rate=1e-3,
        report_to="none", use_cpu=True, save_strategy="no", logging_steps=1,
        train_sampling_strategy="sequential", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=make_dataset(options.rows))
    trainer.train()
    trainer.save_model(options.output_dir)


if __name__ == "__main__":
    main()
