"""`nanguard demo`: one small SFT run, three ways: stock on healthy data, stock with one bad row, guarded with that row.

The fault is a common one. The loss is a mean over the answer of each sample, and one conversation was cut off before
its answer: all its labels are masked, so its mean is 0 / 0. A fourth run, stock and without that batch, shows that the
guarded run ended with exactly the weights it would have had if the batch had never come.
"""

from __future__ import annotations

import argparse
import errno
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console

    from ..hf.showcase import Outcome, Report

EPILOG = """example:
  nanguard demo --steps 30 --output-dir runs/demo
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="run the same small SFT stock, poisoned and guarded, and compare",
        description="Trains a tiny Llama three times on the CPU: stock on healthy data, stock with one\nbad row, and "
        "guarded with the same bad row. Takes less than a minute and downloads nothing.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output-dir", default="runs/demo", help="where the runs are put (default: %(default)s)")
    parser.add_argument(
        "--steps", type=_between(6, 10_000), default=120, help="optimizer steps a run (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=_between(0, 2**31), default=0, help="of data, weights, dropout (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def _between(lowest: int, highest: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if not (text.isascii() and text.isdigit() and lowest <= int(text) <= highest):
            raise argparse.ArgumentTypeError(f"must be an integer from {lowest} to {highest}, got {text!r}")
        return int(text)

    return integer


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo and returns the exit code."""
    folder = _make_folder(arguments.output_dir)
    try:
        from ..hf import showcase
    except ModuleNotFoundError as error:
        raise ArgumentError(f"nanguard demo needs {error.name}. Run pip install 'hf-nanguard[trl]'.") from error

    import torch
    from rich.console import Console

    torch.set_num_threads(1)  # the model is so small that a second thread only waits for the first
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    steps, seed = arguments.steps, arguments.seed
    bad_step = steps // 3
    bad_row = bad_step * showcase.BATCH_SIZE + 2
    tokenizer = showcase.build_tokenizer()
    healthy = showcase.build_rows(tokenizer, steps * showcase.BATCH_SIZE, seed)
    poisoned = [showcase.cut_off(row) if i == bad_row else row for i, row in enumerate(healthy)]
    without = healthy[: bad_step * showcase.BATCH_SIZE] + healthy[(bad_step + 1) * showcase.BATCH_SIZE :]
    runs = {
        "stock, healthy data": ("healthy", healthy, False),
        "stock, one bad row": ("poisoned", poisoned, False),
        "guarded, one bad row": ("guarded", poisoned, True),
        "stock, without that batch": ("without", without, False),
    }
    console.print(
        f"One of {len(poisoned)} rows is bad: row {bad_row} was cut off before its answer, so all its labels are masked and "
        f"its mean loss is 0/0.\nIt comes at step {bad_step} of {steps}.\n"
    )
    outcomes = {}
    with showcase.quiet_hosts(), _guard_log(console), _progress(console, steps) as begin:
        for title, (name, rows, guard) in runs.items():
            report = begin(title, len(rows) // showcase.BATCH_SIZE)
            outcomes[title] = showcase.train(rows, tokenizer, folder / name, seed, guard, report)
    show(console, outcomes, folder, steps)
    return 0


def _make_folder(output_dir: str) -> Path:
    try:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ArgumentError(
            f"--output-dir must be a folder that can be made and written, got {output_dir!r} ({error.strerror}). "
            "Choose another one."
        ) from error
    return folder


@contextmanager
def _guard_log(console: Console) -> Iterator[None]:
    """Shows what the guard says in the demo's own console."""
    from rich.logging import RichHandler

    handler = RichHandler(console=console, show_time=False, show_path=False, highlighter=None)
    guard_logger = logging.getLogger("hf_nanguard")
    guard_logger.addHandler(handler)
    propagate, guard_logger.propagate = guard_logger.propagate, False
    try:
        yield
    finally:
        guard_logger.removeHandler(handler)
        guard_logger.propagate = propagate


@contextmanager
def _progress(console: Console, steps: int) -> Iterator[Callable[[str, int], Report]]:
    """Yields a function that begins a run and returns its reporter: a live bar on a terminal, plain lines elsewhere."""
    if not console.is_terminal:

        def begin_plain(title: str, total: int) -> Report:
            def report(step: int, loss: float) -> None:
                if step % max(steps // 3, 1) == 0 or step == total:
                    console.print(f"{title:<26} step {step:>4}/{total}  logged loss {_number(loss)}", highlight=False)

            return report

        yield begin_plain
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description:<26}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console) as progress:

        def begin_live(title: str, total: int) -> Report:
            task = progress.add_task(title, total=total, loss="")
            return lambda step, loss: progress.update(task, completed=step, loss=f"logged loss {_number(loss)}")

        yield begin_live


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) and value else str(value)


def _look(losses: list[float]) -> str:
    return " ".join([*map(_number, losses[:2]), "...", *map(_number, losses[-3:])])


def _blame(outcome: Outcome) -> str:
    if not outcome.events:
        return "nothing"
    event = outcome.events[0]
    culprit, works = event["culprit"], [remedy["name"] for remedy in event["remedies"] if remedy["works"]]
    rows = ", ".join(map(str, culprit["rows"]))
    return f"{event['cause']} at {culprit['source']}, dataset row {rows}; {event['action']}; works: {', '.join(works)}"


def show(console: Console, outcomes: dict[str, Outcome], folder: Path, steps: int) -> None:
    """Prints the comparison."""
    import torch
    from rich.markup import escape
    from rich.table import Table

    *compared, control = outcomes
    table = Table(title="one bad row, three runs", show_lines=True)
    table.add_column("")
    for title in compared:
        table.add_column(title)
    shown = [outcomes[title] for title in compared]
    questions: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
        ("weights finite?", lambda o: f"NO: {o.bad_tensors} of {len(o.weights)} bad" if o.bad_tensors else "yes"),
        ("steps lost", lambda o: f"{o.num_lost} of {steps}"),
        ("logged losses", lambda o: _look(o.losses)),
        ("final loss, held-out", lambda o: _number(o.tested)),
        ("what was blamed", _blame),
    )
    for question, answer in questions:
        table.add_row(question, *(escape(answer(outcome)) for outcome in shown))
    console.print()
    console.print(table)
    guarded_run = outcomes[compared[-1]]
    same = [torch.equal(guarded_run.weights[name], tensor) for name, tensor in outcomes[control].weights.items()]
    console.print(
        f"The guarded run against a stock run that never saw that batch: {sum(same)} of {len(same)} weight tensors are "
        f"bit-identical.\nIts events: {escape(str(folder / 'guarded' / 'nanguard' / 'events.jsonl'))}\n"
        f"Its autopsies: {escape(str(folder / 'guarded' / 'nanguard' / 'autopsy'))}",
        highlight=False,
        soft_wrap=True,
    )
