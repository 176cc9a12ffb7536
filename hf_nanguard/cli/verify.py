"""`nanguard verify`: a short guarded run of the user's configuration, and a verdict: best, acceptable or failed."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..report.run_files import GUARD_FOLDER, events_path
from .command_parser import Subparsers, between, load_recipe
from .live_output import guard_log, progress

if TYPE_CHECKING:
    from rich.console import Console

    from ..verification.grade import Verification

TASKS = ("sft", "grpo")
STYLES = {"best": "green", "acceptable": "yellow", "failed": "bold red", "not measured": "dim", "measured": ""}

EPILOG = """checks and verdicts:
  completion       failed unless all steps were completed with finite weights
  logits           NaN or inf in the logits of a forward: acceptable, because the guard handled it
  gradients        NaN or inf in them: acceptable, likewise
  clipping         failed unless every norm above max_grad_norm was clipped to it
  success rate     micro-batches trained on: over 90 % best, over 85 % acceptable, else failed
  held-out loss    falls: best; rises by less than 2 %: acceptable; else failed
  held-out reward  (grpo) does not fall: best; falls: acceptable, because a few samples are noisy
  memory peak      of the device, or of the process on a CPU; failed if above --memory_limit
  The verdict is the worst of them. Gradient norms and events of the guard are printed too. Evaluation
  data is part of the test split if the configuration evaluates, else held out of the training data. All
  flags and YAML files of `nanguard sft` and `nanguard grpo` work; --steps replaces max_steps, and nothing
  is written to the output_dir of the YAML file.

examples:
  nanguard verify
  nanguard verify --config my.yaml --steps 40
  nanguard verify --task grpo --preset balanced --model_name_or_path my-model --dataset_name my-prompts \\
      --reward_funcs my_module.score
  nanguard verify --config my.yaml --json | jq .verdict

exit codes: 0 for best and acceptable, 1 for failed, 2 for bad arguments, 130 for Ctrl-C
"""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "verify",
        help="run a configuration for a few guarded steps and get a verdict",
        usage="nanguard verify [--task sft|grpo] [--steps N] [--memory_limit GB] [--json] [--output_dir FOLDER] [--config FILE] [any flag of "
        "nanguard sft or grpo]",
        description="Trains for a few steps with the guard, with your model, data and arguments, and measures whether they\n"
        "work. Without a model and a dataset it runs the built-in task.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--task", choices=TASKS, default="sft", help="kind of training (default: sft)")
    parser.add_argument(
        "--steps", type=between(2, 100_000), default=20, metavar="N", help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--memory_limit", "--memory-limit", type=_gigabytes, metavar="GB", help="fail if the memory peak is higher"
    )
    parser.add_argument("--json", action="store_true", help="print only all measurements, as JSON")
    parser.add_argument(
        "--output_dir",
        "--output-dir",
        metavar="FOLDER",
        help="folder for events and autopsies (default: a temporary folder, kept if there are events)",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file, as for nanguard sft and grpo")
    parser.set_defaults(run=run)


def _gigabytes(text: str) -> int:
    """Returns the bytes of a number of GB."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of GB above 0, got {text!r}")
    return int(number * 1e9)


def run(arguments: argparse.Namespace) -> int:
    """Runs the verification and returns the exit code."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ArgumentError(
            f"nanguard verify must run in one process, got WORLD_SIZE={os.environ['WORLD_SIZE']}. Start it without a launcher."
        )
    recipe = load_recipe("verify", arguments.task)
    from ..examples.compare import quiet_hosts
    from ..examples.recipe.recipe_parser import parse
    from ..examples.recipe.run_and_save import build, stdout_aside
    from ..report.terminal_console import build_console, print_line
    from ..verification.measured_run import verify

    config = [] if arguments.config is None else ["--config", arguments.config]
    parsed = parse([*arguments.words, *config], recipe.KIND)
    if parsed.flags.compare:
        raise ArgumentError(f"--compare must not be given here. Run `nanguard {arguments.task} --compare`.")
    console = build_console(stderr=arguments.json)
    args = parsed.training
    with _open_folder(arguments.output_dir) as folder:
        args.output_dir, args.report_to, args.disable_tqdm, args.push_to_hub = str(folder), [], True, False
        args.max_steps = arguments.steps  # a trainer of a stream cannot be built without it
        for note in parsed.notes:
            print_line(console, f"note: {note}")
        with stdout_aside(arguments.json), quiet_hosts(), guard_log(console), progress(console) as begin:
            trainer = build(recipe.KIND.trainer, args=args, **recipe.gather_parts(parsed))
            report = begin(f"{arguments.task}, guarded", arguments.steps)
            found = verify(
                trainer, arguments.steps, folder, lambda step, loss: report(step, f"logged loss {loss:.4g}", False),
                arguments.memory_limit,
            )  # fmt: skip
    if arguments.json:
        print(json.dumps(found.as_dict(), indent=2, allow_nan=False))
    else:
        show(console, found)
    return 1 if found.verdict == "failed" else 0


@contextmanager
def _open_folder(given: str | None) -> Iterator[Path]:
    """Yields the given folder, or a temporary one that is kept if it contains events."""
    from ..examples.output_folder import make_folder

    if given is not None:
        yield make_folder("--output_dir", given)
        return
    folder = Path(tempfile.mkdtemp(prefix="nanguard-verify-"))
    try:
        yield folder
    finally:
        if not events_path(folder / GUARD_FOLDER, 0).is_file():
            shutil.rmtree(folder, ignore_errors=True)


def show(console: Console, found: Verification) -> None:
    """Prints the checks, as a table on a terminal and as lines elsewhere, and the verdict."""
    from rich.table import Table
    from rich.text import Text

    from ..report.terminal_console import print_line

    console.print()
    table = Table("check", "verdict", "measured")
    for check in found.checks:
        table.add_row(check.name, Text(check.verdict, STYLES[check.verdict]), Text(check.text))
        if not console.is_terminal:
            print_line(console, f"{check.name:<16} {check.verdict:<13} {check.text}")
    if console.is_terminal:
        console.print(table)
    console.print(Text.assemble("verdict: ", (found.verdict, STYLES[found.verdict])))
    for reason in found.reasons:
        print_line(console, f"  {reason}")
    if found.events:
        print_line(console, f"events and autopsies: {Path(found.output_dir) / GUARD_FOLDER}")
