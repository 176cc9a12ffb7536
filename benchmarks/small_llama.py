"""The model and the trainer runs that several benchmarks share."""

import io
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.result_tables import find_spread, publish
from hf_nanguard.testing import OperationCounter

SIZES = {"tiny": (16, 2, 64), "2m": (128, 4, 4096), "27m": (512, 8, 8192)}  # hidden size, layers, vocabulary


def build_llama(size: str) -> LlamaForCausalLM:
    """Builds a Llama of about that many parameters, always with the same weights."""
    hidden, layers, vocab = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def build_trainer(cls: type, size: str, steps: int, accumulation: int = 1, **parts: Any) -> Trainer:
    """Builds a trainer of random tokens for a few steps."""
    tokens = torch.randint(0, SIZES[size][2], (512, 64), generator=torch.Generator().manual_seed(0))
    args = TrainingArguments(
        tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=accumulation,
        report_to=[], save_strategy="no", logging_steps=1000, disable_tqdm=True, use_cpu=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    return cls(build_llama(size), args, train_dataset=[{"input_ids": row, "labels": row} for row in tokens], **parts)


class StepTimes(TrainerCallback):
    """Wall times of the steps."""

    def __init__(self):
        self.times: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(time.perf_counter() - self.began)


@dataclass
class StepCost:
    """Wall time of the fastest step, the median beside it, and host reads and operations of a step."""

    seconds: float
    spread: float
    reads: float
    ops: float


def measure_steps(contenders: dict[str, Callable[[int], Trainer]], steps: int, rounds: int) -> dict[str, StepCost]:
    """Measures healthy steps of several trainers.

    Times on a shared machine are noise, so the contenders take turns and the fastest step of each counts.

    Args:
        contenders (`dict[str, Callable]`):
            Functions that build a trainer for a number of steps.
        steps (`int`):
            Steps of a timed run.
        rounds (`int`):
            Timed runs of each contender.

    Returns:
        `dict[str, StepCost]`: The cost of a step of each contender.
    """
    timed = {name: StepTimes() for name in contenders}
    for _ in range(rounds):
        for name, build in contenders.items():
            trainer = build(steps)
            trainer.add_callback(timed[name])
            train_quietly(trainer)
    costs = {}
    for name, build in contenders.items():
        times = timed[name].times
        costs[name] = StepCost(min(times), find_spread(times), *count_step(build(5)))
    return costs


def train_quietly(trainer: Trainer) -> None:
    """Trains without what the trainer prints."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        trainer.train()


class CountedSteps(TrainerCallback):
    """Counts the third and the fourth step of a run, after whatever happens only once."""

    def __init__(self):
        self.counter = OperationCounter()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.counter.__enter__()
        if state.global_step == 4:
            self.counter.__exit__(None, None, None)


def count_step(trainer: Trainer) -> tuple[float, float]:
    """Returns host reads and operations of a step of a trainer that runs for more than four steps."""
    counted = CountedSteps()
    trainer.add_callback(counted)
    train_quietly(trainer)
    return counted.counter.num_reads / 2, counted.counter.num_ops / 2


def print_costs(costs: dict[str, StepCost], method: str, file: Path | None) -> None:
    """Prints a table and publishes it; reads and operations are what they exceed those of the first row by."""
    stock = next(iter(costs.values()))
    print(f"{'step':18} {'ms':>9} {'x stock':>8} {'spread':>7} {'reads':>6} {'operations':>11}")
    rows = []
    for name, cost in costs.items():
        times = f"{1000 * cost.seconds:9.2f} {cost.seconds / stock.seconds:8.3f} {cost.spread:7.2f}"
        print(f"{name:18} {times} {cost.reads - stock.reads:+6.1f} {cost.ops - stock.ops:+11.1f}")
        rows.append(
            {
                "step": name,
                "time, x stock": f"{cost.seconds / stock.seconds:.2f}",
                "median / fastest": f"{cost.spread:.2f}",
                "host reads": f"{cost.reads - stock.reads:+.0f}",
                "operations": f"{cost.ops - stock.ops:+.0f}",
            }
        )
    publish(
        f"{method}; the contenders take turns, the fastest step of each counts; reads and operations are counted",
        rows,
        file,
    )
