"""The small SFT run that `nanguard demo` shows: a tiny Llama, a tokenizer and data made in code, one row of it bad.

The fault is a common one. The loss is a mean over the answer of each sample, and one conversation was cut off before
its answer: all its labels are masked, so its mean is 0 / 0.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from ...hf.guarded_trainer import guarded
from ...hf.trainer.arguments import GuardArguments

BATCH_SIZE = 4
LOWEST, HIGHEST = 0, 54
MASKED = -100
WORDS = ("<pad>", "<eos>", "<unk>", "count", "on", "from", *map(str, range(LOWEST, HIGHEST)))

Row = dict[str, list[int]]
# Called with the number of steps done, a few words about them, and whether these are the last.
Report = Callable[[int, str, bool], None]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of a few words and numbers."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def build_rows(tokenizer: PreTrainedTokenizerFast, num_rows: int, seed: int) -> list[Row]:
    """Returns tokenised questions and answers; only the answer is to be learned. The largest number is in none."""
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
    """Returns the row without its answer: no label is left in it."""
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


def mean_over_answers(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean over samples of each sample's masked mean token loss. For a sample without labels it is 0 / 0."""
    targets = labels[:, 1:]
    mask = targets != MASKED
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -((log_probs * mask).sum(1) / mask.sum(1)).mean()


class AnswerTrainer(SFTTrainer):
    """A trainer as people write them: SFT with a loss of one's own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = mean_over_answers(outputs.logits, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class Watch(TrainerCallback):
    """Counts the steps that did not bring the weights forward, and reports progress.

    Args:
        report (`Callable`):
            Called after every step.
        figure (`str`, *optional*, defaults to `"loss"`):
            What to report, of what is logged.
    """

    def __init__(self, report: Report, figure: str = "loss"):
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
            self.report(state.global_step, f"logged {self.figure} {show(logs.get(self.figure))}", False)


def show(value: Any) -> str:
    """Returns a figure in two digits."""
    return f"{value:.2f}" if isinstance(value, float) and value - value == 0.0 and value else str(value)


def build_trainer(
    rows: list[Row],
    folder: Path,
    seed: int,
    guard: GuardArguments | None,
    watch: Watch,
    trainer_class: type = AnswerTrainer,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """Returns a trainer that goes once over `rows` in their order.

    Args:
        rows (`list`):
            The data.
        folder (`Path`), seed (`int`), dtype (`torch.dtype`):
            Where to, of what, and in which type.
        guard (`GuardArguments`, *optional*):
            The guard's settings; a stock trainer without.
        watch (`Watch`):
            Sees every step.
        trainer_class (`type`):
            The stock class.
        options (`Any`):
            More arguments of the training.
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
        "processing_class": build_tokenizer(), "callbacks": [watch],
    }  # fmt: skip
    return trainer_class(**parts) if guard is None else guarded(trainer_class)(guard=guard, **parts)


@torch.no_grad()
def measure_loss(trainer: Any, seed: int) -> float:
    """Returns the loss of a trained model on rows that it has not seen."""
    held_out = trainer.data_collator(build_rows(trainer.processing_class, 64, seed + 1))
    logits = trainer.model.eval()(held_out["input_ids"], attention_mask=held_out["attention_mask"]).logits
    return mean_over_answers(logits, held_out["labels"]).item()


@contextmanager
def quiet_hosts() -> Iterator[None]:
    """Keeps banners and progress bars of the host libraries off the screen."""
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    bars, shards = datasets.is_progress_bar_enabled(), transformers.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()
        if shards:
            transformers.utils.logging.enable_progress_bar()
