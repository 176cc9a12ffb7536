"""How a recipe runs: its exit code, errors of arguments in one sentence, Ctrl-C between steps, and the outcome printed."""

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from functools import wraps
from types import FrameType
from typing import Any, TypeAlias

import torch.distributed as dist
from accelerate import PartialState
from huggingface_hub.errors import HTTPError
from transformers import Trainer, TrainerCallback

from ...command_exit import exit_code, handled_signals, is_local_first
from ...core.event import strict
from ...errors import ArgumentError, NanGuardError, NonFiniteError
from ...plain_text import printable
from ...report.terminal_console import build_console, print_line
from ..compare import Figures, Outcome, print_comparison, watch_run
from .recipe_parser import RecipeParser

# Raised by host libraries for bad arguments and data: values, missing packages, files, columns of another type, the hub.
INPUT_ERRORS = (
    AttributeError, HTTPError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError, ZeroDivisionError,
)  # fmt: skip
Main: TypeAlias = Callable[..., list[Outcome]]


def run_script(make_parser: Callable[[], RecipeParser], main: Main, words: Sequence[str] | None = None) -> int:
    """Runs a recipe as a script and returns its exit code: 0, 1 if its run was not sound, 2 for bad arguments, 130 for Ctrl-C."""
    return exit_code(lambda: run_recipe(make_parser(), main, words))


def run_recipe(parser: RecipeParser, main: Main, words: Sequence[str] | None = None) -> int:
    """Runs a recipe and returns 0, or 1 if its guarded run was not sound. With `--json`, prints the outcomes as one object.

    `main` is called with the objects that the parser returns, and returns the outcomes of its runs, the guarded one last.
    """
    flags, *parsed = parser.parse(words)
    try:
        with stdout_aside(flags.json):
            if is_local_first():
                for note in parser.notes:
                    print(printable(f"note: {note}"))
            outcomes = main(flags, *parsed)
        is_sound = outcomes[-1].is_sound
        if flags.json and PartialState().is_main_process:
            runs = [outcome.as_dict() for outcome in outcomes]
            print(json.dumps(strict({"task": parser.kind, "is_sound": is_sound, "runs": runs}), allow_nan=False))
        return 0 if is_sound else 1
    finally:
        if dist.is_initialized():  # torch may abort a rank that leaves its group open
            dist.destroy_process_group()


def stdout_aside(is_json: bool) -> AbstractContextManager:
    """Redirects what host libraries, callbacks and reward functions print to standard error if standard output is for JSON."""
    return redirect_stdout(sys.stderr) if is_json else nullcontext()


def one_sentence(build_trainer: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that builds a trainer: errors of host libraries become one sentence, and empty data are refused."""

    @wraps(build_trainer)
    def build(*args: object, **kwargs: object) -> object:
        with _translated(_StepWatch()):
            trainer = build_trainer(*args, **kwargs)
        if isinstance(trainer.train_dataset, Sized) and not len(trainer.train_dataset):
            raise ArgumentError(
                "the training data must contain a row with labels, got none. If rows are cut off before their answers, "
                "raise --max_length."
            )
        return trainer

    return build


@contextmanager
def guarded_run(
    trainer: Trainer, measure: Callable[[Trainer], Figures] = lambda trainer: {}, planted: str | None = None
) -> Iterator[Outcome]:
    """Context manager for `train` and `save_model` of a recipe: yields the outcome, and prints it at the end.

    A halt by the guard is an outcome. Other errors until the end of the first step become one sentence, because they are
    about arguments or data. Ctrl-C ends the run between two steps. `measure` is called at the end of a run that was not
    halted, and returns figures by name. `planted` is a sentence about a planted failure, printed first.
    """
    console = build_console(quiet=not trainer.is_world_process_zero())
    if planted:
        print_line(console, planted)
    watch = _StepWatch()
    trainer.add_callback(watch)
    with watch.handling_ctrl_c(), _translated(watch), watch_run("guarded", trainer, measure, NonFiniteError) as outcome:
        yield outcome
        watch.raise_if_pressed()
    if outcome.error is not None:
        text = outcome.error.removeprefix(f"{NonFiniteError.__name__}: ")
        print(f"nanguard: {printable(text)}", file=sys.stderr)
    print_comparison([outcome], console)
    if outcome.error is None:
        print_line(console, f"model: {outcome.folder}")
    trainer.accelerator.end_training()


class _StepWatch(TrainerCallback):
    """Ends a run between two steps after Ctrl-C, and knows whether an error is about arguments or data.

    Ctrl-C waits for the end of the step, so that no file is half written; pressed again, it ends the run at once. Most
    errors before the first step are about arguments or data, a `ValueError` in the first step is, and later only those of
    the hub are.
    """

    def __init__(self) -> None:
        self.pressed = False
        self.input_errors: tuple[type[Exception], ...] = INPUT_ERRORS

    def on_step_begin(self, args, state, control, **kwargs):
        if self.input_errors is INPUT_ERRORS:
            self.input_errors = (ValueError,)

    def on_step_end(self, args, state, control, **kwargs):
        self.input_errors = (HTTPError,)
        self.raise_if_pressed()

    def on_train_end(self, args, state, control, **kwargs):
        if not state.global_step:
            raise ArgumentError(
                "no step was taken because the training data has too few rows. Lower --per_device_train_batch_size, or add "
                "rows."
            )

    def raise_if_pressed(self) -> None:
        """Ends the run if Ctrl-C was pressed."""
        if self.pressed:
            raise KeyboardInterrupt

    def handling_ctrl_c(self) -> AbstractContextManager[None]:
        """Handles Ctrl-C inside the context; only the main thread of a process can."""
        is_main = threading.current_thread() is threading.main_thread()
        return handled_signals([signal.SIGINT], self._press) if is_main else nullcontext()

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt("at once, so a file may be half written")
        self.pressed = True
        print("nanguard: stopping after this step; press Ctrl-C again to stop at once.", file=sys.stderr)


@contextmanager
def _translated(watch: _StepWatch) -> Iterator[None]:
    """Turns errors of host libraries about arguments or data into an [`ArgumentError`]."""
    try:
        yield
    except NanGuardError:
        raise
    except INPUT_ERRORS as error:
        if not isinstance(error, watch.input_errors):
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        kind = f"the hub: {kind}" if isinstance(error, HTTPError) else kind
        raise ArgumentError(f"the trainer refused its arguments or data: {kind}{str(error).strip()}") from error
