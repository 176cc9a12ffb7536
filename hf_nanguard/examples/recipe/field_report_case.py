"""What recipes on the plain `Trainer` share: one field report each, run stock and guarded on a planted failure."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..compare import Outcome
from .command_line import one_sentence

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
    """What such a recipe takes beside the guarded training arguments; it adds its own `plant`."""

    compare: bool = field(default=True, metadata={"help": "Run stock and guarded; false trains guarded only."})


def check_rows(num_rows: int, bad_row: int) -> None:
    """Complains if there are too few rows for the planted one."""
    if num_rows <= bad_row:
        raise ValueError(f"--num_rows must be more than {bad_row}, got {num_rows}.")


def exit_code(run: Callable[[Sequence[str] | None], list[Outcome]], argv: Sequence[str] | None) -> int:
    """Runs a recipe and returns 0 if the guarded run, its last, is sound, else 1, or 130 for Ctrl-C; bad arguments end the
    process with 2."""
    try:
        with one_sentence():
            outcomes = run(argv)
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
    return 0 if outcomes[-1].is_sound else 1
