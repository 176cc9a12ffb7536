"""Text and latents learned together: a loss of two terms, each checked, logged and reported by name.

A small encoder fills in masked tokens (cross-entropy) and predicts the latent vector that a frozen encoder computes for
the whole text. Model and data are built in code; nothing is downloaded. Planted failures, in one row of the data:

    empty_mask   no token of the row is masked, so the mean over its masked tokens is 0/0
    zero_latent  the row's latent is all zeros, so its direction is 0/0

`--stable_losses true` uses the losses of hf_nanguard, which handle both rows, instead of the plain ones.

    python recipes/latent.py
    python recipes/latent.py --plant zero_latent --on_bad_term drop
    python recipes/latent.py --plant none --compare false --max_steps 500 --learning_rate 1e-3
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate
from transformers import BertConfig, BertModel, Trainer

from hf_nanguard import GuardedTrainingArguments, examples, guarded, masked_cross_entropy, normalized_mse, weigh_term

PAD, BLANK, FIRST, NUM_TOKENS = 0, 1, 2, 50
LENGTH, NUM_LATENTS = 16, 8
BAD_ROW = 21
MASKED = -100
DEFAULTS = {
    "compare": True, "output_dir": "runs/latent", "max_steps": 100, "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2, "learning_rate": 5e-3, "max_grad_norm": 0.5, "logging_steps": 5,
    "save_strategy": "no", "report_to": ["none"], "remove_unused_columns": False, "dataloader_pin_memory": False,
}  # fmt: skip
PLANTED = {
    "none": "No failure is planted.",
    "empty_mask": f"Planted: no token of row {BAD_ROW} is masked, so its mean over masked tokens is 0/0 (term text).",
    "zero_latent": f"Planted: the latent of row {BAD_ROW} is all zeros, so its direction is 0/0 (term latent).",
}


@dataclass
class ScriptArguments:
    """Arguments of this recipe besides the guarded training arguments."""

    plant: Literal["empty_mask", "zero_latent", "none"] = examples.argument("empty_mask", "Failure to plant, or none.")
    stable_losses: bool | None = examples.argument(
        None, "Use the losses of hf_nanguard. By default only if no failure is planted."
    )
    on_bad_term: Literal["keep", "drop"] = examples.argument(
        "keep", "For a non-finite term, drop the micro-batch (keep) or only the term (drop)."
    )
    text_loss_weight: float = examples.argument(1.0, "Weight of the cross-entropy.")
    latent_loss_weight: float = examples.argument(0.1, "Weight of the latent regression.")
    num_rows: int = examples.argument(256, f"Rows of training data, more than {BAD_ROW}.")

    def __post_init__(self) -> None:
        if self.num_rows <= BAD_ROW:
            raise ValueError(f"--num_rows must be more than {BAD_ROW}, got {self.num_rows}.")
        if self.stable_losses is None:
            self.stable_losses = self.plant == "none"


def make_parser() -> examples.RecipeParser:
    """Returns the parser of this recipe's arguments, those of the guard, `--config` and `--preset`."""
    types = (ScriptArguments, GuardedTrainingArguments)
    kept = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
    return examples.RecipeParser(types, "latent", DEFAULTS, kept=kept, description=__doc__)


class TextLatentModel(nn.Module):
    """A two-layer encoder with a head for tokens and one for the latent of the whole text."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=NUM_TOKENS, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=LENGTH, pad_token_id=PAD,
        )  # fmt: skip
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.text_head = nn.Linear(48, NUM_TOKENS)
        self.latent_head = nn.Linear(48, NUM_LATENTS)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encoder(input_ids=input_ids).last_hidden_state
        return self.text_head(hidden), self.latent_head(hidden.mean(1))


def build_rows(num_rows: int, seed: int, plant: str = "none") -> list[dict[str, Tensor]]:
    """Returns texts of consecutive tokens, some of them masked, with the latents of a frozen encoder."""
    draw = torch.Generator().manual_seed(seed)
    encoder = torch.randn(NUM_TOKENS, NUM_LATENTS, generator=torch.Generator().manual_seed(0))
    rows = []
    for index in range(num_rows):
        start = torch.randint(NUM_TOKENS - FIRST, (1,), generator=draw)
        text = FIRST + (start + torch.arange(LENGTH)) % (NUM_TOKENS - FIRST)
        masked = torch.rand(LENGTH, generator=draw) < 0.3
        masked[index % LENGTH] = True  # every healthy row has a masked token
        latent = encoder[text].mean(0)
        if index == BAD_ROW and plant == "empty_mask":
            masked = torch.zeros_like(masked)
        if index == BAD_ROW and plant == "zero_latent":
            latent = torch.zeros_like(latent)
        inputs, labels = text.masked_fill(masked, BLANK), text.masked_fill(~masked, MASKED)
        rows.append({"input_ids": inputs, "labels": labels, "latents": latent})
    return rows


def plain_text_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean over rows of each row's mean over its masked tokens; 0/0 for a row without any."""
    mask = (labels != MASKED).float()
    losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


