"""`nanguard doctor`: what is wrong with a configuration and its data, before the run, in stages from cheap to expensive."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ArgumentError
from ..report.run_files import GUARD_FOLDER, events_path, new_run_id
from .shared.command_parser import Subparsers, between, load_recipe, needs_trl
from .shared.live_output import build_console, guard_log, print_plain, progress

if TYPE_CHECKING:
    from rich.console import Console

    from ..doctor.command.stages import Builder
    from ..doctor.facts.file_facts import ConfigFile

RECIPES = ("sft", "grpo")
OWN_TRAINER = "--trainer MODULE:FUNCTION, a function of yours that returns a trainer"
OWN_RUN = "its YAML file, its output folder"
# Kinds of files whose trainer only their own framework can build.
KINDS = {
    "axolotl": "a file of axolotl", "llamafactory": "a file of LlamaFactory", "accelerate": "a file of accelerate", "deepspeed": "a file of DeepSpeed",
    "run": "the folder of a run", "trainer": "a trainer",
}  # fmt: skip
HELP = ("-h", "--help")

EPILOG = """stages, from cheap to expensive:
  rules  settings, precision and resources judged by rules, in seconds
  data   a sample of the training data, through the trainer's own preparation and collator
  laws   relations that must hold for your model, data, loss and kernels (docs/laws.md)
  steps  a few steps with the guard, measured: best, acceptable or failed
  --only and --skip take names of stages, separated by commas; --skip also names of rules, checks, laws and topics (precision,
  hyperparameters, resources). Stages after rules need a trainer: they build that of `nanguard sft` or `nanguard grpo`
  from the file and the flags, or yours with --trainer. Nothing is written to the output_dir of the file.

files:
  arguments of a recipe, of a TRL script or of the Trainer; an axolotl file; a file of accelerate, alone or beside
  another; one of DeepSpeed; or the folder of a run. All flags of `nanguard sft` and `nanguard grpo` work and take precedence.

examples:
  nanguard doctor my.yaml
  nanguard doctor my.yaml accelerate.yaml --only rules
  nanguard doctor my.yaml --only data --full --show 3
  nanguard doctor my.yaml --only data --full --quarantine runs/mine
  nanguard doctor my.yaml --skip steps --json | jq .findings
  nanguard doctor --trainer my_module:build --steps 40
  nanguard doctor --env
  nanguard doctor --task grpo --preset balanced --model_name_or_path my-model --dataset_name my-prompts \\
      --reward_funcs my_module.score

