"""The trainer of a recipe: built, trained and saved, or compared with a stock one. Bad arguments are one sentence."""

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate import PartialState
from huggingface_hub.errors import HTTPError
from transformers import Trainer, TrainerCallback, TrainingArguments

from ...core.event import strict
from ...errors import ArgumentError, NanGuardError, NonFiniteError
from ...hf.guarded_trainer import guarded
from ...plain_text import printable
from ...report.run_files import GUARD_FOLDER, Tail, count_events, events_path, format_counts
from ..compare import Figures, Options, compare_runs
from .command_line import check_output
from .recipe_parser import RecipeArguments

# Raised by host libraries for bad arguments and data: values, missing packages, files, columns of another type, the hub.
INPUT_ERRORS = (
    AttributeError, HTTPError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError, ZeroDivisionError,
)  # fmt: skip
Measure = Callable[[Trainer], Figures]


class StepWatch(TrainerCallback):
    """Ends a run between two steps after Ctrl-C, and knows whether an error is about arguments or data.

    Ctrl-C waits for the end of the step, so that no file is half written; pressed again, it ends the run at once. Most
    errors before the first step are about arguments or data, a `ValueError` in the first step is, and no later error.
    """

    def __init__(self) -> None:
        self.pressed = False
        self.input_errors: tuple[type[Exception], ...] = INPUT_ERRORS

    def on_step_begin(self, args, state, control, **kwargs):
        self.input_errors = self.input_errors and (ValueError,)

    def on_step_end(self, args, state, control, **kwargs):
        self.input_errors = ()
        self.raise_if_pressed()

    def raise_if_pressed(self) -> None:
        """Ends the run if Ctrl-C was pressed."""
        if self.pressed:
            raise KeyboardInterrupt

    @contextmanager
    def handling_ctrl_c(self) -> Iterator[None]:
        """Handles Ctrl-C inside the context; only the main thread of a process can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._press)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt("at once, so a file may be half written")
        self.pressed = True
        print("nanguard: stopping after this step; press Ctrl-C again to stop at once.", file=sys.stderr)


@contextmanager
def one_sentence(trainer_class: type, watch: StepWatch) -> Iterator[None]:
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
        raise ArgumentError(
            f"{trainer_class.__name__} refused its arguments or data: {kind}{str(error).strip()}"
        ) from error


def build(trainer_class: type, **parts: Any) -> Any:
    """Builds a trainer. A model that is a function is built now, for this trainer alone."""
    with one_sentence(trainer_class, StepWatch()):
        model = parts.pop("model")
        trainer = trainer_class(model=model() if callable(model) else model, **parts)
    if isinstance(trainer.train_dataset, Sized) and not len(trainer.train_dataset):
        raise ArgumentError(
            "the training data must contain a row with labels, got none. If rows are cut off before their answers, raise "
            "--max_length."
        )
    return trainer


def train_and_save(trainer: Trainer, arguments: RecipeArguments, measure: Measure) -> Options:
    """Trains, saves and pushes as TRL's scripts do, prints what happened, and returns the result; a halt is one."""
    folder, error = arguments.training.output_dir, None

    def say(text: str) -> None:
        trainer.accelerator.print(printable(text))

    for note in arguments.notes:
        say(f"note: {note}")
    tail = Tail(events_path(Path(folder) / GUARD_FOLDER, 0))
    try:
        _train(trainer, arguments)
    except NonFiniteError as halt:
        error = str(halt)
        print(f"nanguard: {printable(error)}", file=sys.stderr)
    events = tail.read()
    counts, file = count_events(events), str(tail.path) if events else None
    say(f"events: {format_counts(counts)}" + (f", see {file}" if file else ""))
    return {
        "is_sound": error is None, "error": error, "steps": trainer.state.global_step, "output_dir": folder,
        "figures": measure(trainer) if error is None else {}, "events": dict(counts), "events_file": file,
    }  # fmt: skip


def _train(trainer: Trainer, arguments: RecipeArguments) -> None:
    args, watch = arguments.training, StepWatch()
    trainer.add_callback(watch)
    with watch.handling_ctrl_c():
        with one_sentence(type(trainer), watch):
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        if not trainer.state.global_step:
            raise ArgumentError(
                "no step was taken because the training data has too few rows. Lower --per_device_train_batch_size, or add "
                "rows."
            )
        trainer.save_model(args.output_dir)
    watch.raise_if_pressed()
    trainer.accelerator.print(printable(f"model: {args.output_dir}"))
    if args.push_to_hub:
        try:
            trainer.push_to_hub(dataset_name=arguments.script.dataset_name)
        except (HTTPError, OSError, ValueError) as error:
            raise ArgumentError(f"--push_to_hub failed ({error}). The model is in {args.output_dir}.") from error


def compare(
    stock: type,
    parts: Options,
    arguments: RecipeArguments,
    plant: Callable[[Trainer], None],
    sentence: str,
    measure: Measure,
) -> Options:
    """Runs a stock trainer and its guarded class on a planted failure, and returns the result."""

    def build_trainer(args: TrainingArguments, guard: bool) -> Trainer:
        trainer = build(guarded(stock) if guard else stock, args=args, **parts)
        plant(trainer)
        return trainer

    outcomes = compare_runs(build_trainer, arguments.training, sentence, measure)
    runs = [outcome.as_dict() for outcome in outcomes]
    return {"is_sound": outcomes[-1].is_sound, "planted": sentence, "runs": runs}


@contextmanager
def print_result(arguments: RecipeArguments) -> Iterator[Options]:
    """Makes the output folder and yields the result to be filled in; with `--json`, prints it at the end as one object."""
    check_output(arguments.training)
    result: Options = {"task": arguments.kind.name}
    with stdout_aside(arguments.flags.json):
        yield result
    if arguments.flags.json and PartialState().is_main_process:
        print(json.dumps(strict(result), allow_nan=False))


def stdout_aside(is_json: bool) -> AbstractContextManager:
    """Redirects what host libraries, callbacks and reward functions print to standard error if standard output is for JSON."""
    return redirect_stdout(sys.stderr) if is_json else nullcontext()
