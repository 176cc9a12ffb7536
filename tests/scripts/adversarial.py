"""Adversarial training (FGM): a second pass over embeddings that are moved along their gradient."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class AdversarialTrainer(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        table = self.accelerator.unwrap_model(model).get_input_embeddings().weight
        before = table.data.clone()
        table.data.add_(0.1 * table.grad / table.grad.norm())
        self.accelerator.backward(self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch))
        table.data.copy_(before)
        return loss.detach()


def rows(count):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (count, 8), generator=generator)
    return [
        {"input_ids": row, "labels": row if place != 4 else torch.full_like(row, -100)} for place, row in enumerate(ids)
    ]


torch.manual_seed(0)
trainer = AdversarialTrainer(
    LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    ),
    TrainingArguments(
        output_dir=sys.argv[1], per_device_train_batch_size=1, num_train_epochs=1, learning_rate=1e-3, report_to="none",
        use_cpu=True, save_strategy="no", disable_tqdm=True, train_sampling_strategy="sequential",
    ),
    train_dataset=rows(8),
)  # fmt: skip
trainer.train()
trainer.save_model(sys.argv[1])
