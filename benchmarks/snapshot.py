"""What a snapshot costs, and going back to it, beside a step of the trainer and a plain copy of as much memory.

python benchmarks/snapshot.py --size 27m --steps 5
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.result_tables import add_json_flag, find_spread, publish
from benchmarks.small_llama import SIZES, StepTimes, build_trainer, train_quietly
from hf_nanguard import GuardArguments, GuardedTrainer
from hf_nanguard.core.rerun.host_copy import find_tensors
from hf_nanguard.core.rerun.snapshot import Snapshot


def measure(call: Callable[[], object], repeats: int) -> list[float]:
    """Returns the times of several calls, in seconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="2m", help="parameters of the Llama (default: 2m)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps before the measurement (default: 5)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each, of which the fastest counts")
    add_json_flag(parser)
    options = parser.parse_args()
    guard = GuardArguments(nanguard_snapshot_steps=1)
    trainer = build_trainer(GuardedTrainer, options.size, options.steps, guard=guard)
    trainer.add_callback(steps := StepTimes())
    train_quietly(trainer)
    [*_, kept] = trainer.nanguard.guard.recovery.snapshots
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in find_tensors(kept.copies))
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = source.clone()
    times = {
        "plain copy": measure(lambda: target.copy_(source), options.repeats),
        "snapshot, first": measure(lambda: Snapshot.take(0, 0, kept.parts), options.repeats),
        "snapshot, reused": measure(lambda: Snapshot.take(0, 0, kept.parts, kept), options.repeats),
        "rewind": measure(lambda: kept.restore(trainer.state.global_step), options.repeats),
    }
    print(f"{num_bytes / 1e6:.1f} MB a snapshot; a step takes {1000 * min(steps.times):.2f} ms")
    print(f"{'':18} {'ms':>9} {'x plain copy':>13} {'x step':>8} {'spread':>7}")
    rows = []
    for name, taken in times.items():
        of_copy, of_step, spread = (
            min(taken) / min(times["plain copy"]),
            min(taken) / min(steps.times),
            find_spread(taken),
        )
        print(f"{name:18} {1000 * min(taken):9.2f} {of_copy:13.2f} {of_step:8.3f} {spread:7.2f}")
        found = {"x plain copy": f"{of_copy:.2f}", "x step": f"{of_step:.2f}", "median / fastest": f"{spread:.2f}"}
        rows.append({"": name, **found})
    publish(f"Llama of {options.size} parameters, fastest of {options.repeats} calls", rows, options.json)


if __name__ == "__main__":
    main()
