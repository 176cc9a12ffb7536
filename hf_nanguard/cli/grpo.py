"""`nanguard grpo`: reinforcement learning (GRPO) with the guard and the flags of TRL's script."""

from functools import partial

from .shared.recipe_command import add_recipe

EXAMPLES = """  nanguard grpo
  nanguard grpo --compare --max_steps 30
  nanguard grpo --preset balanced --model_name_or_path my-model --dataset_name my-prompts --reward_funcs my_module.score
  nanguard grpo --use_peft --model_name_or_path my-model --dataset_name my-prompts --reward_funcs think_format_reward
  accelerate launch --config_file configs/accelerate/ddp.yaml recipes/grpo.py --config configs/grpo/balanced.yaml
"""


add_parser = partial(
    add_recipe,
    name="grpo",
    summary="reinforcement learning (GRPO) with the guard; a built-in task if no model is given",
    description="Trains a model with rewards and the guard. Without a model and a dataset, a small built-in Llama learns sums,\n"
    "in about a minute on a CPU and without a network; the mean reward of the first and of the last steps is\n"
    "printed.",
    examples=EXAMPLES,
    common={
        "--reward_funcs": ("NAME", "reward functions of TRL by name, or your module.function"),
        "--reward_model_name_or_path": ("NAME", "reward model"),
        "--num_generations": ("N", "completions per prompt"),
        "--max_completion_length": ("N", "largest number of tokens per completion"),
        "--temperature": ("X", "sampling temperature"),
    },
)