exit codes: 0 if nothing above a note was found, 1 if something was, 2 for bad arguments, 130 for Ctrl-C
"""
# Our own flags and whether each takes a value; all others are those of a recipe.
FLAGS = {
    "--only": True, "--skip": True, "--trainer": True, "--task": True, "--steps": True, "--memory_limit": True,
    "--memory-limit": True, "--sample": True, "--show": True, "--quarantine": True, "--full": False, "--env": False, "--output_dir": True, "--output-dir": True, "--config": True, "--json": False,
}  # fmt: skip


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="check a configuration and its data before the run",
        usage="nanguard doctor [CONFIG.yaml ...] [--trainer MODULE:FUNCTION] [--only STAGES] [--skip STAGES] [--json] "
        "[any flag of nanguard sft or grpo]",
        description="Finds what is wrong with a configuration before its first step, and says what to change. Without a\n"
        "file, a trainer or a model it checks the built-in task.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "files", nargs="*", metavar="CONFIG", help="YAML files, or the folder of a run; before any flag"
    )
    parser.add_argument("--config", metavar="FILE", help="the same as a CONFIG")
    parser.add_argument(
        "--trainer", metavar="MODULE:FUNCTION", help="a function without arguments that returns a trainer"
    )
    parser.add_argument("--only", type=_names, default=(), metavar="STAGES", help="run only these stages")
    parser.add_argument(
        "--skip", type=_names, default=(), metavar="NAMES", help="leave out these stages, rules or topics"
    )
    parser.add_argument(
        "--task", help="kind of training, if the file does not say it (sft, grpo, dpo, kto, reward, rloo)"
    )
    parser.add_argument(
        "--sample", type=between(1, 10**9), default=2000, metavar="N", help="rows to check (default: %(default)s)"
    )
    parser.add_argument("--full", action="store_true", help="check all rows")
    parser.add_argument(
        "--show",
        type=between(0, 1000),
        default=0,
        metavar="N",
        help="print N rows, with the tokens that are learned marked",
    )
    parser.add_argument("--quarantine", metavar="OUTPUT_DIR",
                        help="write bad rows to quarantine.jsonl of the run with this output_dir, which leaves them out")  # fmt: skip
    parser.add_argument(
        "--env", action="store_true", help="print versions, devices, dtypes and active parts of the guard, and exit"
    )
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")
    parser.add_argument(
        "--steps", type=between(2, 100_000), default=20, metavar="N", help="measured steps (default: %(default)s)"
    )
    parser.add_argument(
        "--memory_limit",
        "--memory-limit",
        type=_gigabytes,
        metavar="GB",
        help="memory of the device that will train; an error if the run needs more",
    )
    parser.add_argument("--output_dir", "--output-dir", metavar="FOLDER",
                        help="folder for events and autopsies (default: a new folder here, kept if there are events)")  # fmt: skip
    parser.set_defaults(run=run)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


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
    """Splits a command line into our own words and those of a recipe. Files come before the first flag."""
    if any(word in HELP for word in words):
        return [words[0], HELP[1]], []
    own, rest = [words[0]], list(words[1:])
    others: list[str] = []
    while rest and not rest[0].startswith("-"):
        own.append(rest.pop(0))
    while rest:
        word = rest.pop(0)
        name, has_value = word.split("=")[0], "=" in word
        (own if name in FLAGS else others).append(word)
        if FLAGS.get(name) and not has_value and rest:
            own.append(rest.pop(0))
    return own, others


def run(arguments: argparse.Namespace) -> int:
    """Runs the stages and returns the exit code."""
    if arguments.env:
        return show_environment(arguments.json)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ArgumentError(
            f"nanguard doctor must run in one process, got WORLD_SIZE={os.environ['WORLD_SIZE']}. Start it without a launcher."
        )
    with needs_trl("doctor"):
        from ..doctor.command.printed_report import print_end, print_precision
        from ..doctor.command.stages import Options, run_stages
        from ..examples.compare import quiet_hosts
        from ..examples.output_folder import make_folder
        from ..examples.recipe.guarded_run import stdout_aside

    quarantine = None if arguments.quarantine is None else make_folder("--quarantine", arguments.quarantine)
    options = Options(
        arguments.only, arguments.skip, None if arguments.full else arguments.sample, arguments.show, arguments.steps,
        arguments.memory_limit, quarantine,
    )  # fmt: skip
    files = read_files(arguments)
    console = build_console(stderr=arguments.json)
    obstacle = find_obstacle(arguments, files)
    if not (files or arguments.words or arguments.trainer or obstacle):
        print_plain(console, f"note: the built-in task is checked. For your own run give {OWN_RUN}, or {OWN_TRAINER}.")
    if files and obstacle is not None and not arguments.only:
        options = replace(options, only=("rules",))
        print_plain(
            console, f"note: only rules are checked, because {obstacle}. For the other stages give {OWN_TRAINER}."
        )
    with _open_folder(arguments.output_dir) as folder:
        build = find_builder(arguments, files, folder, console)
        with stdout_aside(arguments.json), quiet_hosts(), guard_log(console), progress(console) as begin:
            checkup = run_stages(options, files, build, folder, console, begin)
    if arguments.json:
        print(json.dumps(checkup.as_dict(), indent=2, allow_nan=False))
    else:
        print_precision(console, checkup.precision)
        print_end(console, checkup)
    return checkup.exit_code


def show_environment(as_json: bool) -> int:
    """Prints what this machine and its packages allow."""
    with needs_trl("doctor --env"):
        from ..doctor.command.environment import find_environment, print_environment

    found = find_environment()
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        print_environment(build_console(), found)
    return 0


def read_files(arguments: argparse.Namespace) -> list[ConfigFile]:
    """Returns what the files say, with the flags of a recipe above them."""
    from ..doctor.facts.config_file import read_config
    from ..doctor.facts.host_configs import TASKS

    if arguments.task is not None and arguments.task not in TASKS:
        raise ArgumentError(f"--task must be one of {', '.join(TASKS)}, got {arguments.task!r}.")
    paths = [*arguments.files, *([arguments.config] if arguments.config else [])]
    return [read_config(path, arguments.task, _pair(arguments.words)) for path in paths]


def _pair(words: Sequence[str]) -> dict[str, str]:
    """Returns the flags of a command line with their values; a switch is true."""
    flags: dict[str, str] = {}
    for word, following in pairwise([*words, "--"]):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            flags[name.replace("-", "_")] = value or ("true" if following.startswith("--") else following)
    return flags


def find_builder(arguments: argparse.Namespace, files: Sequence[ConfigFile], folder: Path, console: Console) -> Builder:
    """Returns the function that builds the trainer: the user's own, or that of a recipe."""
    from ..doctor.command.own_trainer import build_own

    if arguments.trainer is not None:
        return partial(build_own, arguments.trainer)
    obstacle = find_obstacle(arguments, files)
    if obstacle is not None:
        return partial(refuse, f"These stages need a trainer, but {obstacle}. Give {OWN_TRAINER}, or --only rules.")
    given = [file for file in files if file.kind == "arguments"]
    words = [*arguments.words, *(["--config", given[0].path] if given else [])]
    return partial(build_recipe, find_task(arguments, given), words, folder, console, arguments.steps)


