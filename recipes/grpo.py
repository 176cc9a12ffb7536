"""Reinforcement learning (GRPO) under guard: TRL's own script with a guarded trainer.

Without a model and a dataset, a small Llama built in code learns sums from rewards, without a network.

    python recipes/grpo.py
    python recipes/grpo.py --compare
    python recipes/grpo.py --model_name_or_path my-model --dataset_name my-prompts --reward_funcs my_module.score
    accelerate launch --config_file configs/accelerate/ddp.yaml recipes/grpo.py --config configs/grpo/balanced.yaml

`nanguard grpo` runs this file.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from trl import DatasetMixtureConfig, ModelConfig, get_peft_config, get_quantization_config, rewards
from trl.scripts.grpo import GRPOScriptArguments

from hf_nanguard import ArgumentError, GuardedGRPOConfig, GuardedGRPOTrainer, examples
from hf_nanguard.examples import sums

NUM_ROWS = 512
COMMON = {"output_dir": "runs/grpo", "dataloader_pin_memory": False, "gradient_checkpointing": False}
EMBEDDED = {
    **COMMON, "max_steps": 250, "learning_rate": 3e-3, "per_device_train_batch_size": 128, "num_generations": 16,
    "max_completion_length": 3, "lr_scheduler_type": "constant", "logging_steps": 5, "bf16": False,
}  # fmt: skip
ONLY_DATA_EMBEDDED = {**COMMON, "max_steps": 50, "max_completion_length": 16}
NAMED: dict[str, Callable[..., list]] = {
    "accuracy_reward": rewards.accuracy_reward,
    "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
    "think_format_reward": rewards.think_format_reward,
    "get_soft_overlong_punishment": rewards.get_soft_overlong_punishment(
        max_completion_len=1280, soft_punish_cache=256
    ),
}


@dataclass
class ScriptArguments(GRPOScriptArguments):
    """TRL's arguments of the script, and one of ours."""

    allow_pickle: bool = examples.argument(False, examples.PICKLE_HELP)


def make_parser(prog: str | None = None) -> examples.RecipeParser:
    """Returns the parser of TRL's arguments, those of the guard, `--config` and `--preset`."""
    types = (ScriptArguments, GuardedGRPOConfig, ModelConfig, DatasetMixtureConfig)
    return examples.RecipeParser(types, "grpo", EMBEDDED, ONLY_DATA_EMBEDDED, prog=prog)


def find_rewards(script_args: ScriptArguments) -> list[str | Callable[..., list]]:
    """Returns the rewards that the user named: a model, TRL's functions by name, or `module.function`."""
    model = script_args.reward_model_name_or_path
    if model:  # loaded with the arguments of the policy
        examples.require_safetensors(model, "--reward_model_name_or_path", script_args.allow_pickle)
    named = [NAMED.get(name) or import_reward(name) for name in script_args.reward_funcs or ()]
    return [*([model] if model else []), *named]


def import_reward(name: str) -> Callable[..., list]:
    """Imports a function of the user's, from the current folder too."""
    module, _, function = name.rpartition(".")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(import_module(module), function)
        if not callable(found):
            raise TypeError(f"{found!r} cannot be called")
        return found
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"--reward_funcs must be {', '.join(NAMED)} or a module.function that can be imported from {here}, got "
            f"{name!r} ({error})."
        ) from error


@examples.one_sentence
def build_trainer(
    script_args: ScriptArguments,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
    training_args: GuardedGRPOConfig,
    trainer_class: type = GuardedGRPOTrainer,
) -> Any:
    """Returns a trainer of the user's model, prompts and rewards, or of those built in code."""
    # Model
    model: Any
    tokenizer: Any
    if model_args.model_name_or_path is None:
        beginner = sums.build_beginner(training_args.seed, "conversational")
        model, tokenizer = examples.fit_model(beginner, model_args), sums.build_tokenizer()
    else:
        model, tokenizer = model_args.model_name_or_path, None  # TRL loads both
        training_args.model_init_kwargs = examples.find_model_options(
            model_args, training_args, script_args.allow_pickle
        )

    # Data and rewards
    named = find_rewards(script_args)
    if script_args.dataset_name is not None or dataset_args.datasets:
        if not named:
            raise ArgumentError(
                f"--reward_funcs must be given with a dataset, got --dataset_name {script_args.dataset_name!r} alone. "
                "Give my_module.my_reward, or --reward_model_name_or_path."
            )
        data = examples.load_rows(script_args, dataset_args, training_args, (["prompt"],))
    elif named:
        given = " ".join(script_args.reward_funcs or ())
        flag = "--reward_funcs" if given else "--reward_model_name_or_path"
        raise ArgumentError(
            f"{flag} must come with --dataset_name, got {given or named[0]!r} alone. The built-in sums have their own "
            "reward."
        )
    else:
        tokenizer = tokenizer or examples.load_tokenizer(model_args, training_args)
        form = sums.find_form(tokenizer)
        data = {"train_dataset": sums.build_prompts(NUM_ROWS, training_args.seed, form=form)}
        named = [sums.reward_sum if model_args.model_name_or_path is None else sums.build_reward(tokenizer)]

    # Trainer
    return trainer_class(
        model=model, reward_funcs=named, args=training_args, processing_class=tokenizer, **data,
        peft_config=get_peft_config(model_args), quantization_config=get_quantization_config(model_args),
    )  # fmt: skip


def main(
    flags: examples.RecipeFlags,
    script_args: ScriptArguments,
    training_args: GuardedGRPOConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> list[examples.Outcome]:
    """Trains and saves, or compares with a stock run; returns the outcomes, the guarded one last."""
    build = partial(build_trainer, script_args, model_args, dataset_args)
    if flags.compare:
        return examples.compare_grpo(build, training_args, examples.measure_rewards)

    # Train and save
    trainer = build(training_args)
    with examples.guarded_run(trainer, examples.measure_rewards) as outcome:
        trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model(training_args.output_dir)
        if training_args.push_to_hub:
            trainer.push_to_hub(dataset_name=script_args.dataset_name)
    return [outcome]


if __name__ == "__main__":
    sys.exit(examples.run_script(make_parser, main))
