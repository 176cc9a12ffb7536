"""What a step costs at which monitors measure, beside the stock step.

python benchmarks/monitor.py --size 2m --steps 20
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from transformers import Trainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.result_tables import add_json_flag
from benchmarks.small_llama import SIZES, build_trainer, measure_steps, print_costs
from hf_nanguard import GuardArguments, GuardedTrainer

PERIODS = ("activation_steps", "attention_steps", "weight_check_steps")
MONITORS: dict[str, dict[str, Any]] = {
    "no monitor": {},
    "blocks": {"activation_steps": 1},
    "every module": {"activation_steps": 1, "activation_modules": "*"},
    "attention, head": {"attention_steps": 1},
    "weights, moments": {"weight_check_steps": 1},
    "all at once": dict.fromkeys(PERIODS, 1),
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="2m", help="parameters of the Llama (default: 2m)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a timed run (default: 20)")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each contender (default: 3)")
    add_json_flag(parser)
    options = parser.parse_args()
    contenders = {"stock": partial(build_trainer, Trainer, options.size)}
    for name, settings in MONITORS.items():
        chosen = {**dict.fromkeys(PERIODS, 0), **settings}
        guard = GuardArguments(**{f"nanguard_{setting}": value for setting, value in chosen.items()})
        contenders[name] = partial(build_trainer, GuardedTrainer, options.size, guard=guard)
    method = f"Llama of {options.size} parameters, {options.rounds} runs of {options.steps} steps each"
    print_costs(measure_steps(contenders, options.steps, options.rounds), method, options.json)


if __name__ == "__main__":
    main()
