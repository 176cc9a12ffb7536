"""`nanguard demo`: four failures, each met by a stock and by a guarded trainer, side by side.

1. One row without an answer, whose mean loss is 0 / 0. A run without that batch shows that the guarded one ended with
   exactly the weights it would have had if the batch had never come.
2. GRPO whose scores are NaN when a token is drawn.
3. A NaN in the optimizer's state that neither loss nor gradients ever show.
4. A float16 layer that grows until it overflows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from .live_output import between, build_console, guard_log, make_folder, progress

if TYPE_CHECKING:
    from rich.console import Console

    from ..examples.demo.scenario_runner import Scenario

EPILOG = """examples:
  nanguard demo
  nanguard demo --quick --steps 30 --output-dir runs/demo

Exit codes: 0, 2 for bad arguments, 130 for Ctrl-C.
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="meet four failures, stock and guarded, side by side",
        description="Plants four failures in small runs on the CPU and shows what becomes of a stock and of a guarded\n"
        "trainer: one bad row, GRPO that samples from NaN, a NaN that the log never shows, a float16 overflow.\n"
        "Takes about a minute and downloads nothing.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output-dir", default="runs/demo", help="where the runs are put (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="only the first act, the bad row")
    parser.add_argument(
        "--steps", type=between(6, 10_000), default=120, help="optimizer steps a run of it (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=between(0, 2**31), default=0, help="of data, weights, dropout (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo and returns the exit code."""
    folder = make_folder("--output-dir", arguments.output_dir)
    try:
        from ..examples.demo.scenario_runner import ScenarioRunner
        from ..examples.demo.scenarios import ACTS
    except ModuleNotFoundError as error:
        raise ArgumentError(f"nanguard demo needs {error.name}. Run pip install 'hf-nanguard[trl]'.") from error

    import torch

    from ..examples.demo.small_sft import quiet_hosts

    torch.set_num_threads(1)  # the models are so small that a second thread only waits for the first
    console = build_console()
    acts = ACTS[:1] if arguments.quick else ACTS
    shown = []
    with quiet_hosts(), guard_log(console):
        for number, play in enumerate(acts, 1):

            def tell(story: str, number: int = number) -> None:
                console.print(f"{number}. {story}", markup=False, highlight=False)

            with progress(console) as begin:
                shown.append(play(ScenarioRunner(folder, arguments.seed, arguments.steps, tell, begin)))
            console.print()
    show(console, shown)
    return 0


def show(console: Console, acts: Sequence[Scenario]) -> None:
    """Prints the comparison, and where the evidence is."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="the same failure, stock and guarded", show_lines=True, width=min(console.width, 120))
    for title, ratio in (("planted", 4), ("stock", 7), ("guarded", 9)):
        table.add_column(title, ratio=ratio)
    for number, act in enumerate(acts, 1):
        table.add_row(
            f"{number}. {escape(act.title)}", *(escape("\n".join(lines)) for lines in (act.stock, act.guarded))
        )
    console.print(table)
    for number, act in enumerate(acts, 1):
        for kind, path in act.evidence.items():
            console.print(f"{kind} of {number}: {path}", markup=False, highlight=False, soft_wrap=True)
