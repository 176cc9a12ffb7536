"""GRPO with the guard: the same as `nanguard grpo`, as a file for launchers.

    python recipes/grpo.py
    python recipes/grpo.py --compare
    accelerate launch recipes/grpo.py --config configs/grpo/balanced.yaml
    accelerate launch --config_file configs/accelerate/ddp.yaml recipes/grpo.py --preset balanced

`--help` lists the arguments; the code is in hf_nanguard/examples/recipe/grpo_recipe.py.
"""

import sys

from hf_nanguard.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["grpo", *sys.argv[1:]]))
