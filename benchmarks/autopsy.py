"""What an autopsy costs: the time to find the origin against the step it explains, and peak memory, each in a process of
its own.

    python benchmarks/autopsy.py --size 2m --steps 10

The step is a whole one: forward, backward, clip and AdamW. A weight of the first layer is NaN, so that nearly every operator
of the traced pass writes NaN: the worst case for a trace.
"""

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hf_nanguard.core.autopsy.trace.origin import find_origin

SIZES = {"2m": (128, 4, 4096, 4, 64), "27m": (512, 8, 8192, 4, 128)}


def build(size: str) -> tuple[LlamaForCausalLM, torch.Tensor]:
    """Returns a Llama of about that many parameters, and a batch."""
    hidden, layers, vocab, batch, length = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=length,
    )  # fmt: skip
    return LlamaForCausalLM(config), torch.randint(0, vocab, (batch, length))


def measure(size: str, traces: bool, steps: int) -> float:
    """Runs steps, or steps and traces of a bad pass, and returns the mean time of what was asked for."""
    model, ids = build(size)
    optimizer = torch.optim.AdamW(model.parameters())

    def run() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    def step() -> None:
        run()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def trace() -> None:
        gradients = lambda: [(name, p.grad) for name, p in model.named_parameters()]  # noqa: E731
        origin = find_origin(run, model, gradients, {"input_ids": ids})
        assert origin is not None
        assert origin.parameter == "model.layers.0.mlp.up_proj.weight"
        optimizer.zero_grad()

    step()
    if traces:
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
        trace()
    began = time.perf_counter()
    for _ in range(steps):
        (trace if traces else step)()
    return (time.perf_counter() - began) / steps


def main() -> None:
    """Compares, in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="2m")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", choices=("step", "trace"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        seconds = measure(arguments.size, arguments.only == "trace", arguments.steps)
        print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return
    found = {}
    for what in ("step", "trace"):
        command = [sys.executable, __file__, "--size", arguments.size, "--steps", str(arguments.steps), "--only", what]
        seconds, peak = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        found[what] = (float(seconds), float(peak) / 1024)
        print(f"{what:<6} {found[what][0] * 1000:8.1f} ms   peak memory of the process {found[what][1]:7.0f} MiB")
    print(f"origin: {found['trace'][0] / found['step'][0]:.2f} x the step's time (bound 5), ", end="")
    print(f"{found['trace'][1] / found['step'][1]:.2f} x its peak memory (bound 2)")


if __name__ == "__main__":
    main()
