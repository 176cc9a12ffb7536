"""Reinforcement learning as a recipe: a model, prompts and rewards of the user's, or sums and a small Llama."""

import os
import re
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from trl import GRPOTrainer, rewards
from trl.scripts.grpo import GRPOScriptArguments

from ...errors import ArgumentError
from ...hf.guarded_grpo import GuardedGRPOConfig, GuardedGRPOTrainer
from ..planted_failures import blank_scores, find_third
from ..tasks import sums as arithmetic
from .base_recipe import Failure, Recipe, find_form
from .recipe_parser import RecipeArguments, RecipeKind
from .user_data import load_data

NUM_ROWS = 512
SHARE = 10  # of the logged rows at each end
COMMON = {"output_dir": "runs/grpo", "dataloader_pin_memory": False, "gradient_checkpointing": False}
NAMED = {
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

    def make_model(self, seed: int, tokenizer: Any) -> Callable[[], Any]:
        return partial(arithmetic.build_beginner, seed, find_form(tokenizer))

    def make_task(self, tokenizer: Any, seed: int, plan: RecipeArguments) -> dict[str, Any]:
        script = plan.script
        find_rewards(plan)  # a name that nobody knows is told before that there is no data
        for flag, named in {
            "--reward_funcs": " ".join(script.reward_funcs or ()),  # type: ignore[attr-defined]
            "--reward_model_name_or_path": script.reward_model_name_or_path,  # type: ignore[attr-defined]
        }.items():
            if named:
                raise ArgumentError(
                    f"{flag} must come with --dataset_name, got {named!r} alone. The embedded sums have their own reward."
                )
        rows = arithmetic.build_prompts(NUM_ROWS, seed, form=find_form(tokenizer))
        reward = arithmetic.reward_sum if plan.embedded_model else build_reward(tokenizer)
        return {"train_dataset": rows, "reward_funcs": reward}

    def load_task(self, plan: RecipeArguments) -> dict[str, Any]:
        named = find_rewards(plan)
        if not named:
            raise ArgumentError(
                f"--reward_funcs must be given with a dataset, got --dataset_name {plan.script.dataset_name!r} alone. "
                "Give my_module.my_reward, or --reward_model_name_or_path."
            )
        train, test = load_data(plan, (["prompt"],))
        return {"train_dataset": train, "eval_dataset": test, "reward_funcs": named}

    def measure(self, trainer: Any, plan: RecipeArguments) -> dict[str, float | str]:
        return measure(trainer)

    def tell(self, figures: dict[str, float | str], plan: RecipeArguments) -> str:
        told = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        return f"mean reward: {told}" if told else ""

    def measure_planted(self, trainer: Any, plan: RecipeArguments) -> dict[str, float | str]:
        return {f"reward, {name}": value for name, value in measure(trainer).items()}

    def plan_failure(self, plan: RecipeArguments) -> Failure:
        """Returns a generation in which the scores of one completion are NaN."""
        args = plan.training
        steps = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
        generation = find_third(int(args.max_steps / steps))
        return Failure(
            f"Planted: in generation {generation} the scores of one completion are NaN when its tokens are drawn.",
            GRPOTrainer,
            GuardedGRPOTrainer,
            lambda trainer: blank_scores(trainer.accelerator.unwrap_model(trainer.model), generation),
        )


RECIPE = GRPORecipe()


def build_reward(tokenizer: Any) -> Callable[..., list[float]]:
    """Returns the reward of the sums for a model that may say more than a number: its last one counts."""

    def reward_sum(completions: list, completion_ids: list[list[int]], answer: list[str], **kwargs: Any) -> list[float]:
        ended = [tokenizer.eos_token_id in ids for ids in completion_ids]
        told = [(re.findall(r"\d+", arithmetic.read_answer(said)) or [""])[-1] for said in completions]
        return [arithmetic.grade(said, right, end) for said, right, end in zip(told, answer, ended, strict=True)]

    return reward_sum


def find_rewards(plan: RecipeArguments) -> list[Any]:
    """Returns the rewards that were named: a model's, TRL's own by name, or functions by where they are."""
    model = plan.script.reward_model_name_or_path  # type: ignore[attr-defined]
    names = plan.script.reward_funcs or ()  # type: ignore[attr-defined]
    return [*([model] if model else []), *(NAMED[name] if name in NAMED else _import(name) for name in names)]


def _import(name: str) -> Any:
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
            f"--reward_funcs must be {', '.join(NAMED)} or module.function that can be imported from {here}, got {name!r} "
            f"({error})."
        ) from error


def measure(trainer: Any) -> dict[str, float | str]:
    """Returns the mean reward at the beginning and at the end of a run, each over a tenth of it."""
    told = [row["reward"] for row in trainer.state.log_history if row.get("reward") is not None]
    told = [reward for reward in told if reward == reward]  # NaN: no completion of the row could be scored
    if not told:
        return {}
    num = max(len(told) // SHARE, 1)
    return {"first": sum(told[:num]) / num, "last": sum(told[-num:]) / num}
