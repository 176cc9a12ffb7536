"""`python -m hf_nanguard.run`: the same as `nanguard run`, as a module that `torchrun -m` and `accelerate launch -m` take."""

import os
import sys


def leave_current_folder() -> None:
    """Takes the current folder, which `-m` puts on `sys.path`, away again, with what was imported from there.

    A script may have modules in it with the names of those that we import.
    """
    folder = sys.path.pop(0)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        place = os.path.dirname(file.removesuffix(f"{os.sep}__init__.py"))
        if place == folder and name != "hf_nanguard":
            del sys.modules[name]


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
        leave_current_folder()
    from .cli.main import main

    sys.exit(main(["run", *sys.argv[1:]]))
