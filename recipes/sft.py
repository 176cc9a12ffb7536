"""Supervised fine-tuning under guard: the same as `nanguard sft`, for launchers that want a file.

    python recipes/sft.py
    python recipes/sft.py --compare
    accelerate launch recipes/sft.py --config configs/sft/balanced.yaml
    accelerate launch --config_file configs/accelerate/ddp.yaml recipes/sft.py --preset balanced

`--help` shows what it takes; the code is hf_nanguard/examples/recipe/sft_recipe.py.
"""

import sys

from hf_nanguard.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["sft", *sys.argv[1:]]))
