"""Shared by recipes on the plain `Trainer`, each of which reproduces a field report with and without the guard."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ...errors import ArgumentError
from ..compare import Outcome
from .command_line import is_local_first

COMMON = {
    "max_grad_norm": 0.5,
    "save_strategy": "no",
    "report_to": ["none"],
    "remove_unused_columns": False,
    "dataloader_pin_memory": False,
    "use_cpu": not torch.accelerator.is_available(),  # without it the ranks of a launcher train apart on a CPU
}


@dataclass
class CaseArguments:
    """Arguments of every such recipe besides the guarded training arguments; a recipe adds its own `plant`."""

    compare: bool = field(default=True, metadata={"help": "Run stock and guarded; false runs guarded only."})


def check_rows(num_rows: int, bad_row: int) -> None:
    """Raises if there are too few rows to contain the planted one."""
    if num_rows <= bad_row:
        raise ValueError(f"--num_rows must be more than {bad_row}, got {num_rows}.")


def exit_code(run: Callable[[Sequence[str] | None], list[Outcome]], argv: Sequence[str] | None = None) -> int:
    """Runs a recipe and returns its exit code: 0 if its guarded run succeeded, 1 if not, 2 for bad arguments, 130 for
    Ctrl-C.
    """
    try:
        return 0 if run(argv)[-1].is_sound else 1
    except ArgumentError as error:
        if is_local_first():
            print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
