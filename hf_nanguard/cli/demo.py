"""`nanguard demo`: one small SFT run, three ways: stock on healthy data, stock with one bad row, guarded with that row.

The fault is a common one. The loss is a mean over the answer of each sample, and one conversation was cut off before
its answer: all its labels are masked, so its mean is 0 / 0. A fourth run, stock and without that batch, shows that the
guarded run ended with exactly the weights it would have had if the batch had never come.
"""

from __future__ import annotations

import argparse
import errno
import logging
import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerFast

EPILOG = """example:
  nanguard demo --steps 30 --output-dir runs/demo
"""
BATCH_SIZE = 4
LOWEST, HIGHEST = 0, 54
MASKED = -100
WORDS = ("<pad>", "<eos>", "<unk>", "count", "on", "from", *map(str, range(LOWEST, HIGHEST)))

# Called with the number of steps done and the newest logged loss.
Report = Callable[[int, float], None]


@dataclass
class Outcome:
    """What one run left behind, measured from outside the trainer."""

    losses: list[float]
    num_lost: int
    bad_tensors: int
    weights: dict[str, Tensor]
    tested: float
    events: list[dict[str, Any]] = field(default_factory=list)


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="run the same small SFT stock, poisoned and guarded, and compare",
        description="Trains a tiny Llama three times on the CPU: stock on healthy data, stock with one\nbad row, and "
        "guarded with the same bad row. Takes less than a minute and downloads nothing.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output-dir", default="runs/demo", help="where the runs are put (default: %(default)s)")
    parser.add_argument(
        "--steps", type=_between(6, 10_000), default=120, help="optimizer steps a run (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=_between(0, 2**31), default=0, help="of data, weights, dropout (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def _between(lowest: int, highest: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if not (text.isascii() and text.isdigit() and lowest <= int(text) <= highest):
            raise argparse.ArgumentTypeError(f"must be an integer from {lowest} to {highest}, got {text!r}")
        return int(text)

    return integer


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo and returns the exit code."""
    folder = _make_folder(arguments.output_dir)
    try:
        import trl  # noqa: F401
    except ModuleNotFoundError as error:
        raise ArgumentError(f"nanguard demo needs {error.name}. Run pip install 'hf-nanguard[trl]'.") from error

    import torch
    from rich.console import Console

    torch.set_num_threads(1)  # the model is so small that a second thread only waits for the first
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    steps, seed = arguments.steps, arguments.seed
    bad_step = steps // 3
    bad_row = bad_step * BATCH_SIZE + 2
    tokenizer = build_tokenizer()
    healthy = build_rows(tokenizer, steps * BATCH_SIZE, seed)
    poisoned = [cut_off(row) if i == bad_row else row for i, row in enumerate(healthy)]
    without = healthy[: bad_step * BATCH_SIZE] + healthy[(bad_step + 1) * BATCH_SIZE :]
    runs = {
        "stock, healthy data": ("healthy", healthy, False),
        "stock, one bad row": ("poisoned", poisoned, False),
        "guarded, one bad row": ("guarded", poisoned, True),
        "stock, without that batch": ("without", without, False),
    }
    console.print(
        f"One of {len(poisoned)} rows is bad: row {bad_row} was cut off before its answer, so all its labels are masked and "
        f"its mean loss is 0/0.\nIt comes at step {bad_step} of {steps}.\n"
    )
    outcomes = {}
    with _quiet_hosts(console), _progress(console, steps) as begin:
        for title, (name, rows, guard) in runs.items():
            report = begin(title, len(rows) // BATCH_SIZE)
            outcomes[title] = train(rows, tokenizer, folder / name, seed, guard, report)
    show(console, outcomes, folder, steps)
    return 0


def _make_folder(output_dir: str) -> Path:
    try:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ArgumentError(
            f"--output-dir must be a folder that can be made and written, got {output_dir!r} ({error.strerror}). "
            "Choose another one."
        ) from error
    return folder


# ---- the runs ----


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of a few words and numbers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def build_rows(tokenizer: PreTrainedTokenizerFast, num_rows: int, seed: int) -> list[dict[str, list[int]]]:
    """Returns tokenised questions and answers; only the answer is to be learned."""
    draw = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        start, length = draw.randrange(LOWEST, HIGHEST - 6), draw.randrange(2, 6)
        prompt = tokenizer.encode(f"count on from {start}")
        numbers = " ".join(map(str, range(start + 1, start + 1 + length)))
        answer = [*tokenizer.encode(numbers), tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + answer, "labels": [MASKED] * len(prompt) + answer})
    return rows


def cut_off(row: dict[str, list[int]]) -> dict[str, list[int]]:
    """Returns the row without its answer: no label is left in it."""
    length = row["labels"].count(MASKED)
    return {name: values[:length] for name, values in row.items()}


def build_model(seed: int) -> nn.Module:
    """Returns a two-layer Llama with dropout, built from its config."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, attention_dropout=0.1,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mean_over_answers(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean over samples of each sample's masked mean token loss. For a sample without labels it is 0 / 0."""
    targets = labels[:, 1:]
    mask = targets != MASKED
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -((log_probs * mask).sum(1) / mask.sum(1)).mean()


def train(
    rows: list[dict[str, list[int]]],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    seed: int,
    guard: bool,
    report: Report,
) -> Outcome:
    """Trains once over `rows` in their order and measures what came out."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from ..core.finite import find_nonfinite
    from ..hf.trainer import guarded
    from ..report.jsonl import events_path, read_jsonl

    class AnswerTrainer(SFTTrainer):
        """A trainer as people write them: SFT with a loss of one's own."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            loss = mean_over_answers(outputs.logits, inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    class Watch(TrainerCallback):
        """Counts the steps that did not bring the weights forward, and reports progress."""

        def __init__(self):
            self.num_lost = 0
            self.before = torch.empty(0)

        def on_step_begin(self, args, state, control, model=None, **kwargs):
            self.before = model.lm_head.weight.detach().clone()

        def on_step_end(self, args, state, control, model=None, **kwargs):
            now = model.lm_head.weight.detach()
            self.num_lost += not bool(torch.isfinite(now).all()) or torch.equal(now, self.before)

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                report(state.global_step, logs["loss"])

    args = SFTConfig(
        output_dir=str(folder), num_train_epochs=1, per_device_train_batch_size=BATCH_SIZE, learning_rate=5e-3,
        lr_scheduler_type="constant", train_sampling_strategy="sequential", max_length=None, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, bf16=False, seed=seed,
        gradient_checkpointing=False, dataloader_pin_memory=False,
    )  # fmt: skip
    watch = Watch()
    trainer_class = guarded(AnswerTrainer) if guard else AnswerTrainer
    model = build_model(seed)
    trainer = trainer_class(
        model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[watch]
    )
    trainer.remove_callback(PrinterCallback)
    events_file = events_path(folder / "nanguard", 0)
    num_old = len(list(read_jsonl(events_file))) if events_file.is_file() else 0
    trainer.train()
    events = list(read_jsonl(events_file))[num_old:] if events_file.is_file() else []
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    held_out = trainer.data_collator(build_rows(tokenizer, 64, seed + 1))
    with torch.no_grad():
        logits = model.eval()(input_ids=held_out["input_ids"], attention_mask=held_out["attention_mask"]).logits
        tested = mean_over_answers(logits, held_out["labels"]).item()
    return Outcome(losses, watch.num_lost, len(find_nonfinite(weights.items())), weights, tested, events)


# ---- what is shown ----


@contextmanager
def _quiet_hosts(console: Console) -> Iterator[None]:
    """Leaves the screen to the demo: no host banners, and what the guard says in the demo's own console."""
    import datasets
    import transformers
    from rich.logging import RichHandler

    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    handler = RichHandler(console=console, show_time=False, show_path=False, highlighter=None)
    guard_logger = logging.getLogger("hf_nanguard")
    guard_logger.addHandler(handler)
    propagate, guard_logger.propagate = guard_logger.propagate, False
    try:
        yield
    finally:
        guard_logger.removeHandler(handler)
        guard_logger.propagate = propagate


@contextmanager
def _progress(console: Console, steps: int) -> Iterator[Callable[[str, int], Report]]:
    """Yields a function that begins a run and returns its reporter: a live bar on a terminal, plain lines elsewhere."""
    if not console.is_terminal:

        def begin_plain(title: str, total: int) -> Report:
            def report(step: int, loss: float) -> None:
                if step % max(steps // 3, 1) == 0 or step == total:
                    console.print(f"{title:<26} step {step:>4}/{total}  logged loss {_number(loss)}", highlight=False)

            return report

        yield begin_plain
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description:<26}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console) as progress:

        def begin_live(title: str, total: int) -> Report:
            task = progress.add_task(title, total=total, loss="")
            return lambda step, loss: progress.update(task, completed=step, loss=f"logged loss {_number(loss)}")

        yield begin_live


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) and value else str(value)


def _look(losses: list[float]) -> str:
    return " ".join([*map(_number, losses[:2]), "...", *map(_number, losses[-3:])])


def _blame(outcome: Outcome) -> str:
    if not outcome.events:
        return "nothing"
    event = outcome.events[0]
    rows = ", ".join(map(str, (event["culprit"] or {}).get("rows") or ["not known"]))
    return f"{event['signal']}, {event['action']}: {event['message']}; dataset rows {rows}"


def show(console: Console, outcomes: dict[str, Outcome], folder: Path, steps: int) -> None:
    """Prints the comparison."""
    import torch
    from rich.markup import escape
    from rich.table import Table

    *compared, control = outcomes
    table = Table(title="one bad row, three runs", show_lines=True)
    table.add_column("")
    for title in compared:
        table.add_column(title)
    shown = [outcomes[title] for title in compared]
    questions: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
        ("weights finite?", lambda o: f"NO: {o.bad_tensors} of {len(o.weights)} bad" if o.bad_tensors else "yes"),
        ("steps lost", lambda o: f"{o.num_lost} of {steps}"),
        ("logged losses", lambda o: _look(o.losses)),
        ("final loss, held-out", lambda o: _number(o.tested)),
        ("what was blamed", _blame),
    )
    for question, answer in questions:
        table.add_row(question, *(escape(answer(outcome)) for outcome in shown))
    console.print()
    console.print(table)
    guarded_run = outcomes[compared[-1]]
    same = [torch.equal(guarded_run.weights[name], tensor) for name, tensor in outcomes[control].weights.items()]
    console.print(
        f"The guarded run against a stock run that never saw that batch: {sum(same)} of {len(same)} weight tensors are "
        f"bit-identical.\nIts events: {escape(str(folder / 'guarded' / 'nanguard' / 'events.jsonl'))}",
        highlight=False,
        soft_wrap=True,
    )
