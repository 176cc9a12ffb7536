"""Reinforcement learning as a recipe: the user's model, prompts and rewards, or a small Llama that learns sums."""

import os
import re
import sys
from collections.abc import Callable
from importlib import import_module

from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from trl import GRPOTrainer, rewards
from trl.scripts.grpo import GRPOScriptArguments

from ...errors import ArgumentError
from ...hf.guarded_grpo import GuardedGRPOConfig, GuardedGRPOTrainer
from ...plain_text import printable
from ..compare import Figures, Options
from ..planted_failures import blank_scores, find_third
from ..tasks import sums
from .base_recipe import Failure, Recipe, find_form
from .recipe_parser import RecipeArguments, RecipeKind
from .user_data import load_data

NUM_ROWS = 512
SHARE = 10  # the mean reward at each end is over a tenth of the logged rows
COMMON = {"output_dir": "runs/grpo", "dataloader_pin_memory": False, "gradient_checkpointing": False}
NAMED: dict[str, Callable[..., list]] = {
    "accuracy_reward": rewards.accuracy_reward,
    "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
    "think_format_reward": rewards.think_format_reward,
    "get_soft_overlong_punishment": rewards.get_soft_overlong_punishment(
        max_completion_len=1280, soft_punish_cache=256
    ),
}


class GRPORecipe(Recipe):
    """`nanguard grpo`."""

    kind = RecipeKind(
        name="grpo",
        script=GRPOScriptArguments,
        training=GuardedGRPOConfig,
        embedded={
            **COMMON, "max_steps": 250, "learning_rate": 3e-3, "per_device_train_batch_size": 128,
            "num_generations": 16, "max_completion_length": 3, "lr_scheduler_type": "constant", "logging_steps": 5,
            "bf16": False,
        },
        task={**COMMON, "max_steps": 50, "max_completion_length": 16},
    )  # fmt: skip
    trainer_class = GuardedGRPOTrainer

    def build_model(self, seed: int) -> PreTrainedModel:
        return sums.build_beginner(seed, "conversational")

    def build_task(self, tokenizer: PreTrainedTokenizerBase, arguments: RecipeArguments) -> Options:
        script = arguments.script
        assert isinstance(script, GRPOScriptArguments)
        find_rewards(script)  # an unknown name is reported before missing data
        for flag, named in {
            "--reward_funcs": " ".join(script.reward_funcs or ()),
            "--reward_model_name_or_path": script.reward_model_name_or_path,
        }.items():
            if named:
                raise ArgumentError(
                    f"{flag} must come with --dataset_name, got {named!r} alone. The built-in sums have their own reward."
                )
        rows = sums.build_prompts(NUM_ROWS, arguments.training.seed, form=find_form(tokenizer))
        reward = sums.reward_sum if arguments.embedded_model else build_reward(tokenizer)
        return {"train_dataset": rows, "reward_funcs": reward}

    def load_task(self, arguments: RecipeArguments) -> Options:
        script = arguments.script
        assert isinstance(script, GRPOScriptArguments)
        named = find_rewards(script)
        if not named:
            raise ArgumentError(
                f"--reward_funcs must be given with a dataset, got --dataset_name {script.dataset_name!r} alone. "
                "Give my_module.my_reward, or --reward_model_name_or_path."
            )
        train, test = load_data(arguments, (["prompt"],))
        return {"train_dataset": train, "eval_dataset": test, "reward_funcs": named}

    def measure(self, trainer: Trainer, arguments: RecipeArguments) -> Figures:
        return measure_rewards(trainer, "reward, " if arguments.flags.compare else "")

    def format_figures(self, figures: Figures, arguments: RecipeArguments) -> str:
        text = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        return f"mean reward: {text}" if text else ""

    def find_failure(self, arguments: RecipeArguments) -> Failure:
        """Returns a generation in which the scores of one completion are NaN."""
        args = arguments.training
        steps = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
        generation = find_third(int(args.max_steps / steps))
        return Failure(
            f"Planted: in generation {generation} the scores of one completion are NaN when its tokens are sampled.",
            GRPOTrainer,
            lambda trainer: blank_scores(trainer.accelerator.unwrap_model(trainer.model), generation),
        )


RECIPE = GRPORecipe()


def build_reward(tokenizer: PreTrainedTokenizerBase) -> Callable[..., list[float]]:
    """Returns the reward of the sums for a model that may answer in a sentence: its last number counts."""

    def reward_sum(
        completions: list, completion_ids: list[list[int]], answer: list[str], **kwargs: object
    ) -> list[float]:
        ended = [tokenizer.eos_token_id in ids for ids in completion_ids]
        numbers = [(re.findall(r"\d+", sums.read_answer(said)) or [""])[-1] for said in completions]
        return [sums.grade(*graded) for graded in zip(numbers, answer, ended, strict=True)]

    return reward_sum


def find_rewards(script: GRPOScriptArguments) -> list[str | Callable[..., list]]:
    """Returns the rewards that the user named: a model, TRL's functions by name, or `module.function`."""
    model = script.reward_model_name_or_path
    functions = [NAMED[name] if name in NAMED else _import(name) for name in script.reward_funcs or ()]
    return [*([model] if model else []), *functions]


def _import(name: str) -> Callable[..., list]:
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
            f"{name!r} ({printable(str(error))})."
        ) from error


def measure_rewards(trainer: Trainer, prefix: str = "") -> Figures:
    """Returns the mean reward at the beginning and at the end of a run, each over a tenth of it."""
    rewards = [row["reward"] for row in trainer.state.log_history if row.get("reward") is not None]
    rewards = [reward for reward in rewards if reward == reward]  # NaN if no completion of the row could be scored
    if not rewards:
        return {}
    num = max(len(rewards) // SHARE, 1)
    return {f"{prefix}first": sum(rewards[:num]) / num, f"{prefix}last": sum(rewards[-num:]) / num}
