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

from hf_nanguard import NumericalStabilityLogitsProcessor

SHAPES = ((8, 151936), (32, 32000))


def measure(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Returns the time of the fastest call of each contender, in seconds."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(repeats):
        for name, run in contenders.items():
            began = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=100, help="calls of each contender (default: 100)")
    options = parser.parse_args()
    torch.set_num_threads(1)
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
        best = measure(contenders, options.repeats)
        print(f"[{rows}, {vocabulary}]")
        for name, seconds in best.items():
            print(f"  {name:28} {1e3 * seconds:8.3f} ms  {seconds / best['torch.sum']:6.2f} x torch.sum")


if __name__ == "__main__":
    main()
