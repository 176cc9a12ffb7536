"""What a step costs at which activations are looked at, beside the stock step, in one process.

    python benchmarks/activation.py --size 2m --steps 20

Times on a shared machine are noise, so steps of the contenders take turns and the fastest of each is shown.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hf_nanguard.core.activation import ActivationMonitor
from hf_nanguard.core.agreement import Ranks
from hf_nanguard.core.journal import Journal
from tests.counting import counting

SIZES = {"2m": (128, 4, 4096), "27m": (512, 8, 8192)}


class Loop:
    """A model, its optimizer and, unless `every_n_steps` is 0, a monitor."""

    def __init__(self, size: str, every_n_steps: int, modules: str | None = None):
        hidden, layers, vocab = SIZES[size]
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
            num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=256,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(0, vocab, (4, 64))
        ranks = Ranks(alone=True)
        self.monitor = ActivationMonitor(self.model, Journal(ranks), ranks, every_n_steps, modules, early=())

    def step(self, number: int) -> None:
        """Takes one step."""
        self.monitor.begin_step(number)
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        self.monitor.end_backward(number)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="2m", help="parameters of the Llama (default: 2m)")
    parser.add_argument("--steps", type=int, default=20, help="turns of each contender (default: 20)")
    options = parser.parse_args()
    far = 10**9
    loops = {
        "stock": Loop(options.size, 0),
        "not looked at": Loop(options.size, far),
        "blocks and ends": Loop(options.size, 1),
        "every module": Loop(options.size, 1, "*"),
    }
    best = dict.fromkeys(loops, float("inf"))
    for number in range(options.steps):
        for name, loop in loops.items():
            began = time.perf_counter()
            loop.step(number)
            best[name] = min(best[name], time.perf_counter() - began)
    counts = {}
    for name, loop in loops.items():
        with counting() as count:
            loop.step(options.steps)
        counts[name] = (count.reads, count.num_ops)
    print(f"{'step':16} {'outputs':>8} {'ms':>9} {'x stock':>8} {'reads':>6} {'operations':>11}")
    for name, loop in loops.items():
        reads, ops = (mine - stock for mine, stock in zip(counts[name], counts["stock"], strict=True))
        print(
            f"{name:16} {len(loop.monitor.seen):8} {1000 * best[name]:9.2f} {best[name] / best['stock']:8.3f} "
            f"{reads:+6} {ops:+11}"
        )


if __name__ == "__main__":
    main()
