"""What the guard costs in a healthy run: host reads, operations and time of a step, guarded beside stock.

python benchmarks/overhead.py --size 2m --steps 30
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from transformers import Trainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.result_tables import add_json_flag
from benchmarks.small_llama import SIZES, build_trainer, measure_steps, print_costs
from hf_nanguard import GuardedTrainer


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="2m", help="parameters of the Llama (default: 2m)")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of a timed run (default: 30)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each contender (default: 3)")
    add_json_flag(parser)
    options = parser.parse_args()
    contenders = {
        name: partial(build_trainer, cls, options.size, accumulation=options.accumulation)
        for name, cls in (("stock", Trainer), ("guarded", GuardedTrainer))
    }
    method = f"Llama of {options.size} parameters, {options.rounds} runs of {options.steps} steps each"
    print_costs(measure_steps(contenders, options.steps, options.rounds), method, options.json)


if __name__ == "__main__":
    main()
