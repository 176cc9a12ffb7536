"""GRPO of a vision-language model that samples from NaN: it ends the stock run, and the guarded run continues.

A small LLaVA, built in code, learns to say whether a picture is bright or dark. One picture has a NaN pixel, as from a
damaged file or a division in a transform. All scores of completions about it are NaN, and sampling a token from them
raises an error. The guard ends those completions, excludes them from the loss and from their group's baseline, and
reports an event with their dataset row.

    python recipes/grpo_vlm.py
    python recipes/grpo_vlm.py --plant none --compare false --max_steps 200
    python recipes/grpo_vlm.py --preset balanced --learning_rate 5e-3
    accelerate launch recipes/grpo_vlm.py --compare false
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments
from trl import GRPOTrainer

from hf_nanguard import ArgumentError, GuardedGRPOConfig, GuardedGRPOTrainer
from hf_nanguard.examples.compare import Outcome, compare_runs, measure_rewards
from hf_nanguard.examples.recipe.command_line import CaseArguments, argument, exit_code, parse_arguments
from hf_nanguard.examples.tasks import pictures as picture

BAD_ROW = 5
DEFAULTS = {
    "output_dir": "runs/grpo_vlm",
    "max_steps": 40,
    "per_device_train_batch_size": 16,
    "num_generations": 8,
    "max_completion_length": 4,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 2,
    "save_strategy": "no",
    "bf16": False,
    "use_cpu": not torch.accelerator.is_available(),  # without it the host refuses a preset's bfloat16
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    # An image token in a completion would ask for an image.
    "generation_kwargs": {"suppress_tokens": [picture.WORDS.index(picture.IMAGE)]},
}
PLANTED = {
    "none": "No failure is planted.",
    "picture": f"Planted: a pixel of the picture in row {BAD_ROW} is NaN, so all scores of completions about it are NaN.",
}


@dataclass
class ScriptArguments(CaseArguments):
    """Arguments of this recipe besides the guarded arguments of GRPO."""

    plant: Literal["picture", "none"] = argument("picture", "Failure to plant, or none.")
    num_rows: int = argument(64, f"Rows of training data, more than {BAD_ROW}.")

    def __post_init__(self) -> None:
        self.check_rows(BAD_ROW)


def run(argv: Sequence[str] | None = None) -> list[Outcome]:
    """Runs the recipe and returns the outcomes of its runs, the guarded one last."""
    script, args = parse_arguments([ScriptArguments, GuardedGRPOConfig], argv, DEFAULTS, __doc__, "grpo")
    # The other processes would wait for the one that fails.
    if script.compare and script.plant != "none" and args.world_size > 1:
        raise ArgumentError(
            f"--compare must be false on several processes, got {args.world_size}: the stock run fails on one of them only."
        )

    rows = picture.build_rows(script.num_rows, args.seed).to_list()
    if script.plant == "picture":
        rows[BAD_ROW]["images"][0][0][0][0] = float("nan")

    def build_trainer(args: TrainingArguments, guard: bool) -> Trainer:
        trainer_class: type = GuardedGRPOTrainer if guard else GRPOTrainer
        return trainer_class(
            picture.build_model(args.seed), reward_funcs=picture.reward_answer, args=args,
            train_dataset=Dataset.from_list(rows), processing_class=picture.build_processor(),
        )  # fmt: skip

    return compare_runs(
        build_trainer, args, PLANTED[script.plant], partial(measure_rewards, prefix="reward, "), script.compare
    )


if __name__ == "__main__":
    sys.exit(exit_code(run))
