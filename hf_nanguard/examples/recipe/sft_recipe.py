"""Supervised fine-tuning as a recipe: a model and data of the user's, or sums and a small Llama made in code."""

from collections.abc import Callable
from functools import partial
from typing import Any

from trl import ScriptArguments

from ...hf.guarded_sft import GuardedSFTConfig, GuardedSFTTrainer
from ...hf.guarded_trainer import guarded
from ..demo.small_sft import AnswerTrainer
from ..planted_failures import cut_off_answer, find_third
from ..tasks import sums as arithmetic
from .base_recipe import Failure, Recipe, find_form
from .recipe_parser import RecipeArguments, RecipeKind
from .run_and_save import is_whole
from .user_data import load_data

NUM_ROWS, NUM_ASKED = 1024, 200
COMMON = {"output_dir": "runs/sft", "dataloader_pin_memory": False, "gradient_checkpointing": False}


class SFTRecipe(Recipe):
    """`nanguard sft`."""

    kind = RecipeKind(
        name="sft",
        script=ScriptArguments,
        training=GuardedSFTConfig,
        embedded={
            **COMMON, "max_steps": 200, "learning_rate": 5e-3, "per_device_train_batch_size": 32, "max_length": 32,
            "lr_scheduler_type": "constant", "bf16": False,
        },
        task={**COMMON, "max_steps": 100},
    )  # fmt: skip
    trainer_class = GuardedSFTTrainer

    def make_model(self, seed: int, tokenizer: Any) -> Callable[[], Any]:
        return partial(arithmetic.build_model, seed)

    def make_task(self, tokenizer: Any, seed: int, plan: RecipeArguments) -> dict[str, Any]:
        return {"train_dataset": arithmetic.build_examples(NUM_ROWS, seed, form=find_form(tokenizer))}

    def load_task(self, plan: RecipeArguments) -> dict[str, Any]:
        forms = (
            [plan.training.dataset_text_field],
            ["messages"],
            ["conversations"],
            ["prompt", "completion"],
            ["input_ids"],
        )
        train, test = load_data(plan, forms)
        return {"train_dataset": train, "eval_dataset": test}

    def measure(self, trainer: Any, plan: RecipeArguments) -> dict[str, float | str]:
        """Returns the shares of sums that are answered rightly, and by a number at all."""
        if not plan.embedded_data or not is_whole(trainer):
            return {}
        model = trainer.accelerator.unwrap_model(trainer.model)
        rows = arithmetic.build_prompts(NUM_ASKED, trainer.args.seed + 1, form=find_form(trainer.processing_class))
        said = arithmetic.ask(model, trainer.processing_class, rows)
        right = sum(text == answer for text, answer in zip(said, rows["answer"], strict=True))
        return {"accuracy": right / len(said), "answer rate": sum(text.isdecimal() for text in said) / len(said)}

    def tell(self, figures: dict[str, float | str], plan: RecipeArguments) -> str:
        if not plan.embedded_data:
            return ""
        told = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
        return f"{told} on {NUM_ASKED} sums" if told else "accuracy: not measured, the model is in parts"

    def measure_planted(self, trainer: Any, plan: RecipeArguments) -> dict[str, float | str]:
        """Returns what a field report of this failure looks at: the norm in the log, and whether anything was learned."""
        norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
        last: dict[str, float | str] = {"last gradient norm": norms[-1]} if norms else {}
        return {**last, **self.measure(trainer, plan)}

    def plan_failure(self, plan: RecipeArguments) -> Failure:
        """Returns a loss that is a mean over each answer, on data in which one answer is missing."""
        args = plan.training
        batch = find_third(args.max_steps) * args.gradient_accumulation_steps
        return Failure(
            f"Planted: a sample of micro-batch {batch} was cut off before its answer. All its labels are masked, so the "
            "mean loss over its answer is 0/0.",
            AnswerTrainer,
            guarded(AnswerTrainer),
            partial(cut_off_answer, batch=batch),
        )


RECIPE = SFTRecipe()
