"""`nanguard run`: runs a script, a module or a command as it is, with every Trainer that it builds under guard."""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..takeover.script_target import find_target
from .setting_flags import CONFIG_VARIABLE, add_flags, as_environment, gather

if TYPE_CHECKING:
    from ..takeover.takeover import Takeover

PACKAGE = str(Path(__file__).parent.parent) + os.sep
STARTUP = str(Path(__file__).parent.parent / "takeover" / "startup")
MARK = (
    "HF_NANGUARD_RUN"  # in the environment of child processes: the folder in which they tell that they built a trainer
)
WITH_VALUE = ("--config", "--nanguard_")

EPILOG = """settings:
  A flag wins over an environment variable, that over the YAML file of --config, that over what the
  script says itself (guarded trainers and configs), and that over the default. Every setting has a
  variable: NANGUARD_ON_SPIKE=skip is --nanguard_on_spike skip, and NANGUARD_CONFIG=guard.yaml is
  --config guard.yaml. In YAML: "nanguard_on_spike: skip", one setting a line.

examples:
  nanguard run train.py --learning_rate 1e-4
  nanguard run --nanguard_on_spike skip -- train.py --help
  nanguard run --config guard.yaml -m my_package.train --epochs 3
  nanguard run trl sft --model_name_or_path my-model --dataset_name my-data --output_dir out
  torchrun --nproc_per_node 2 -m hf_nanguard.run train.py
  accelerate launch -m hf_nanguard.run --nanguard_mode observe train.py
  nanguard run accelerate launch train.py

exit codes: the script's own; 2 for bad arguments, before it starts; 130 for Ctrl-C
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="run a training script you already have, under guard",
        usage="nanguard run [options] [--] script.py ... | -m module ... | command ...",
        description="Runs a script, a module or a Python command as it is, in this process. Every transformers.Trainer\n"
        "and TRL trainer that it, or a process it starts, builds is guarded. What comes after the script is the\n"
        "script's own.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("script", nargs="*", help="what to run, and its own arguments")
    parser.add_argument("--config", metavar="FILE", help="a YAML file with settings of the guard")
    parser.add_argument("--full-traceback", action="store_true", help="show the guard's own frames in tracebacks")
    add_flags(parser.add_argument_group("settings of the guard"))
    parser.set_defaults(run=run)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns our own words of a command line that begins with `run`, and those of what is to be run."""
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
    """Runs what was named and returns its exit code."""
    settings = gather(vars(arguments), os.environ, arguments.config)
    target = find_target(arguments.words)
    from ..takeover.takeover import Takeover

    with _guarded_children(settings) as folders:
        with Takeover(settings, say, lambda: _leave_mark(folders)) as takeover:
            try:
                target.execute()
            except SystemExit as stop:
                if not stop.code:
                    _tell_if_idle(takeover, folders)
                raise
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # the script's own, shown as Python would show it
                _show(error, arguments.full_traceback)
                return 1
            _tell_if_idle(takeover, folders)
    return 0


def _tell_if_idle(takeover: Takeover, folders: list[Path]) -> None:
    is_first = os.environ.get("RANK", "0") == "0" and os.getpid() == takeover.process
    if not takeover.num_built and is_first and not any(folders[0].iterdir()):
        say("no Trainer was built, so nothing was guarded.")


def say(sentence: str) -> None:
    """Tells the user something, beside the output of the script."""
    print(f"nanguard: {sentence}", file=sys.stderr, flush=True)


# ---- child processes ----


@contextmanager
def _guarded_children(settings: dict[str, Any]) -> Iterator[list[Path]]:
    """Makes Python processes that are started meanwhile take over their trainers too; yields where a trainer leaves its
    mark, this run's folder first: one may run inside another."""
    before, process = dict(os.environ), os.getpid()
    paths = [STARTUP, *filter(None, [os.environ.get("PYTHONPATH")])]
    folder = tempfile.mkdtemp(prefix="nanguard-run-")
    added = {**as_environment(settings), "PYTHONPATH": os.pathsep.join(paths), MARK: folder}
    os.environ.update(added)
    os.environ.pop(CONFIG_VARIABLE, None)  # all it says is among the settings, and a child may start elsewhere
    try:
        yield [Path(folder), *([Path(before[MARK])] if MARK in before else [])]
    finally:
        for name in (*added, CONFIG_VARIABLE):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        if os.getpid() == process:  # a script may fork and end both
            shutil.rmtree(folder, ignore_errors=True)


def take_over_child() -> None:
    """Guards the trainers of a process that a guarded one has started, until it ends."""
    from ..takeover.takeover import Takeover

    folder = os.environ.get(MARK)
    if folder is not None:
        folders = [Path(folder)]
        takeover = Takeover(gather({}, os.environ), say, lambda: _leave_mark(folders))
        atexit.register(takeover.tell_events)
        takeover.__enter__()


def _leave_mark(folders: list[Path]) -> None:
    for folder in folders:
        if folder.is_dir():
            (folder / str(os.getpid())).touch()


# ---- what went wrong in the script ----


def _show(error: BaseException, full: bool) -> None:
    num_hidden = 0 if full else _hide_frames(error, set())
    sys.excepthook(type(error), error, error.__traceback__)
    if num_hidden:
        hidden = "1 frame of the guard is" if num_hidden == 1 else f"{num_hidden} frames of the guard are"
        say(f"{hidden} not shown above; --full-traceback shows what is missing.")


def _hide_frames(error: BaseException | None, seen: set[int]) -> int:
    """Takes our frames out of the traceback of an error and of those it came from. Those that led to the script go
    uncounted; if we raised it ourselves, the others stay. Returns how many went."""
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
