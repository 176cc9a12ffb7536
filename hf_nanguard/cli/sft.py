"""`nanguard sft`: supervised fine-tuning with the guard and the flags of TRL's script."""

from functools import partial

from .shared.recipe_command import add_recipe

EXAMPLES = """  nanguard sft
  nanguard sft --compare --max_steps 90
  nanguard sft --preset balanced --model_name_or_path my-model --dataset_name my-data --output_dir out
  nanguard sft --use_peft --lora_r 32 --model_name_or_path my-model --dataset_name my-data
  nanguard sft --config my.yaml --learning_rate 1e-5
  accelerate launch --config_file configs/accelerate/ddp.yaml recipes/sft.py --config configs/sft/balanced.yaml
"""


add_parser = partial(
    add_recipe,
    name="sft",
    summary="supervised fine-tuning with the guard; a built-in task if no model is given",
    description="Fine-tunes a model on texts, conversations or prompts with completions, with the guard. Without a model and a\n"
    "dataset, a small built-in Llama learns sums, in about a minute on a CPU and without a network; accuracy and\n"
    "answer rate are printed.",
    examples=EXAMPLES,
    common={"--max_length": ("N", "tokens per sample"), "--packing": (None, "pack several samples into a row")},
)
