"""`python -m hf_nanguard.run`: the same as `nanguard run`, as a module that `torchrun -m` and `accelerate launch -m` take."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
