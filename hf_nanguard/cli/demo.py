"""`nanguard demo`: four failures in a stock and in a guarded trainer, side by side.

1. One row without an answer, whose mean loss is 0 / 0. The guarded run ends with exactly the weights of a run without
   that batch.
2. GRPO with NaN scores when a token is sampled.
3. A NaN in the optimizer's state that never shows in loss or gradients.
4. A float16 layer that grows until it overflows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .shared.command_parser import Subparsers, between, needs_trl
from .shared.live_output import build_console, guard_log, print_plain, progress

if TYPE_CHECKING:
    from rich.console import Console

    from ..examples.demo.scenario_runner import Scenario

EPILOG = """examples:
  nanguard demo
  nanguard demo --quick --steps 30 --output-dir runs/demo

Exit codes: 0, 2 for bad arguments, 130 for Ctrl-C.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="show four failures, stock and guarded, side by side",
        description="Plants four failures in small runs on the CPU and compares a stock with a guarded trainer: one bad\n"
        "row, GRPO that samples from NaN, a NaN that never shows in the log, a float16 overflow. Takes about a\n"
        "minute and downloads nothing.",
        epilog=EPILOG,
    )
    parser.add_argument("--output-dir", default="runs/demo", help="folder of the runs (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="only the first failure, the bad row")
    parser.add_argument(
        "--steps", type=between(6, 10_000), default=120, help="optimizer steps of its runs (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=between(0, 2**31), default=0, help="seed of data, weights and dropout (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo and returns the exit code."""
    from ..examples.output_folder import make_folder

    folder = make_folder("--output-dir", arguments.output_dir)
    with needs_trl("demo"):
        from ..examples.demo.scenarios import SCENARIOS
    import torch

    from ..examples.compare import quiet_hosts
    from ..examples.demo.scenario_runner import ScenarioRunner

    torch.set_num_threads(1)  # the models are so small that a second thread only waits for the first
    console = build_console()
    shown = []
    with quiet_hosts(), guard_log(console):
        for number, run_scenario in enumerate(SCENARIOS[:1] if arguments.quick else SCENARIOS, 1):

            def announce(description: str, number: int = number) -> None:
                console.print(f"{number}. {description}")

            with progress(console) as begin:
                shown.append(run_scenario(ScenarioRunner(folder, arguments.seed, arguments.steps, announce, begin)))
            console.print()
    show(console, shown)
    return 0


def show(console: Console, scenarios: Sequence[Scenario]) -> None:
    """Prints the comparison, and the paths of the evidence."""
    from rich.table import Table

    from ..examples.compare import describe, find_evidence

    table = Table(title="the same failure, stock and guarded", show_lines=True, width=min(console.width, 120))
    for title, ratio in (("planted", 4), ("stock", 7), ("guarded", 9)):
        table.add_column(title, ratio=ratio, overflow="fold")
    for number, (title, *outcomes) in enumerate(scenarios, 1):
        cells = ["\n".join(f"{topic}: {text}" for topic, text in describe(outcome).items()) for outcome in outcomes]
        table.add_row(f"{number}. {title}", *cells)
    console.print(table)
    for number, (*_, guarded) in enumerate(scenarios, 1):
        for kind, path in find_evidence(guarded).items():
            print_plain(console, f"{kind} of failure {number}: {path}")
    print_plain(
        console, "next: `nanguard run train.py` guards your own script, `nanguard doctor` checks it before it starts"
    )
