"""`python -m hf_nanguard.run`: the same as `nanguard run`, as a module that `torchrun -m` and `accelerate launch -m` take."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:  # type: ignore[attr-defined] # since Python 3.11
        del sys.path[0]  # the current folder, where a script may have modules with the names of those that we import
    from .cli.main import main

    sys.exit(main(["run", *sys.argv[1:]]))
