"""What the guard of sampling costs on healthy scores, beside one `torch.sum` over them.

    python benchmarks/logits.py --repeats 200

Times on a shared machine are noise, so the contenders take turns and the fastest call of each counts.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import InfNanRemoveLogitsProcessor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.result_tables import add_json_flag, find_spread, publish
from hf_nanguard import NumericalStabilityLogitsProcessor

SHAPES = ((8, 151936), (32, 32000))


def measure(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Returns the times of the calls of each contender, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return times


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=100, help="calls of each contender (default: 100)")
    add_json_flag(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for rows, vocabulary in SHAPES:
        scores = torch.randn(rows, vocabulary)
        scores[:, ::7] = -float("inf")  # a mask is healthy
        ids = torch.zeros(rows, 5, dtype=torch.long)
        contenders = {
            "torch.sum": scores.sum,
            "ours": partial(NumericalStabilityLogitsProcessor(eos_token_id=2), ids, scores),
            "ours, mode always": partial(NumericalStabilityLogitsProcessor(mode="always", eos_token_id=2), ids, scores),
            "InfNanRemoveLogitsProcessor": partial(InfNanRemoveLogitsProcessor(), ids, scores),
        }
        times = measure(contenders, options.repeats)
        print(f"[{rows}, {vocabulary}]")
        for name, taken in times.items():
            ratio, spread = min(taken) / min(times["torch.sum"]), find_spread(taken)
            print(f"  {name:28} {1e3 * min(taken):8.3f} ms, median {spread:.2f} x that; {ratio:6.2f} x torch.sum")
            shape = f"[{rows}, {vocabulary}]"
            table.append(
                {"scores": shape, "": name, "x torch.sum": f"{ratio:.2f}", "median / fastest": f"{spread:.2f}"}
            )
    publish(f"one thread, fastest of {options.repeats} calls, in turns", table, options.json)


if __name__ == "__main__":
    main()
