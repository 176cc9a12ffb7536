"""Supervised fine-tuning with the guard: the user's model and data, or a small Llama that learns sums.

    python recipes/sft.py
    python recipes/sft.py --compare
    accelerate launch recipes/sft.py --config configs/sft/balanced.yaml
    accelerate launch --config_file configs/accelerate/ddp.yaml recipes/sft.py --preset balanced

`nanguard sft` runs this file; `--help` lists the arguments.
"""

import sys
from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase, Trainer
from trl import ScriptArguments

from hf_nanguard import GuardedSFTConfig, GuardedSFTTrainer
from hf_nanguard.cli.main import main as nanguard
from hf_nanguard.examples.compare import Figures, Options
from hf_nanguard.examples.planted_failures import AnswerTrainer, CutOffAnswer, find_third
from hf_nanguard.examples.recipe.recipe_parser import RecipeArguments, RecipeKind, parse
from hf_nanguard.examples.recipe.run_and_save import build, compare, print_result, train_and_save
from hf_nanguard.examples.recipe.user_data import load_data, load_model
from hf_nanguard.examples.tasks import sums

NUM_ROWS, NUM_ASKED = 1024, 200
COMMON = {"output_dir": "runs/sft", "dataloader_pin_memory": False, "gradient_checkpointing": False}
KIND = RecipeKind(
    name="sft",
    script=ScriptArguments,
    training=GuardedSFTConfig,
    trainer=GuardedSFTTrainer,
    embedded={
        **COMMON, "max_steps": 200, "learning_rate": 5e-3, "per_device_train_batch_size": 32, "max_length": 32,
        "lr_scheduler_type": "constant", "bf16": False,
    },
    task={**COMMON, "max_steps": 100},
)  # fmt: skip


def gather_data(arguments: RecipeArguments, tokenizer: PreTrainedTokenizerBase | None) -> Options:
    """Returns the sums in the form of a tokenizer, or the data that the user named."""
    args = arguments.training
    if arguments.embedded_data:
        return {"train_dataset": sums.build_examples(NUM_ROWS, args.seed, form=sums.find_form(tokenizer))}
    text = args.dataset_text_field
    return load_data(arguments, ([text], ["messages"], ["conversations"], ["prompt", "completion"], ["input_ids"]))


def gather_parts(arguments: RecipeArguments) -> Options:
    """Returns model and data, as arguments of a trainer."""
    parts = load_model(arguments, sums.build_model)
    return {**parts, **gather_data(arguments, parts.get("processing_class"))}


def measure(trainer: Trainer, arguments: RecipeArguments) -> Figures:
    """Returns the share of sums answered correctly, and the share answered by a number at all; with `--compare` also the
    last logged gradient norm."""
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    last: Figures = {"last gradient norm": norms[-1]} if norms and arguments.flags.compare else {}
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if not arguments.embedded_data or is_sharded:
        return last
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    rows = sums.build_prompts(NUM_ASKED, trainer.args.seed + 1, form=sums.find_form(tokenizer))
    answers = sums.ask(model, tokenizer, rows)
    num_right = sum(answer == right for answer, right in zip(answers, rows["answer"], strict=True))
    num_numbers = sum(answer.isdecimal() for answer in answers)
    return {**last, "accuracy": num_right / NUM_ASKED, "answer rate": num_numbers / NUM_ASKED}


def main(words: Sequence[str]) -> int:
    """Runs the recipe with the words of a command line and returns the exit code."""
    arguments = parse(words, KIND)
    args = arguments.training
    with print_result(arguments) as result:
        parts = gather_parts(arguments)
        if arguments.flags.compare:
            batch = find_third(args.max_steps) * args.gradient_accumulation_steps

            def plant(trainer: Trainer) -> None:
                trainer.data_collator = CutOffAnswer(trainer.data_collator, batch)

            sentence = (
                f"Planted: one sample of micro-batch {batch} was cut off before its answer. All its labels are masked, so "
                "the mean loss over its answer is 0/0."
            )
            result |= compare(AnswerTrainer, parts, arguments, plant, sentence, partial(measure, arguments=arguments))
        else:
            trainer = build(GuardedSFTTrainer, args=args, **parts)
            result |= train_and_save(trainer, arguments, partial(measure, arguments=arguments))
            if result["is_sound"] and arguments.embedded_data:
                text = ", ".join(f"{name} {value:.2f}" for name, value in result["figures"].items())
                sharded = "accuracy: not measured because the model is sharded"
                trainer.accelerator.print(f"{text} on {NUM_ASKED} sums" if text else sharded)
            trainer.accelerator.end_training()  # ranks that leave a group open may be aborted at their exit
    return 0 if result["is_sound"] else 1


if __name__ == "__main__":
    sys.exit(nanguard(["sft", *sys.argv[1:]]))  # which has a short help and calls `main`
