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
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from datasets import Dataset
from trl import GRPOTrainer

from hf_nanguard import ArgumentError, GuardedGRPOConfig, GuardedGRPOTrainer, examples
from hf_nanguard.examples import pictures

BAD_ROW = 5
DEFAULTS = {
    "compare": True, "output_dir": "runs/grpo_vlm", "max_steps": 40, "per_device_train_batch_size": 16,
    "num_generations": 8, "max_completion_length": 4, "learning_rate": 5e-3, "lr_scheduler_type": "constant",
    "logging_steps": 2, "save_strategy": "no", "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False,
    # An image token in a completion would ask for an image.
    "generation_kwargs": {"suppress_tokens": [pictures.WORDS.index(pictures.IMAGE)]},
}  # fmt: skip
PLANTED = {
    "none": "No failure is planted.",
    "picture": f"Planted: a pixel of the picture in row {BAD_ROW} is NaN, so all scores of completions about it are NaN.",
}


@dataclass
class ScriptArguments:
    """Arguments of this recipe besides the guarded arguments of GRPO."""

    plant: Literal["picture", "none"] = examples.argument("picture", "Failure to plant, or none.")
    num_rows: int = examples.argument(64, f"Rows of training data, more than {BAD_ROW}.")

    def __post_init__(self) -> None:
        if self.num_rows <= BAD_ROW:
            raise ValueError(f"--num_rows must be more than {BAD_ROW}, got {self.num_rows}.")


def make_parser() -> examples.RecipeParser:
    """Returns the parser of this recipe's arguments, those of the guard, `--config` and `--preset`."""
    types = (ScriptArguments, GuardedGRPOConfig)
    return examples.RecipeParser(types, "grpo", DEFAULTS, description=__doc__)


@examples.one_sentence
def build_trainer(
    script_args: ScriptArguments, training_args: GuardedGRPOConfig, trainer_class: type = GuardedGRPOTrainer
) -> Any:
    """Returns a trainer of the model and the pictures, stock or guarded."""
    # Model
    model, processor = pictures.build_model(training_args.seed), pictures.build_processor()

    # Data
    rows = pictures.build_rows(script_args.num_rows, training_args.seed).to_list()
    if script_args.plant == "picture":
        rows[BAD_ROW]["images"][0][0][0][0] = float("nan")

    # Trainer
    return trainer_class(
        model, reward_funcs=pictures.reward_answer, args=training_args, train_dataset=Dataset.from_list(rows),
        processing_class=processor,
    )  # fmt: skip


def main(
    flags: examples.RecipeFlags, script_args: ScriptArguments, training_args: GuardedGRPOConfig
) -> list[examples.Outcome]:
    """Compares with a stock run, or trains and saves; returns the outcomes, the guarded one last."""
    build, planted = partial(build_trainer, script_args), PLANTED[script_args.plant]
    if flags.compare:
        if script_args.plant != "none" and training_args.world_size > 1:  # the others would wait for the one that fails
            raise ArgumentError(
                f"--compare must be false on several processes, got {training_args.world_size}: the stock run fails on one of "
                "them only."
            )
        return examples.compare_runs(
            build, (GRPOTrainer, GuardedGRPOTrainer), training_args, planted, examples.measure_rewards
        )

    # Train and save
    trainer = build(training_args)
    with examples.guarded_run(trainer, examples.measure_rewards, planted) as outcome:
        trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model(training_args.output_dir)
    return [outcome]


if __name__ == "__main__":
    sys.exit(examples.run_script(make_parser, main))
