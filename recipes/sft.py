"""Supervised fine-tuning under guard: TRL's own script with a guarded trainer.

Without a model and a dataset, a small Llama built in code learns sums, without a network.

    python recipes/sft.py
    python recipes/sft.py --compare
    python recipes/sft.py --model_name_or_path my-model --dataset_name my-data --preset balanced
    accelerate launch --config_file configs/accelerate/ddp.yaml recipes/sft.py --config configs/sft/balanced.yaml

`nanguard sft` runs this file.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import trl
from transformers import Trainer
from trl import DatasetMixtureConfig, ModelConfig, get_peft_config, get_quantization_config

from hf_nanguard import GuardedSFTConfig, GuardedSFTTrainer, examples
from hf_nanguard.examples import sums

NUM_ROWS = 1024
COMMON = {"output_dir": "runs/sft", "dataloader_pin_memory": False, "gradient_checkpointing": False}
EMBEDDED = {
    **COMMON, "max_steps": 200, "learning_rate": 5e-3, "per_device_train_batch_size": 32, "max_length": 32,
    "lr_scheduler_type": "constant", "bf16": False,
}  # fmt: skip
ONLY_DATA_EMBEDDED = {**COMMON, "max_steps": 100}


@dataclass
class ScriptArguments(trl.ScriptArguments):
    """TRL's arguments of the script, and one of ours."""

    allow_pickle: bool = examples.argument(False, examples.PICKLE_HELP)


def make_parser(prog: str | None = None) -> examples.RecipeParser:
    """Returns the parser of TRL's arguments, those of the guard, `--config` and `--preset`."""
    types = (ScriptArguments, GuardedSFTConfig, ModelConfig, DatasetMixtureConfig)
    return examples.RecipeParser(types, "sft", EMBEDDED, ONLY_DATA_EMBEDDED, prog=prog)


@examples.one_sentence
def build_trainer(
    script_args: ScriptArguments,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
    training_args: GuardedSFTConfig,
    trainer_class: type = GuardedSFTTrainer,
) -> Any:
    """Returns a trainer of the user's model and data, or of those built in code."""
    # Model
    model: Any
    tokenizer: Any
    if model_args.model_name_or_path is None:
        model, tokenizer = examples.fit_model(sums.build_model(training_args.seed), model_args), sums.build_tokenizer()
    else:
        model, tokenizer = model_args.model_name_or_path, None  # TRL loads both
        training_args.model_init_kwargs = examples.find_model_options(
            model_args, training_args, script_args.allow_pickle
        )

    # Data
    if script_args.dataset_name is None and not dataset_args.datasets:
        tokenizer = tokenizer or examples.load_tokenizer(model_args, training_args)
        data = {"train_dataset": sums.build_examples(NUM_ROWS, training_args.seed, form=sums.find_form(tokenizer))}
    else:
        text = training_args.dataset_text_field
        forms = ([text], ["messages"], ["conversations"], ["prompt", "completion"], ["input_ids"])
        data = examples.load_rows(script_args, dataset_args, training_args, forms)

    # Trainer
    return trainer_class(
        model=model, args=training_args, processing_class=tokenizer, **data, peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )  # fmt: skip


def measure(trainer: Trainer, is_embedded: bool) -> examples.Figures:
    """Returns the last logged gradient norm, and how well the sums were learned."""
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    last: examples.Figures = {"last gradient norm": norms[-1]} if norms else {}
    return {**last, **(sums.measure(trainer) if is_embedded else {})}


def main(
    flags: examples.RecipeFlags,
    script_args: ScriptArguments,
    training_args: GuardedSFTConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> list[examples.Outcome]:
    """Trains and saves, or compares with a stock run; returns the outcomes, the guarded one last."""
    build = partial(build_trainer, script_args, model_args, dataset_args)
    figures = partial(measure, is_embedded=script_args.dataset_name is None and not dataset_args.datasets)
    if flags.compare:
        return examples.compare_sft(build, training_args, figures)

    # Train and save
    trainer = build(training_args)
    with examples.guarded_run(trainer, figures) as outcome:
        trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model(training_args.output_dir)
        if training_args.push_to_hub:
            trainer.push_to_hub(dataset_name=script_args.dataset_name)
    return [outcome]


if __name__ == "__main__":
    sys.exit(examples.run_script(make_parser, main))
