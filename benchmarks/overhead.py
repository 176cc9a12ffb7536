"""What the guard costs on a healthy run: host reads, operations and time, stock against guarded in one process.

    python benchmarks/overhead.py --size 2m --steps 30

Times on a shared machine are noise; the share of the step that is spent in guard code is the figure to look at.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hf_nanguard import GuardedTrainer
from hf_nanguard.core.rerun.runner import Runner
from hf_nanguard.core.step.guard import Guard
from hf_nanguard.hf.data.checked_collator import CheckedCollator
from hf_nanguard.hf.trainer.trainer_guard import TrainerGuard
from hf_nanguard.testing import OperationCounter

SIZES = {"2m": (128, 4, 4096), "27m": (512, 8, 8192)}


class Rows(torch.utils.data.Dataset):
    """Random tokens."""

    def __init__(self, size: int, length: int, vocab: int):
        self.tokens = torch.randint(0, vocab, (size, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class StepTimes(TrainerCallback):
    """Wall time of each step."""

    def __init__(self):
        self.times: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(time.perf_counter() - self.began)


@contextmanager
def timed(spent: Counter, *methods: tuple[type, str, str]):
    """Adds up the time inside methods; `inner` ones are the host's own work and are taken off again."""
    originals = [(cls, name, cls.__dict__[name]) for cls, name, _ in methods]
    for cls, name, kind in methods:
        original = cls.__dict__[name]

        def method(self, *args, _original=original, _kind=kind, **kwargs):
            began = time.perf_counter()
            try:
                return _original(self, *args, **kwargs)
            finally:
                spent[_kind] += time.perf_counter() - began

        setattr(cls, name, method)
    try:
        yield
    finally:
        for cls, name, original in originals:
            setattr(cls, name, original)


def build(cls: type, size: str, steps: int, accumulation: int) -> tuple[Trainer, StepTimes]:
    """Builds a trainer on a Llama of the given size."""
    hidden, layers, vocab = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=256,
    )  # fmt: skip
    args = TrainingArguments(
        tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=accumulation,
        report_to=[], save_strategy="no", logging_steps=1000, disable_tqdm=True, use_cpu=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    times = StepTimes()
    return cls(LlamaForCausalLM(config), args, train_dataset=Rows(512, 64, vocab), callbacks=[times]), times


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="2m", help="parameters of the Llama (default: 2m)")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps to time (default: 30)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches a step (default: 1)")
    options = parser.parse_args()

    counts = {}
    for name, cls in (("stock", Trainer), ("guarded", GuardedTrainer)):
        for steps in (3, 5):
            trainer, _ = build(cls, options.size, steps, options.accumulation)
            with OperationCounter() as count:
                trainer.train()
            counts[name, steps] = (count.num_reads, count.num_ops)
    for name in ("stock", "guarded"):
        reads, ops = ((counts[name, 5][i] - counts[name, 3][i]) / 2 for i in (0, 1))
        print(f"{name:8} host reads a step {reads:6.1f}   operations a step {ops:8.1f}")

    spent: Counter = Counter()
    trainer, times = build(GuardedTrainer, options.size, options.steps, options.accumulation)
    methods = [
        (CheckedCollator, "__call__", "guard"), (TrainerGuard, "begin_group", "guard"), (TrainerGuard, "hold_inputs", "guard"),
        (TrainerGuard, "_open_group", "guard"), (Guard, "settle", "guard"), (Runner, "measure", "host"),
    ]  # fmt: skip
    with timed(spent, *methods):
        trainer.train()
    step = sum(times.times)
    print(
        f"guard code {100 * (spent['guard'] - spent['host']) / step:.2f} % of the step ({1000 * step / options.steps:.1f} ms)"
    )


if __name__ == "__main__":
    main()
