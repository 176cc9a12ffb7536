"""What a step costs at which monitors look, beside the stock step, in one process.

    python benchmarks/monitor.py --size 2m --steps 20

Times on a shared machine are noise, so steps of the contenders take turns and the fastest of each is shown.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hf_nanguard.core.journal import Journal
from hf_nanguard.core.monitors.activations import ActivationMonitor
from hf_nanguard.core.monitors.monitor_set import MonitorSet
from hf_nanguard.core.monitors.weight_updates import MovementMonitor
from hf_nanguard.core.monitors.weights import SoundnessMonitor
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.hf.monitors.attention_monitor import AttentionMonitor
from hf_nanguard.testing import OperationCounter

SIZES = {"2m": (128, 4, 4096), "27m": (512, 8, 8192)}
FAR = 10**9


class Loop:
    """A model, its optimizer and some monitors."""

    def __init__(self, size: str, *kinds: str, every_n_steps: int = 1):
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
        journal = Journal(ranks)
        state = (self.model, self.optimizer, journal, ranks, every_n_steps)
        build = {
            "blocks": lambda: ActivationMonitor(self.model, journal, ranks, every_n_steps),
            "modules": lambda: ActivationMonitor(self.model, journal, ranks, every_n_steps, "*"),
            "attention": lambda: AttentionMonitor(self.model, journal, ranks, every_n_steps),
            "weights": lambda: SoundnessMonitor(*state),
            "movement": lambda: MovementMonitor(*state),
        }
        self.monitor_set = MonitorSet(tuple(build[kind]() for kind in kinds))
        for monitor in self.monitor_set.monitors:
            monitor.early = ()

    def step(self, number: int) -> None:
        """Takes one step."""
        self.monitor_set.begin_step(number)
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        self.monitor_set.end_backward()
        self.monitor_set.before_update()
        self.optimizer.step()
        self.monitor_set.after_update()
        self.optimizer.zero_grad()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="2m", help="parameters of the Llama (default: 2m)")
    parser.add_argument("--steps", type=int, default=20, help="turns of each contender (default: 20)")
    options = parser.parse_args()
    every = ("blocks", "attention", "weights", "movement")
    loops = {
        "stock": Loop(options.size),
        "nothing due": Loop(options.size, *every, every_n_steps=FAR),
        "blocks": Loop(options.size, "blocks"),
        "every module": Loop(options.size, "modules"),
        "attention, head": Loop(options.size, "attention"),
        "weights, moments": Loop(options.size, "weights"),
        "movement": Loop(options.size, "movement"),
        "all at once": Loop(options.size, *every),
    }
    best = dict.fromkeys(loops, float("inf"))
    for number in range(options.steps):
        for name, loop in loops.items():
            began = time.perf_counter()
            loop.step(number)
            best[name] = min(best[name], time.perf_counter() - began)
    counts = {}
    for name, loop in loops.items():
        with OperationCounter() as count:
            loop.step(options.steps)
        counts[name] = (count.num_reads, count.num_ops)
    print(f"{'step':18} {'ms':>9} {'x stock':>8} {'reads':>6} {'operations':>11}")
    for name in loops:
        reads, ops = (mine - stock for mine, stock in zip(counts[name], counts["stock"], strict=True))
        print(f"{name:18} {1000 * best[name]:9.2f} {best[name] / best['stock']:8.3f} {reads:+6} {ops:+11}")


if __name__ == "__main__":
    main()
