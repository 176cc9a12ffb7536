"""`nanguard verify`: a short guarded run of the user's own configuration, and a verdict: best, acceptable or failed."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from .live_output import between, build_console, guard_log, make_folder, progress

if TYPE_CHECKING:
    from rich.console import Console

    from ..verification.grade import Verification

TASKS = ("sft", "grpo")
WITH_VALUE = ("--task", "--steps", "--memory_limit", "--memory-limit", "--output_dir", "--output-dir")
ALONE = ("--json",)
HELP = ("-h", "--help")
STYLES = {"best": "green", "acceptable": "yellow", "failed": "bold red", "not measured": "dim", "measured": ""}

EPILOG = """what is measured, and the verdict:
  completion       all steps were gone through and all weights are finite, else failed
  logits           NaN or inf in the logits of any forward: acceptable, for the guard dealt with it
  gradients        NaN or inf in them: acceptable, likewise
  clipping         every norm above max_grad_norm came down to it, else failed
  success rate     micro-batches learned from: over 90 % best, over 85 % acceptable, else failed
  held-out loss    falls: best; rises by less than 2 %: acceptable; else failed
  held-out reward  (grpo) does not fall: best; falls: acceptable, a few samples are noisy
  memory peak      of the device, or of the process on a CPU; failed if above --memory_limit
  The verdict is the worst of them. Gradient norms and the guard's events are shown besides. Data to
  evaluate on is a slice of the test split if the configuration evaluates, else held out of the training data. Every
  flag and YAML file of `nanguard sft` and `nanguard grpo` is taken; --steps takes the place of max_steps, and nothing
  is written to the output_dir of the YAML file.

examples:
  nanguard verify
  nanguard verify --config my.yaml --steps 40
  nanguard verify --task grpo --preset balanced --model_name_or_path my-model --dataset_name my-prompts \\
      --reward_funcs my_module.score
  nanguard verify --config my.yaml --json | jq .verdict

exit codes: 0 for best and acceptable, 1 for failed, 2 for bad arguments, 130 for Ctrl-C
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "verify",
        help="try your own configuration for a few guarded steps and get a verdict",
        usage="nanguard verify [--task sft|grpo] [--steps N] [--memory_limit GB] [--json] [--output_dir FOLDER] [--config FILE] [any flag of "
        "nanguard sft or grpo]",
        description="Trains for a few steps under guard, with your own model, data and arguments, and measures whether that\n"
        "holds. Without a model and a dataset it tries the embedded task.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--task", choices=TASKS, default="sft", help="whose arguments they are (default: sft)")
    parser.add_argument(
        "--steps", type=between(2, 100_000), default=20, metavar="N", help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--memory_limit", "--memory-limit", type=_gigabytes, metavar="GB", help="a higher peak of memory is a failure"
    )
    parser.add_argument("--json", action="store_true", help="everything that was measured, as JSON, and nothing else")
    parser.add_argument(
        "--output_dir",
        "--output-dir",
        metavar="FOLDER",
        help="where events and autopsies are put (default: a temporary folder, which stays if there are any)",
    )
    parser.add_argument("--config", metavar="FILE", help="your YAML file, as for nanguard sft and grpo")
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


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns our own words of a command line that begins with `verify`, and those of the configuration."""
    if any(word in HELP for word in words):
        return [words[0], HELP[1]], []
    own, others = [words[0]], list[str]()
    place = 1
    while place < len(words):
        name = words[place].partition("=")[0]
        length = 2 if name in WITH_VALUE and name == words[place] else 1
        (own if name in WITH_VALUE or name in ALONE else others).extend(words[place : place + length])
        place += length
    return own, others


def run(arguments: argparse.Namespace) -> int:
    """Runs the trial and returns the exit code."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ArgumentError(
            f"nanguard verify must run in one process, got WORLD_SIZE={os.environ['WORLD_SIZE']}. Start it without a launcher."
        )
    try:
        recipe = import_module(f"..examples.recipe.{arguments.task}_recipe", __package__).RECIPE
    except ModuleNotFoundError as error:
        raise ArgumentError(f"nanguard verify needs {error.name}. Run pip install 'hf-nanguard[trl]'.") from error
    from ..examples.demo.small_sft import quiet_hosts
    from ..examples.recipe.base_recipe import fresh
    from ..examples.recipe.recipe_parser import parse
    from ..examples.recipe.run_and_save import build, stdout_aside
    from ..verification.measured_run import verify

    plan = parse(arguments.words, recipe.kind)
    if plan.recipe.compare:
        raise ArgumentError(f"--compare must not be given here. Run `nanguard {arguments.task} --compare`.")
    console = build_console(stderr=arguments.json)
    with _open_folder(arguments.output_dir) as folder:
        plan.training.output_dir, plan.training.report_to = str(folder), []
        plan.training.max_steps = arguments.steps  # a trainer of a stream is not built without
        plan.training.disable_tqdm, plan.training.push_to_hub = True, False
        for note in plan.notes:
            console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
        with stdout_aside(arguments.json), quiet_hosts(), guard_log(console), progress(console) as begin:
            trainer = build(recipe.trainer_class, args=plan.training, **fresh(recipe.gather_parts(plan)))
            report = begin(f"{arguments.task}, guarded", arguments.steps)
            found = verify(
                trainer,
                arguments.steps,
                folder,
                lambda step, loss: report(step, f"logged loss {loss:.4g}", False),
                arguments.memory_limit,
            )
    if arguments.json:
        print(json.dumps(found.as_dict(), indent=2, allow_nan=False))
    else:
        show(console, found)
    return 1 if found.verdict == "failed" else 0


@contextmanager
def _open_folder(given: str | None) -> Iterator[Path]:
    """Yields the folder that was asked for, else a temporary one, which stays if there are events in it."""
    if given is not None:
        yield make_folder("--output_dir", given)
        return
    folder = Path(tempfile.mkdtemp(prefix="nanguard-verify-"))
    try:
        yield folder
    finally:
        if not (folder / "nanguard" / "events.jsonl").is_file():
            shutil.rmtree(folder, ignore_errors=True)


def show(console: Console, found: Verification) -> None:
    """Prints what was found: a table on a terminal, lines in a pipe."""
    from rich.text import Text

    console.print()
    if console.is_terminal:
        from rich.table import Table

        table = Table("check", "verdict", "what was seen")
        for check in found.checks:
            table.add_row(check.name, Text(check.verdict, STYLES[check.verdict]), Text(check.text))
        console.print(table)
    else:
        for check in found.checks:
            console.print(
                f"{check.name:<16} {check.verdict:<13} {check.text}", markup=False, highlight=False, soft_wrap=True
            )
    console.print(Text.assemble("verdict: ", (found.verdict, STYLES[found.verdict])))
    for reason in found.reasons:
        console.print(f"  {reason}", markup=False, highlight=False, soft_wrap=True)
    if found.events:
        path = Path(found.output_dir) / "nanguard"
        console.print(f"events and autopsies: {path}", markup=False, highlight=False, soft_wrap=True)
