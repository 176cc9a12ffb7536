"""Supervised fine-tuning with the guard: the same as `nanguard sft`, as a file for launchers.

    python recipes/sft.py
    python recipes/sft.py --compare
    accelerate launch recipes/sft.py --config configs/sft/balanced.yaml
    accelerate launch --config_file configs/accelerate/ddp.yaml recipes/sft.py --preset balanced

`--help` lists the arguments; the code is in hf_nanguard/examples/recipe/sft_recipe.py.
"""

import sys

from hf_nanguard.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["sft", *sys.argv[1:]]))
