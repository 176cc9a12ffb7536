"""A denoising model on the plain `Trainer`: inputs, predictions, loss weights and loss are checked.

A small convolutional network learns to draw the signal strength around a transmitter, from noise and the transmitter's
place. It predicts signal and noise; the signal's error is weighted by the signal-to-noise ratio, which is unbounded
without noise. Model and data are built in code; nothing is downloaded. Planted failures:

    snr_weight   noise levels start at 0 instead of 1; at 0 the ratio is 1/0, and weights are not clamped
    input        one map of the training data contains a NaN

With `--max_weight 100` the weights are clamped in both cases, and noise level 0 is harmless.

    python recipes/diffusion.py
    python recipes/diffusion.py --plant input --nanguard_on_bad_input drop_samples
    python recipes/diffusion.py --plant none --compare false --max_steps 2000
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate
from transformers import Trainer

from hf_nanguard import GuardedTrainingArguments, clamp_weight, examples, guarded, watch_tensor, weigh_term

SIDE, BAD_ROW = 12, 33
MAX_PREDICTION = 1e6
DEFAULTS = {
    "compare": True, "output_dir": "runs/diffusion", "max_steps": 80, "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2, "learning_rate": 3e-3, "max_grad_norm": 0.5, "logging_steps": 10,
    "save_strategy": "no", "report_to": ["none"], "remove_unused_columns": False, "dataloader_pin_memory": False,
}  # fmt: skip
PLANTED = {
    "none": "No failure is planted.",
    "snr_weight": "Planted: noise levels start at 0, where the signal-to-noise ratio is 1/0 (term signal).",
    "input": f"Planted: the map of row {BAD_ROW} contains a NaN (input signal).",
}


@dataclass
class ScriptArguments:
    """Arguments of this recipe besides the guarded training arguments."""

    plant: Literal["snr_weight", "input", "none"] = examples.argument("snr_weight", "Failure to plant, or none.")
    max_weight: float | None = examples.argument(
        None, "Largest loss weight. Defaults to 100, or to no bound with --plant snr_weight."
    )
    num_levels: int = examples.argument(200, "Number of noise levels, at least 2.")
    num_rows: int = examples.argument(256, f"Rows of training data, more than {BAD_ROW}.")

    def __post_init__(self) -> None:
        if self.num_rows <= BAD_ROW:
            raise ValueError(f"--num_rows must be more than {BAD_ROW}, got {self.num_rows}.")
        if self.num_levels < 2:
            raise ValueError(f"--num_levels must be at least 2, got {self.num_levels}.")
        if self.max_weight is None and self.plant != "snr_weight":
            self.max_weight = 100.0


def make_parser() -> examples.RecipeParser:
    """Returns the parser of this recipe's arguments, those of the guard, `--config` and `--preset`."""
    types = (ScriptArguments, GuardedTrainingArguments)
    kept = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
    return examples.RecipeParser(types, "diffusion", DEFAULTS, kept=kept, description=__doc__)


