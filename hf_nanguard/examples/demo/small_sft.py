"""The small SFT run of `nanguard demo`: a tiny Llama, its tokenizer and its data, all built in code."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig

from ...hf.guarded_trainer import guarded
from ...hf.trainer.arguments import GuardArguments
from ..compare import format_number
from ..planted_failures import MASKED, AnswerTrainer, mean_over_answers

BATCH_SIZE = 4
LOWEST, HIGHEST = 0, 54
WORDS = ("<pad>", "<eos>", "<unk>", "count", "on", "from", *map(str, range(LOWEST, HIGHEST)))

Row = dict[str, list[int]]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a few words and numbers."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def build_rows(tokenizer: PreTrainedTokenizerFast, num_rows: int, seed: int) -> list[Row]:
    """Returns tokenized questions and answers; questions are masked. No row contains the largest number."""
    draw = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        start, length = draw.randrange(LOWEST, HIGHEST - 6), draw.randrange(2, 6)
        prompt = tokenizer.encode(f"count on from {start}")
        numbers = " ".join(map(str, range(start + 1, start + 1 + length)))
        answer = [*tokenizer.encode(numbers), tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + answer, "labels": [MASKED] * len(prompt) + answer})
    return rows


def cut_off(row: Row) -> Row:
    """Returns the row without its answer, so that all its labels are masked."""
    length = row["labels"].count(MASKED)
    return {name: values[:length] for name, values in row.items()}


def build_model(seed: int, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Returns a two-layer Llama with dropout, built from its config."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, attention_dropout=0.1,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)  # type: ignore[arg-type] # its own signature takes it


class StepReporter(TrainerCallback):
    """Counts the steps without progress of the weights, and reports every logged step.

    Args:
        report (`Callable`):
            Called with the number of steps, a short text, and whether it is the last.
        figure (`str`, *optional*, defaults to `"loss"`):
            The logged figure to report.
    """

    def __init__(self, report: Callable[[int, str, bool], None], figure: str = "loss"):
        self.report = report
        self.figure = figure
        self.num_lost = 0
        self.before = torch.empty(0)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.before = model.lm_head.weight.detach().clone()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        now = model.lm_head.weight.detach()
        self.num_lost += not bool(torch.isfinite(now).all()) or torch.equal(now, self.before)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.report(state.global_step, f"logged {self.figure} {format_number(logs.get(self.figure))}", False)


def build_trainer(
    rows: list[Row],
    seed: int,
    guard: GuardArguments | None,
    folder: Path,
    reporter: StepReporter,
    trainer_class: type = AnswerTrainer,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """Returns a trainer for one epoch over `rows` in their order.

    Args:
        rows (`list`), seed (`int`):
            The data and the seed.
        guard (`GuardArguments`, *optional*):
            The guard's settings; `None` for a stock trainer.
        folder (`Path`), reporter (`StepReporter`):
            The output folder and a callback.
        trainer_class (`type`), dtype (`torch.dtype`):
            The stock class, and the type of the weights.
        options (`Any`):
            More training arguments.
    """
    arguments = {
        "num_train_epochs": 1, "per_device_train_batch_size": BATCH_SIZE, "learning_rate": 5e-3,
        "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "max_length": None, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, "seed": seed,
        "gradient_checkpointing": False, "dataloader_pin_memory": False,
    }  # fmt: skip
    args = SFTConfig(output_dir=str(folder), **{**arguments, **options})
    parts = {
        "model": build_model(seed, dtype), "args": args, "train_dataset": datasets.Dataset.from_list(rows),
        "processing_class": build_tokenizer(), "callbacks": [reporter],
    }  # fmt: skip
    return trainer_class(**parts) if guard is None else guarded(trainer_class)(guard=guard, **parts)


@torch.no_grad()
def measure_loss(trainer: Any, seed: int) -> float:
    """Returns the loss of a trained model on rows that it was not trained on."""
    held_out = trainer.data_collator(build_rows(trainer.processing_class, 64, seed + 1))
    logits = trainer.model.eval()(held_out["input_ids"], attention_mask=held_out["attention_mask"]).logits
    return mean_over_answers(logits, held_out["labels"]).item()
