"""What the sampling guard costs on healthy scores, against one `torch.sum` over them, in one process.

    python benchmarks/logits.py --repeats 200

Times on a shared machine are noise, so contenders take turns and the fastest of each is shown.
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

from hf_nanguard.core.logits import repair_scores
from hf_nanguard.hf.generation.logits_processors import NumericalStabilityLogitsProcessor

SHAPES = ((8, 151936), (32, 32000))


def measure(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Returns the shortest time of each in seconds."""
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
    parser.add_argument("--repeats", type=int, default=100, help="turns of each contender (default: 100)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for rows, vocabulary in SHAPES:
        scores = torch.randn(rows, vocabulary)
        scores[:, ::7] = -float("inf")  # masks are healthy
        ids = torch.zeros(rows, 5, dtype=torch.long)
        contenders = {
            "torch.sum": scores.sum,
            "ours": partial(NumericalStabilityLogitsProcessor(eos_token_id=2), ids, scores),
            "ours, as on a device": partial(repair_scores, scores, 2, look=False),
            "ours, mode always": partial(NumericalStabilityLogitsProcessor(mode="always", eos_token_id=2), ids, scores),
            "InfNanRemoveLogitsProcessor": partial(InfNanRemoveLogitsProcessor(), ids, scores),
        }
        best = measure(contenders, options.repeats)
        print(f"[{rows}, {vocabulary}]")
        for name, seconds in best.items():
            print(f"  {name:28} {1e3 * seconds:8.3f} ms  {seconds / best['torch.sum']:6.2f} x torch.sum")


if __name__ == "__main__":
    main()
