"""`nanguard run`: runs an unchanged script, module or command, and guards every Trainer that it builds."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from ..errors import ArgumentError
from ..takeover.guarded_processes import build_environment, say
from ..takeover.script_target import find_command
from ..takeover.startup.sitecustomize import find_flags
from ..takeover.supervised_run import Supervisor, end_alike
from .shared.command_parser import Subparsers, between
from .shared.setting_flags import CONFIG_VARIABLE, add_flags, as_environment, gather

WITH_VALUE = ("--config", "--max-restarts", "--nanguard_")

EPILOG = """settings:
  Precedence, highest first: flag, environment variable, YAML file of --config, the script's own
  settings (guarded trainers and configs), default. Every setting has an environment variable:
  NANGUARD_ON_SPIKE=skip is --nanguard_on_spike skip, and NANGUARD_CONFIG=guard.yaml is
  --config guard.yaml. In YAML, write one setting per line: nanguard_on_spike: skip

examples:
  nanguard run train.py --learning_rate 1e-4
  nanguard run --nanguard_on_spike skip -- train.py --help
  nanguard run --config guard.yaml -m my_package.train --epochs 3
  nanguard run trl sft --model_name_or_path my-model --dataset_name my-data --output_dir out
  torchrun --nproc_per_node 2 -m hf_nanguard.run train.py
  accelerate launch -m hf_nanguard.run --nanguard_mode observe train.py
  nanguard run accelerate launch train.py
  nanguard run --resume --max-restarts 5 train.py

The script runs as with `python script.py`: arguments, sys.path, modules, signals, tracebacks and exit
code are the same, except for frames of the guard. Child processes are guarded if they are Python
processes that inherit the environment; any other is reported.

exit codes: those of the script; 2 for bad arguments, before it starts
"""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="run an existing training script with the guard",
        usage="nanguard run [options] [--] script.py ... | -m module ... | command ...",
        description="Runs a script, a module or a Python command, unchanged, as Python would. Guards every\n"
        "transformers.Trainer and TRL trainer that it builds, also in processes that it starts. All words after the\n"
        "script are passed to it.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("script", nargs="*", help="what to run, and its own arguments")
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings of the guard")
    parser.add_argument(
        "--resume", action="store_true",
        help="continue from the newest good checkpoint of the output folder, and start the script again after a crash, a "
        "halt or a kill; see docs/run.md",
    )  # fmt: skip
    parser.add_argument("--max-restarts", metavar="N", type=between(0, 1000), help="with --resume (default: 3)")
    parser.add_argument("--full-traceback", action="store_true", help="show the guard's own frames in tracebacks")
    add_flags(parser.add_argument_group("settings of the guard"))
    parser.set_defaults(run=run)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits a command line that begins with `run` into our own words and those of the script."""
    place = 1
    while place < len(words):
        word = words[place]
        if word == "--":
            return list(words[:place]), list(words[place + 1 :])
        if word == "-m" or not word.startswith("-"):
            break
        takes_value = word.startswith(WITH_VALUE) and "=" not in word
        place += 2 if takes_value else 1
    return list(words[:place]), list(words[place:])


def run(arguments: argparse.Namespace) -> int:
    """Replaces this process by the script, with the guard in its environment. Returns only where processes cannot do that."""
    settings = gather(vars(arguments), os.environ, arguments.config)
    if arguments.max_restarts is not None and not arguments.resume:
        raise ArgumentError(
            f"--max-restarts {arguments.max_restarts} must come with --resume, which restarts the script."
        )
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise ArgumentError("nanguard run cannot guard under -I, -E and -S of Python. Leave them out.")
    command = [sys.executable, *find_flags(sys.orig_argv), *find_command(arguments.words)]
    # The settings include those of the YAML file, whose relative path a child in another folder could not read.
    variables = {**os.environ, **as_environment(settings)}
    variables.pop(CONFIG_VARIABLE, None)
    environment = build_environment(variables, settings, arguments.full_traceback)
    if arguments.resume:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ArgumentError(
                "--resume restarts a launcher as a whole, so it goes before it: nanguard run --resume torchrun ... train.py."
            )
        supervisor = Supervisor(3 if arguments.max_restarts is None else arguments.max_restarts, say)
        return end_alike(
            supervisor.run(command, partial(build_environment, variables, settings, arguments.full_traceback))
        )
    if sys.platform == "win32":
        return subprocess.call(command, env=environment)
    os.execve(sys.executable, command, environment)
