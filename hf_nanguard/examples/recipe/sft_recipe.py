"""Supervised fine-tuning as a recipe: the user's model and data, or a small Llama that learns sums."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from trl import ScriptArguments

from ...hf.guarded_sft import GuardedSFTConfig, GuardedSFTTrainer
from ..compare import Figures, Options
from ..planted_failures import AnswerTrainer, CutOffAnswer, find_third
from ..tasks import sums
from .base_recipe import Failure, Recipe, find_form
from .recipe_parser import RecipeArguments, RecipeKind
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

    def build_model(self, seed: int) -> PreTrainedModel:
        return sums.build_model(seed)

    def build_task(self, tokenizer: PreTrainedTokenizerBase, arguments: RecipeArguments) -> Options:
        seed = arguments.training.seed
        return {"train_dataset": sums.build_examples(NUM_ROWS, seed, form=find_form(tokenizer))}

    def load_task(self, arguments: RecipeArguments) -> Options:
        text = arguments.training.dataset_text_field
        forms = ([text], ["messages"], ["conversations"], ["prompt", "completion"], ["input_ids"])
        train, test = load_data(arguments, forms)
        return {"train_dataset": train, "eval_dataset": test}

    def measure(self, trainer: Trainer, arguments: RecipeArguments) -> Figures:
        """Returns the share of sums answered correctly, and the share answered by a number at all; with `--compare` also
        the last logged gradient norm."""
        norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
        last: Figures = {"last gradient norm": norms[-1]} if norms and arguments.flags.compare else {}
        is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        if not arguments.embedded_data or is_sharded:
            return last
        model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
        assert isinstance(tokenizer, PreTrainedTokenizerBase)
        rows = sums.build_prompts(NUM_ASKED, trainer.args.seed + 1, form=find_form(tokenizer))
        answers = sums.ask(model, tokenizer, rows)
        num_right = sum(answer == right for answer, right in zip(answers, rows["answer"], strict=True))
        num_numbers = sum(answer.isdecimal() for answer in answers)
        return {**last, "accuracy": num_right / NUM_ASKED, "answer rate": num_numbers / NUM_ASKED}

    def format_figures(self, figures: Figures, arguments: RecipeArguments) -> str:
        if not arguments.embedded_data:
            return ""
        text = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
        return f"{text} on {NUM_ASKED} sums" if text else "accuracy: not measured because the model is sharded"

    def find_failure(self, arguments: RecipeArguments) -> Failure:
        """Returns a loss that is a mean over each answer, on data in which one answer is missing."""
        args = arguments.training
        batch = find_third(args.max_steps) * args.gradient_accumulation_steps

        def plant(trainer: Trainer) -> None:
            trainer.data_collator = CutOffAnswer(trainer.data_collator, batch)

        return Failure(
            f"Planted: one sample of micro-batch {batch} was cut off before its answer. All its labels are masked, so the "
            "mean loss over its answer is 0/0.",
            AnswerTrainer,
            plant,
        )


RECIPE = SFTRecipe()
