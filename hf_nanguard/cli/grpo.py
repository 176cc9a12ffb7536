"""`nanguard grpo`: reinforcement learning with GRPO under guard, in the dialect of TRL's script."""

from typing import Any

from .recipe_command import add_recipe, run, split

__all__ = ["add_parser", "run", "split"]

EXAMPLES = """  nanguard grpo
  nanguard grpo --compare --max_steps 30
  nanguard grpo --preset balanced --model_name_or_path my-model --dataset_name my-prompts --reward_funcs my_module.score
  nanguard grpo --use_peft --model_name_or_path my-model --dataset_name my-prompts --reward_funcs think_format_reward
  accelerate launch --config_file configs/accelerate/ddp.yaml recipes/grpo.py --config configs/grpo/balanced.yaml
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    add_recipe(
        subparsers,
        "grpo",
        "reinforcement learning (GRPO) under guard; an embedded task if no model is given",
        "Trains a model by rewards, under guard. Without a model and a dataset a small Llama made in code, which has seen a\n"
        "few sums, learns to add, in about a minute on a CPU and without a network; the mean reward of the first and the\n"
        "last steps is printed.",
        EXAMPLES,
        {
            "--reward_funcs": ("NAME", "TRL's own by name, or module.function of yours"),
            "--reward_model_name_or_path": ("NAME", "a model that scores"),
            "--num_generations": ("N", "completions of a prompt"),
            "--max_completion_length": ("N", "tokens of a completion"),
            "--temperature": ("X", "of sampling"),
        },
    )
