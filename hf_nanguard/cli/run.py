"""`nanguard run`: runs an unchanged script, module or command, and guards every Trainer that it builds."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ..takeover.child_processes import guard_children, mark_built, say
from ..takeover.script_target import find_target
from ..takeover.takeover import Takeover
from .shared.command_parser import Subparsers
from .shared.setting_flags import CONFIG_VARIABLE, add_flags, as_environment, gather

PACKAGE = str(Path(__file__).parent.parent) + os.sep
WITH_VALUE = ("--config", "--nanguard_")

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

exit codes: those of the script; 2 for bad arguments, before it starts; 130 for Ctrl-C
"""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="run an existing training script with the guard",
        usage="nanguard run [options] [--] script.py ... | -m module ... | command ...",
        description="Runs a script, a module or a Python command, unchanged, in this process. Guards every\n"
        "transformers.Trainer and TRL trainer that it builds, also in processes that it starts. All words after the\n"
        "script are passed to it.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("script", nargs="*", help="what to run, and its own arguments")
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings of the guard")
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
    """Runs the script and returns its exit code."""
    settings = gather(vars(arguments), os.environ, arguments.config)
    target = find_target(arguments.words)
    # The settings include those of the YAML file, whose relative path a child in another folder could not read.
    variables = {**as_environment(settings), CONFIG_VARIABLE: None}
    with (
        guard_children(settings, variables) as folders,
        Takeover(settings, say, lambda: mark_built(folders)) as takeover,
    ):
        try:
            target.execute()
        except SystemExit as stop:
            if not stop.code:
                _report_no_trainer(takeover, folders[0])
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of the script, shown as Python would show it
            _show(error, arguments.full_traceback)
            return 1
        _report_no_trainer(takeover, folders[0])
    return 0


def _report_no_trainer(takeover: Takeover, folder: str) -> None:
    is_first = os.environ.get("RANK", "0") == "0" and os.getpid() == takeover.process
    if not takeover.num_built and is_first and not os.listdir(folder):
        say("no Trainer was built, so nothing was guarded.")


def _show(error: BaseException, full: bool) -> None:
    num_hidden = 0 if full else _hide_frames(error, set())
    sys.excepthook(type(error), error, error.__traceback__)
    if num_hidden:
        say(
            f"{num_hidden} frame{'' if num_hidden == 1 else 's'} of the guard hidden above; --full-traceback shows all."
        )


def _hide_frames(error: BaseException | None, seen: set[int]) -> int:
    """Removes the guard's frames from the tracebacks of an error and of its causes, and returns how many.

    Frames above the script's first one are removed without being counted. If the guard itself raised the error, the
    frames below that one stay.
    """
    if error is None or id(error) in seen:
        return 0
    seen.add(id(error))
    frames, entry = [], error.__traceback__
    while entry is not None:
        frames.append(entry)
        entry = entry.tb_next
    ours = [frame.tb_frame.f_code.co_filename.startswith(PACKAGE) for frame in frames]
    first = ours.index(False) if False in ours else len(frames)
    keep_rest = bool(ours) and ours[-1]
    kept = [frame for frame, own in zip(frames[first:], ours[first:], strict=True) if keep_rest or not own]
    entry = None
    for frame in reversed(kept):
        entry = TracebackType(entry, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = entry
    num_hidden = len(frames) - first - len(kept)
    return num_hidden + _hide_frames(error.__cause__, seen) + _hide_frames(error.__context__, seen)