class Denoiser(nn.Module):
    """Four convolutions over the noisy map, the transmitter's place and the noise level."""

    def __init__(self) -> None:
        super().__init__()
        layers = [[nn.Conv2d(width, 24, 5, padding=2), nn.GroupNorm(4, 24), nn.SiLU()] for width in (3, 24, 24)]
        self.blocks = nn.Sequential(*(nn.Sequential(*layer) for layer in layers))
        self.head = nn.Conv2d(24, 2, 3, padding=1)

    def forward(self, noisy: Tensor, place: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        stacked = torch.stack([noisy, place, level[:, None, None].expand_as(noisy)], 1)
        signal, noise = self.head(self.blocks(stacked)).unbind(1)
        return signal, noise


def build_rows(num_rows: int, seed: int, plant: str = "none") -> list[dict[str, Tensor]]:
    """Returns maps of the signal strength around transmitters, and the places of the transmitters."""
    draw = torch.Generator().manual_seed(seed)
    axis = torch.arange(SIDE, dtype=torch.float32)
    rows = []
    for index in range(num_rows):
        y, x = torch.randint(SIDE, (2,), generator=draw).tolist()
        signal = 2 * torch.exp(-((axis[:, None] - y) ** 2 + (axis - x) ** 2) / 12) - 1
        place = torch.zeros(SIDE, SIDE)
        place[y, x] = 1
        if plant == "input" and index == BAD_ROW:
            signal[0, 0] = float("nan")
        rows.append({"signal": signal, "place": place})
    return rows


class NoisyCollator:
    """Stacks rows and draws a noise level for each.

    A level drawn inside the loss would come from the random state that a skipped step restores, so the next step would
    draw the same bad level again. Levels are drawn from `lowest / num_levels` to below 1.
    """

    def __init__(self, lowest: int, num_levels: int):
        self.lowest = lowest
        self.num_levels = num_levels

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        levels = torch.randint(self.lowest, self.num_levels, (len(rows),)) / self.num_levels
        return {**default_collate(rows), "level": levels}


def add_noise(signal: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """Mixes signal and noise: level 0 is the signal alone, level 1 the noise alone."""
    level = level[:, None, None]
    return (1 - level) * signal + level.sqrt() * noise


def weigh(level: Tensor) -> Tensor:
    """Returns the signal-to-noise ratio of levels; it is infinite at 0."""
    return (1 - level).square() / level


class DenoisingTrainer(Trainer):
    """A plain `Trainer` with a denoising loss. If guarded, its loss weights, predictions and terms are checked by name."""

    script_args: ScriptArguments

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        signal, level = inputs["signal"], inputs["level"]
        noise = torch.randn_like(signal)
        predicted, predicted_noise = model(add_noise(signal, noise, level), inputs["place"], level)
        weight = weigh(level)
        if self.script_args.max_weight is not None:
            weight = clamp_weight(weight, max=self.script_args.max_weight)
        watch_tensor(self, "loss weight", weight)
        watch_tensor(self, "prediction", predicted, bound=MAX_PREDICTION)
        error = (predicted - signal).square().mean((1, 2))
        loss = weigh_term(self, "signal", (weight * error).mean())
        loss = loss + weigh_term(self, "noise", F.mse_loss(predicted_noise, noise))
        return (loss, {"signal": predicted, "noise": predicted_noise}) if return_outputs else loss


GuardedDenoisingTrainer = guarded(DenoisingTrainer)


def measure(trainer: Trainer) -> examples.Figures:
    """Returns the error of the signal at noise level 0.5 on held-out maps, relative to that of predicting zero."""
    batch = {name: tensor.to(trainer.args.device) for name, tensor in default_collate(build_rows(64, seed=2)).items()}
    signal, level = batch["signal"], torch.full((64,), 0.5, device=trainer.args.device)
    noise = torch.randn(signal.shape, generator=torch.Generator().manual_seed(3)).to(signal.device)
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    with torch.no_grad():
        predicted, _ = model(add_noise(signal, noise, level), batch["place"], level)
    return {"held-out signal error": (F.mse_loss(predicted, signal) / signal.square().mean()).item()}


@examples.one_sentence
def build_trainer(
    script_args: ScriptArguments, training_args: GuardedTrainingArguments, trainer_class: type = GuardedDenoisingTrainer
) -> Any:
    """Returns a trainer of the model and the data, stock or guarded."""
    # Model
    torch.manual_seed(training_args.seed)
    model = Denoiser()

    # Data
    rows = build_rows(script_args.num_rows, seed=1, plant=script_args.plant)
    collator = NoisyCollator(0 if script_args.plant == "snr_weight" else 1, script_args.num_levels)

    # Trainer
    trainer = trainer_class(model, training_args, data_collator=collator, train_dataset=rows)
    trainer.script_args = script_args
    return trainer


def main(
    flags: examples.RecipeFlags, script_args: ScriptArguments, training_args: GuardedTrainingArguments
) -> list[examples.Outcome]:
    """Compares with a stock run, or trains and saves; returns the outcomes, the guarded one last."""
    build, planted = partial(build_trainer, script_args), PLANTED[script_args.plant]
    if flags.compare:
        return examples.compare_runs(
            build, (DenoisingTrainer, GuardedDenoisingTrainer), training_args, planted, measure
        )

    # Train and save
    trainer = build(training_args)
    with examples.guarded_run(trainer, measure, planted) as outcome:
        trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model(training_args.output_dir)
    return [outcome]


if __name__ == "__main__":
    sys.exit(examples.run_script(make_parser, main))
