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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

from hf_nanguard import GuardedTrainingArguments, guarded, masked_cross_entropy, normalized_mse, weigh_term
from hf_nanguard.examples.compare import Figures, Outcome, compare_runs
from hf_nanguard.examples.recipe.command_line import (
    COMMON,
    CaseArguments,
    argument,
    exit_code,
    keep_rate,
    parse_arguments,
)

PAD, BLANK, FIRST, NUM_TOKENS = 0, 1, 2, 50
LENGTH, NUM_LATENTS = 16, 8
BAD_ROW = 21
MASKED = -100
DEFAULTS = {
    **COMMON,
    "output_dir": "runs/latent",
    "max_steps": 100,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 5e-3,
    "logging_steps": 5,
}
PLANTED = {
    "none": "No failure is planted.",
    "empty_mask": f"Planted: no token of row {BAD_ROW} is masked, so its mean over masked tokens is 0/0 (term text).",
    "zero_latent": f"Planted: the latent of row {BAD_ROW} is all zeros, so its direction is 0/0 (term latent).",
}


@dataclass
class ScriptArguments(CaseArguments):
    """Arguments of this recipe besides the guarded training arguments."""

    plant: Literal["empty_mask", "zero_latent", "none"] = argument("empty_mask", "Failure to plant, or none.")
    stable_losses: bool | None = argument(
        None, "Use the losses of hf_nanguard. By default only if no failure is planted."
    )
    on_bad_term: Literal["keep", "drop"] = argument(
        "keep", "For a non-finite term, drop the micro-batch (keep) or only the term (drop)."
    )
    text_loss_weight: float = argument(1.0, "Weight of the cross-entropy.")
    latent_loss_weight: float = argument(0.1, "Weight of the latent regression.")
    num_rows: int = argument(256, f"Rows of training data, more than {BAD_ROW}.")

    def __post_init__(self) -> None:
        self.check_rows(BAD_ROW)
        if self.stable_losses is None:
            self.stable_losses = self.plant == "none"


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

    script: ScriptArguments

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits, latents = model(inputs["input_ids"])
        stable, plain = (masked_cross_entropy, normalized_mse), (plain_text_loss, plain_latent_loss)
        text_loss, latent_loss = stable if self.script.stable_losses else plain
        text, latent = text_loss(logits, inputs["labels"]), latent_loss(latents, inputs["latents"])
        text = weigh_term(self, "text", text, self.script.text_loss_weight, self.script.on_bad_term)
        latent = weigh_term(self, "latent", latent, self.script.latent_loss_weight, self.script.on_bad_term)
        loss = text + latent
        return (loss, {"logits": logits, "latents": latents}) if return_outputs else loss


def measure(trainer: Trainer) -> Figures:
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


def run(argv: Sequence[str] | None = None) -> list[Outcome]:
    """Runs the recipe and returns the outcomes of its runs, the guarded one last."""
    script, args = parse_arguments(
        [ScriptArguments, GuardedTrainingArguments], argv, DEFAULTS, __doc__, "latent", keep_rate
    )

    def build_trainer(args: TrainingArguments, guard: bool) -> Trainer:
        torch.manual_seed(args.seed)
        trainer_class: type = guarded(LatentTrainer) if guard else LatentTrainer
        rows = build_rows(script.num_rows, seed=1, plant=script.plant)
        trainer = trainer_class(TextLatentModel(), args, data_collator=default_collate, train_dataset=rows)
        trainer.script = script
        return trainer

    return compare_runs(build_trainer, args, PLANTED[script.plant], measure, script.compare)


if __name__ == "__main__":
    sys.exit(exit_code(run))
