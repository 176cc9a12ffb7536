"""`nanguard scan`: looks for NaN, inf and other bad numbers in checkpoints, without loading a model."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..command_exit import print_error
from ..errors import ArgumentError
from ..plain_text import format_count, printable
from .shared.command_parser import Subparsers
from .shared.slow_stages import slow_imports

if TYPE_CHECKING:
    from ..checkpoints.scan_result import ScanResult

MAX_SHOWN = 20  # findings of one checkpoint
MAX_OF_MANY = 3  # of each of several
EPILOG = """examples:
  nanguard scan runs/mine                        # every checkpoint of a run
  nanguard scan model.safetensors --as float16   # what would overflow
  nanguard scan --best runs/mine                 # print only the newest good checkpoint

Reads safetensors, files of torch.save, optimizer state, adapters, DeepSpeed and FSDP folders. Nothing in a file is executed.

exit codes: 0 clean, 1 findings, 2 something cannot be used (truncated, incomplete, not a checkpoint) or bad arguments
"""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "scan",
        help="look for NaN, inf and damaged files in checkpoints",
        description="Checks every tensor of checkpoints for NaN, inf, absurd magnitudes, all-zero weights and heads that no\n"
        "longer match their embedding, and every file for completeness.",
        epilog=EPILOG,
    )
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a file, a model folder, a checkpoint or a run")
    parser.add_argument(
        "--deep", action="store_true", help="also count denormal numbers and look for uninitialized rows"
    )
    parser.add_argument(
        "--as", dest="as_dtype", metavar="DTYPE", help="report what would overflow or vanish, e.g. float16"
    )
    parser.add_argument(
        "--best", action="store_true", help="print only the path of the newest good checkpoint of a run"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Scans and returns the exit code."""
    with slow_imports():
        import torch

        from ..checkpoints.scan import make_checks, scan_paths
        from ..checkpoints.scan_result import worst_exit_code

    torch.set_num_threads(1)  # the scan has threads of its own
    if arguments.best:
        return print_best(arguments)
    checks = make_checks(arguments.deep, arguments.as_dtype)
    with progress(arguments.paths) as advance:
        results = list(scan_paths(arguments.paths, checks, advance))
    if arguments.json:
        print(json.dumps({"results": [result.as_dict() for result in results]}, allow_nan=False))
    else:
        shown = MAX_SHOWN if len(results) == 1 else MAX_OF_MANY
        print("\n".join(line for result in results for line in format_result(result, shown)))
        print_next_step(results)
    return worst_exit_code(results)


def print_best(arguments: argparse.Namespace) -> int:
    """Prints the newest good checkpoint of a run, and nothing else to the standard output."""
    from ..checkpoints.good_checkpoint import choose_checkpoint

    if len(arguments.paths) != 1 or not Path(arguments.paths[0]).is_dir():
        raise ArgumentError(f"--best takes the folder of one run, got {printable(' '.join(arguments.paths), 200)!r}.")
    choice = choose_checkpoint(Path(arguments.paths[0]))
    if arguments.json:
        skipped = {str(path): why for path, why in choice.skipped}
        print(json.dumps({"best": None if choice.path is None else str(choice.path), "skipped": skipped}))
    elif choice.path is not None:
        print_path(choice.path)
    if choice.path is None:
        why = choice.format_skipped() or "it has no folder checkpoint-N"
        print_error(f"no good checkpoint in {arguments.paths[0]}: {why}.")
    return 2 if choice.path is None else 0


def print_path(path: Path) -> None:
    """Prints a path: to a file or a pipe its very bytes, for a program to use, elsewhere what can be shown of it."""
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(path) + os.linesep.encode())
    else:
        print(printable(str(path)))


def print_next_step(results: list[ScanResult]) -> None:
    """Says which checkpoint of a run to continue from, if some are good and some are not."""
    from ..checkpoints.checkpoint_files import CHECKPOINT

    numbered = [result for result in results if CHECKPOINT.search(str(result.path))]  # in the order of their steps
    good = [printable(str(result.path)) for result in numbered if result.is_good]
    if good and len(good) < len(numbered) and len({result.path.parent for result in numbered}) == 1:
        print(f"newest good checkpoint: {good[-1]}. `nanguard run --resume train.py` continues from it.")


def format_result(result: ScanResult, max_shown: int = MAX_SHOWN) -> Iterator[str]:
    """Yields the lines about one checkpoint, with at most so many findings."""
    state = "good" if not result.findings else "usable, with findings" if result.is_good else "NOT GOOD"
    counts = f"{format_count(result.num_tensors, 'tensor')} in {format_count(result.num_files, 'file')}"
    yield f"{printable(str(result.path))}: {state} ({counts}, {result.num_bytes / 1e6:,.1f} MB)"
    yield from (f"  {finding.problem:<18} {finding}" for finding in result.findings[:max_shown])
    if len(result.findings) > max_shown:
        yield f"  ... and {len(result.findings) - max_shown} more (--json has all)"
    yield from (f"  note               {note}" for note in result.notes)


@contextmanager
def progress(paths: list[str]) -> Iterator[Callable[[int], None] | None]:
    """Yields a function that moves a progress bar by a number of bytes; none where there is no terminal."""
    from ..report.terminal_console import build_console

    console = build_console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("scanning"), BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=count_bytes(paths))
        yield lambda num_bytes: bar.advance(task, num_bytes)


def count_bytes(paths: list[str]) -> int:
    """Returns the size of the files that will be scanned."""
    from ..checkpoints.checkpoint_files import list_tensor_files
    from ..checkpoints.scan import find_targets

    files = [file for path in find_targets(paths) for file in (list_tensor_files(path) if path.is_dir() else [path])]
    return sum(file.stat().st_size for file in files)
