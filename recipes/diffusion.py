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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate
from transformers import Trainer, TrainingArguments

from hf_nanguard import GuardedTrainingArguments, clamp_weight, guarded, watch_tensor, weigh_term
from hf_nanguard.examples.compare import Figures, Outcome, compare_runs
from hf_nanguard.examples.recipe.command_line import (
    COMMON,
    CaseArguments,
    argument,
    exit_code,
    keep_rate,
    parse_arguments,
)

SIDE, BAD_ROW = 12, 33
MAX_PREDICTION = 1e6
DEFAULTS = {
    **COMMON,
    "output_dir": "runs/diffusion",
    "max_steps": 80,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "learning_rate": 3e-3,
    "logging_steps": 10,
}
PLANTED = {
    "none": "No failure is planted.",
    "snr_weight": "Planted: noise levels start at 0, where the signal-to-noise ratio is 1/0 (term signal).",
    "input": f"Planted: the map of row {BAD_ROW} contains a NaN (input signal).",
}


@dataclass
class ScriptArguments(CaseArguments):
    """Arguments of this recipe besides the guarded training arguments."""

    plant: Literal["snr_weight", "input", "none"] = argument("snr_weight", "Failure to plant, or none.")
    max_weight: float | None = argument(
        None, "Largest loss weight. Defaults to 100, or to no bound with --plant snr_weight."
    )
    num_levels: int = argument(200, "Number of noise levels, at least 2.")
    num_rows: int = argument(256, f"Rows of training data, more than {BAD_ROW}.")

    def __post_init__(self) -> None:
        self.check_rows(BAD_ROW)
        if self.num_levels < 2:
            raise ValueError(f"--num_levels must be at least 2, got {self.num_levels}.")
        if self.max_weight is None and self.plant != "snr_weight":
            self.max_weight = 100.0


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

    script: ScriptArguments

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        signal, level = inputs["signal"], inputs["level"]
        noise = torch.randn_like(signal)
        predicted, predicted_noise = model(add_noise(signal, noise, level), inputs["place"], level)
        weight = weigh(level)
        if self.script.max_weight is not None:
            weight = clamp_weight(weight, max=self.script.max_weight)
        watch_tensor(self, "loss weight", weight)
        watch_tensor(self, "prediction", predicted, bound=MAX_PREDICTION)
        error = (predicted - signal).square().mean((1, 2))
        loss = weigh_term(self, "signal", (weight * error).mean())
        loss = loss + weigh_term(self, "noise", F.mse_loss(predicted_noise, noise))
        return (loss, {"signal": predicted, "noise": predicted_noise}) if return_outputs else loss


def measure(trainer: Trainer) -> Figures:
    """Returns the error of the signal at noise level 0.5 on held-out maps, relative to that of predicting zero."""
    batch = {name: tensor.to(trainer.args.device) for name, tensor in default_collate(build_rows(64, seed=2)).items()}
    signal, level = batch["signal"], torch.full((64,), 0.5, device=trainer.args.device)
    noise = torch.randn(signal.shape, generator=torch.Generator().manual_seed(3)).to(signal.device)
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    with torch.no_grad():
        predicted, _ = model(add_noise(signal, noise, level), batch["place"], level)
    return {"held-out signal error": (F.mse_loss(predicted, signal) / signal.square().mean()).item()}


def run(argv: Sequence[str] | None = None) -> list[Outcome]:
    """Runs the recipe and returns the outcomes of its runs, the guarded one last."""
    script, args = parse_arguments(
        [ScriptArguments, GuardedTrainingArguments], argv, DEFAULTS, __doc__, "diffusion", keep_rate
    )

    def build_trainer(args: TrainingArguments, guard: bool) -> Trainer:
        torch.manual_seed(args.seed)
        trainer_class: type = guarded(DenoisingTrainer) if guard else DenoisingTrainer
        rows = build_rows(script.num_rows, seed=1, plant=script.plant)
        collator = NoisyCollator(0 if script.plant == "snr_weight" else 1, script.num_levels)
        trainer = trainer_class(Denoiser(), args, data_collator=collator, train_dataset=rows)
        trainer.script = script
        return trainer

    return compare_runs(build_trainer, args, PLANTED[script.plant], measure, script.compare)


if __name__ == "__main__":
    sys.exit(exit_code(run))
