"""What an autopsy costs: its time beside the step it explains, and peak memory, each in a process of its own.

    python benchmarks/autopsy.py --size 2m --steps 10

A step consists of forward, backward, clip and AdamW. The loss of a bad step is 0/0, so that its whole backward pass computes
NaN. A contained step drops its micro-batch without an autopsy; an examined step adds the autopsy, with its search for the
origin and the samples to blame and the remedies that it tries.
"""

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.result_tables import add_json_flag, find_spread, publish
from benchmarks.small_llama import SIZES, build_llama
from hf_nanguard import Guard, Policy

KINDS = ("healthy", "contained", "examined")


def measure(size: str, kind: str, steps: int) -> list[float]:
    """Returns the times of steps of a kind."""
    model = build_llama(size)
    ids = torch.randint(0, SIZES[size][2], (4, 64))
    policy = Policy(autopsy=kind == "examined", max_autopsies=steps + 1, max_bad_steps=steps + 2)
    events: list[dict] = []
    guard = Guard(model, torch.optim.AdamW(model.parameters()), policy, max_grad_norm=1.0, on_event=events.append)

    def run(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(input_ids=batch["ids"], labels=batch["ids"]).loss * (batch["weight"] / batch["weight"])

    def step(bad: bool) -> None:
        guard.step(run, [{"ids": ids, "weight": torch.tensor(0.0 if bad else 1.0)}])

    step(bad=False)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        step(bad=kind != "healthy")
        times.append(time.perf_counter() - began)
    assert len(events) == (0 if kind == "healthy" else steps)
    return times


def main() -> None:
    """Measures each kind of step in a process of its own and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="2m", help="parameters of the Llama (default: 2m)")
    parser.add_argument("--steps", type=int, default=10, help="steps of each kind (default: 10)")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    add_json_flag(parser)
    options = parser.parse_args()
    if options.only:
        times = measure(options.size, options.only, options.steps)
        print(min(times), find_spread(times), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return
    stock, rows = None, []
    for kind in KINDS:
        command = [sys.executable, __file__, "--size", options.size, "--steps", str(options.steps), "--only", kind]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        seconds, spread, peak = map(float, printed.split())
        stock = stock or (seconds, peak)
        print(
            f"{kind:<10} {seconds * 1000:8.1f} ms, {seconds / stock[0]:5.2f} x healthy, median {spread:.2f} x the fastest   ",
            end="",
        )
        print(f"peak memory of the process {peak / 1024:7.0f} MiB, {peak / stock[1]:.2f} x healthy")
        ratios = {"time, x healthy": f"{seconds / stock[0]:.2f}", "peak memory, x healthy": f"{peak / stock[1]:.2f}"}
        rows.append({"step": kind, **ratios, "median / fastest": f"{spread:.2f}"})
    publish(f"Llama of {options.size} parameters, a process each, fastest of {options.steps} steps", rows, options.json)


if __name__ == "__main__":
    main()
