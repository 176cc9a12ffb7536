"""Supervised fine-tuning as a recipe: a model and data of the user's, or sums and a small Llama made in code."""

from collections.abc import Sequence
from typing import Any

from trl import ScriptArguments

from .. import arithmetic
from ..comparison import compare_runs
from ..sft import GuardedSFTConfig, GuardedSFTTrainer
from ..showcase import AnswerTrainer
from ..trainer import guarded
from .dialect import Kind, Plan, parse
from .ending import build, is_whole, say_notes, train_and_save
from .plant import cut_off_answer
from .source import check_model, check_output, load_data, load_tokenizer, name_parts, set_model_options

NUM_ROWS, NUM_ASKED = 1024, 200
COMMON = {"output_dir": "runs/sft", "dataloader_pin_memory": False, "gradient_checkpointing": False}
KIND = Kind(
    name="sft",
    script=ScriptArguments,
    training=GuardedSFTConfig,
    embedded={
        **COMMON, "max_steps": 200, "learning_rate": 5e-3, "per_device_train_batch_size": 32, "max_length": 32,
        "lr_scheduler_type": "constant", "bf16": False,
    },
    task={**COMMON, "max_steps": 100},
)  # fmt: skip


def run(words: Sequence[str]) -> int:
    """Runs the recipe with the words of a command line and returns the exit code."""
    plan = parse(words, KIND)
    check_output(plan)
    parts = gather_parts(plan)
    if plan.recipe.compare:
        return compare(plan, parts)
    trainer = build(GuardedSFTTrainer, args=plan.training, **fresh(parts))
    say_notes(plan, trainer)
    train_and_save(trainer, plan)
    if plan.embedded_data:
        figures = measure(trainer)
        told = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
        trainer.accelerator.print(
            f"{told} on {NUM_ASKED} sums" if told else "accuracy: not measured, the model is in parts"
        )
    trainer.end()
    return 0


def gather_parts(plan: Plan) -> dict[str, Any]:
    """Returns what a trainer is built from: functions are called for each trainer anew."""
    seed = plan.training.seed
    if plan.embedded_model:
        tokenizer = arithmetic.build_tokenizer()
        parts = {**name_parts(plan), "model": lambda: arithmetic.build_model(seed), "processing_class": tokenizer}
        return {**parts, "train_dataset": arithmetic.build_examples(NUM_ROWS, seed)}
    check_model(plan)
    set_model_options(plan)
    parts = name_parts(plan)
    if plan.embedded_data:
        tokenizer = load_tokenizer(plan)
        return {
            **parts, "processing_class": tokenizer,
            "train_dataset": arithmetic.build_examples(NUM_ROWS, seed, form=find_form(tokenizer)),
        }  # fmt: skip
    forms = (
        [plan.training.dataset_text_field],
        ["messages"],
        ["conversations"],
        ["prompt", "completion"],
        ["input_ids"],
    )
    train, test = load_data(plan, forms)
    return {**parts, "train_dataset": train, "eval_dataset": test}


def fresh(parts: dict[str, Any]) -> dict[str, Any]:
    """Returns the parts with a new model."""
    return {**parts, "model": parts["model"]() if callable(parts["model"]) else parts["model"]}


def find_form(tokenizer: Any) -> str:
    """Returns how to ask a model: as a user, if it knows such."""
    return "conversational" if tokenizer.chat_template else "plain"


def measure(trainer: Any) -> dict[str, float | str]:
    """Returns the shares of sums that are answered rightly, and by a number at all."""
    if not is_whole(trainer):
        return {}
    model = trainer.accelerator.unwrap_model(trainer.model)
    form = (
        "plain" if len(trainer.processing_class) == len(arithmetic.VOCABULARY) else find_form(trainer.processing_class)
    )
    rows = arithmetic.build_prompts(NUM_ASKED, trainer.args.seed + 1, form=form)
    said = arithmetic.ask(model, trainer.processing_class, rows)
    right = sum(text == answer for text, answer in zip(said, rows["answer"], strict=True))
    return {"accuracy": right / len(said), "answer rate": sum(text.isdecimal() for text in said) / len(said)}


def measure_all(trainer: Any, plan: Plan) -> dict[str, float | str]:
    """Returns what a field report of this failure looks at: the norm in the log, and whether anything was learned."""
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    last: dict[str, float | str] = {"last gradient norm": norms[-1]} if norms else {}
    return {**last, **(measure(trainer) if plan.embedded_data else {})}


def compare(plan: Plan, parts: dict[str, Any]) -> int:
    """Runs stock and guarded with a loss that is a mean over each answer, on data in which one answer is missing."""
    args = plan.training
    batch = max(args.max_steps // 3, 1) * args.gradient_accumulation_steps if args.max_steps > 0 else 2

    def build_trainer(mine: Any, guard: bool) -> Any:
        trainer = build(guarded(AnswerTrainer) if guard else AnswerTrainer, args=mine, **fresh(parts))
        cut_off_answer(trainer, batch)
        return trainer

    planted = (
        f"Planted: a sample of micro-batch {batch} was cut off before its answer. All its labels are masked, so the mean "
        "loss over its answer is 0/0."
    )
    outcomes = compare_runs(build_trainer, args, planted, lambda trainer: measure_all(trainer, plan))
    return 0 if outcomes[-1].is_sound else 1