def plain_latent_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Returns the mean squared distance of the normalized latents; 0/0 for a zero latent."""
    unit = prediction / prediction.norm(dim=-1, keepdim=True)
    return F.mse_loss(unit, target / target.norm(dim=-1, keepdim=True))


class LatentTrainer(Trainer):
    """A plain `Trainer` with a loss of two terms. If guarded, they are checked by name."""

    script_args: ScriptArguments

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits, latents = model(inputs["input_ids"])
        stable, plain = (masked_cross_entropy, normalized_mse), (plain_text_loss, plain_latent_loss)
        text_loss, latent_loss = stable if self.script_args.stable_losses else plain
        text, latent = text_loss(logits, inputs["labels"]), latent_loss(latents, inputs["latents"])
        text = weigh_term(self, "text", text, self.script_args.text_loss_weight, self.script_args.on_bad_term)
        latent = weigh_term(self, "latent", latent, self.script_args.latent_loss_weight, self.script_args.on_bad_term)
        loss = text + latent
        return (loss, {"logits": logits, "latents": latents}) if return_outputs else loss


GuardedLatentTrainer = guarded(LatentTrainer)


def measure(trainer: Trainer) -> examples.Figures:
    """Returns text loss and latent similarity on held-out rows, and the last logged terms."""
    batch = {name: tensor.to(trainer.args.device) for name, tensor in default_collate(build_rows(64, seed=2)).items()}
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    with torch.no_grad():
        logits, latents = model(batch["input_ids"])
    last: dict[str, float] = next((row for row in reversed(trainer.state.log_history) if "loss" in row), {})
    terms = {name.removeprefix("nanguard/term/"): value for name, value in last.items() if "/term/" in name}
    return {
        "held-out text loss": masked_cross_entropy(logits, batch["labels"]).item(),
        "held-out latent cosine": F.cosine_similarity(latents, batch["latents"]).mean().item(),
        "terms, last logged": ", ".join(f"{name} {value:.4g}" for name, value in terms.items()) or "unknown",
    }


@examples.one_sentence
def build_trainer(
    script_args: ScriptArguments, training_args: GuardedTrainingArguments, trainer_class: type = GuardedLatentTrainer
) -> Any:
    """Returns a trainer of the model and the data, stock or guarded."""
    # Model
    torch.manual_seed(training_args.seed)
    model = TextLatentModel()

    # Data
    rows = build_rows(script_args.num_rows, seed=1, plant=script_args.plant)

    # Trainer
    trainer = trainer_class(model, training_args, data_collator=default_collate, train_dataset=rows)
    trainer.script_args = script_args
    return trainer


def main(
    flags: examples.RecipeFlags, script_args: ScriptArguments, training_args: GuardedTrainingArguments
) -> list[examples.Outcome]:
    """Compares with a stock run, or trains and saves; returns the outcomes, the guarded one last."""
    build, planted = partial(build_trainer, script_args), PLANTED[script_args.plant]
    if flags.compare:
        return examples.compare_runs(build, (LatentTrainer, GuardedLatentTrainer), training_args, planted, measure)

    # Train and save
    trainer = build(training_args)
    with examples.guarded_run(trainer, measure, planted) as outcome:
        trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model(training_args.output_dir)
    return [outcome]


if __name__ == "__main__":
    sys.exit(examples.run_script(make_parser, main))