def find_obstacle(arguments: argparse.Namespace, files: Sequence[ConfigFile]) -> str | None:
    """Returns why no trainer can be built from the files, as a clause; `None` if one can."""
    given = [file for file in files if file.kind == "arguments"]
    if arguments.trainer is not None:
        return None
    if files and not given:
        return f"nanguard cannot build a trainer from {KINDS[files[0].kind]}"
    task = find_task(arguments, given)
    return None if task in RECIPES else f"nanguard builds trainers of {' and '.join(RECIPES)} only, not of {task}"


def find_task(arguments: argparse.Namespace, given: Sequence[ConfigFile]) -> str:
    """Returns the kind of training of the files, that of the built-in task without any."""
    task = arguments.task or next((file.facts.task for file in given), "sft")
    return "sft" if task == "trainer" else str(task)


def refuse(sentence: str) -> NoReturn:
    """Raises that there is no way to build a trainer."""
    raise ArgumentError(sentence)


def build_recipe(task: str, words: Sequence[str], folder: Path, console: Console, num_steps: int) -> Any:
    """Builds the trainer of a recipe, which writes to `folder`."""
    recipe = load_recipe("doctor", task)
    parser = recipe.make_parser(f"nanguard {task}")
    flags, script, args, model, mixture = parser.parse(words)
    if flags.compare:
        raise ArgumentError(f"--compare must not be given here. Run `nanguard {task} --compare`.")
    args.output_dir, args.report_to, args.disable_tqdm, args.push_to_hub = str(folder), [], True, False
    if args.max_steps <= 0 and script.dataset_streaming:
        args.max_steps = num_steps  # a trainer of a stream cannot be built without it
    for note in parser.notes:
        print_plain(console, f"note: {note}")
    return recipe.build_trainer(script, model, mixture, args)


@contextmanager
def _open_folder(given: str | None) -> Iterator[Path]:
    """Yields the given folder, or a new one in the current folder, which is removed if it contains no events."""
    from ..examples.output_folder import make_folder

    if given is not None:
        yield make_folder("--output_dir", given)
        return
    folder = make_folder("--output_dir", f"nanguard-doctor-{new_run_id()}")
    try:
        yield folder
    finally:
        if not events_path(folder / GUARD_FOLDER, 0).is_file():
            shutil.rmtree(folder, ignore_errors=True)
