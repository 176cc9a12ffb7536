"""GRPO with the guard: the user's model, prompts and rewards, or a small Llama that learns sums.

    python recipes/grpo.py
    python recipes/grpo.py --compare
    accelerate launch recipes/grpo.py --config configs/grpo/balanced.yaml
    accelerate launch --config_file configs/accelerate/ddp.yaml recipes/grpo.py --preset balanced

`nanguard grpo` runs this file; `--help` lists the arguments.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

from transformers import PreTrainedTokenizerBase, Trainer
from trl import GRPOTrainer, rewards
from trl.scripts.grpo import GRPOScriptArguments

from hf_nanguard import ArgumentError, GuardedGRPOConfig, GuardedGRPOTrainer
from hf_nanguard.cli.main import main as nanguard
from hf_nanguard.examples.compare import Options, measure_rewards
from hf_nanguard.examples.planted_failures import blank_scores, find_third
from hf_nanguard.examples.recipe.recipe_parser import RecipeArguments, RecipeKind, parse
from hf_nanguard.examples.recipe.run_and_save import build, compare, print_result, train_and_save
from hf_nanguard.examples.recipe.safe_weights import require_safetensors
from hf_nanguard.examples.recipe.user_data import load_data, load_model
from hf_nanguard.examples.tasks import sums

NUM_ROWS = 512
COMMON = {"output_dir": "runs/grpo", "dataloader_pin_memory": False, "gradient_checkpointing": False}
KIND = RecipeKind(
    name="grpo",
    script=GRPOScriptArguments,
    training=GuardedGRPOConfig,
    trainer=GuardedGRPOTrainer,
    embedded={
        **COMMON, "max_steps": 250, "learning_rate": 3e-3, "per_device_train_batch_size": 128,
        "num_generations": 16, "max_completion_length": 3, "lr_scheduler_type": "constant", "logging_steps": 5,
        "bf16": False,
    },
    task={**COMMON, "max_steps": 50, "max_completion_length": 16},
)  # fmt: skip
NAMED: dict[str, Callable[..., list]] = {
    "accuracy_reward": rewards.accuracy_reward,
    "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
    "think_format_reward": rewards.think_format_reward,
    "get_soft_overlong_punishment": rewards.get_soft_overlong_punishment(
        max_completion_len=1280, soft_punish_cache=256
    ),
}


def find_rewards(script: GRPOScriptArguments) -> list[str | Callable[..., list]]:
    """Returns the rewards that the user named: a model, TRL's functions by name, or `module.function`."""
    model = script.reward_model_name_or_path
    return [
        *([model] if model else []),
        *(NAMED.get(name) or import_reward(name) for name in script.reward_funcs or ()),
    ]


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


def build_reward(tokenizer: PreTrainedTokenizerBase) -> Callable[..., list[float]]:
    """Returns the reward of the sums for a model that may answer in a sentence: its last number counts."""

    def reward_sum(
        completions: list, completion_ids: list[list[int]], answer: list[str], **kwargs: object
    ) -> list[float]:
        ended = [tokenizer.eos_token_id in ids for ids in completion_ids]
        numbers = [(re.findall(r"\d+", sums.read_answer(said)) or [""])[-1] for said in completions]
        return [sums.grade(*graded) for graded in zip(numbers, answer, ended, strict=True)]

    return reward_sum


def gather_parts(arguments: RecipeArguments) -> Options:
    """Returns model, data and rewards, as arguments of a trainer."""
    parts = load_model(arguments, lambda seed: sums.build_beginner(seed, "conversational"))
    script = arguments.script
    assert isinstance(script, GRPOScriptArguments)
    named = find_rewards(script)
    if script.reward_model_name_or_path:  # loaded with the arguments of the model
        allow = arguments.flags.allow_pickle
        require_safetensors(script.reward_model_name_or_path, "--reward_model_name_or_path", allow)
    if not arguments.embedded_data:
        if not named:
            raise ArgumentError(
                f"--reward_funcs must be given with a dataset, got --dataset_name {script.dataset_name!r} alone. "
                "Give my_module.my_reward, or --reward_model_name_or_path."
            )
        return {**parts, **load_data(arguments, (["prompt"],)), "reward_funcs": named}
    if named:
        given = " ".join(script.reward_funcs or ())
        flag = "--reward_funcs" if given else "--reward_model_name_or_path"
        raise ArgumentError(
            f"{flag} must come with --dataset_name, got {given or script.reward_model_name_or_path!r} alone. The built-in "
            "sums have their own reward."
        )
    tokenizer = parts["processing_class"]
    rows = sums.build_prompts(NUM_ROWS, arguments.training.seed, form=sums.find_form(tokenizer))
    reward = sums.reward_sum if arguments.embedded_model else build_reward(tokenizer)
    return {**parts, "train_dataset": rows, "reward_funcs": reward}


def main(words: Sequence[str]) -> int:
    """Runs the recipe with the words of a command line and returns the exit code."""
    arguments = parse(words, KIND)
    args = arguments.training
    with print_result(arguments) as result:
        parts = gather_parts(arguments)
        if arguments.flags.compare:
            steps = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
            generation = find_third(int(args.max_steps / steps))

            def plant(trainer: Trainer) -> None:
                blank_scores(trainer.accelerator.unwrap_model(trainer.model), generation)

            sentence = (
                f"Planted: in generation {generation} the scores of one completion are NaN when its tokens are sampled."
            )
            result |= compare(
                GRPOTrainer, parts, arguments, plant, sentence, partial(measure_rewards, prefix="reward, ")
            )
        else:
            trainer = build(GuardedGRPOTrainer, args=args, **parts)
            result |= train_and_save(trainer, arguments, measure_rewards)
            if result["figures"]:
                text = ", ".join(f"{name} {value:.3f}" for name, value in result["figures"].items())
                trainer.accelerator.print(f"mean reward: {text}")
            trainer.end()
    return 0 if result["is_sound"] else 1


if __name__ == "__main__":
    sys.exit(nanguard(["grpo", *sys.argv[1:]]))  # which has a short help and calls `main`
