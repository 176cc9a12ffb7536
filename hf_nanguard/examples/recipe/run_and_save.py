"""Builds the trainer of a recipe, trains and saves. Errors about arguments and data become one sentence."""

import signal
import sys
import threading
from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from types import FrameType
from typing import Any

from huggingface_hub.errors import HTTPError
from transformers import Trainer, TrainerCallback

from ...errors import ArgumentError, NanGuardError
from ...plain_text import printable
from .recipe_parser import RecipeArguments

# Raised by host libraries for bad arguments and data: values, missing packages, files, columns of another type, the hub.
INPUT_ERRORS = (
    AttributeError, HTTPError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError, ZeroDivisionError,
)  # fmt: skip


def convert_error(trainer_class: type, error: Exception) -> ArgumentError:
    """Returns an error of a host library about arguments or data as one sentence."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    kind = f"the hub: {kind}" if isinstance(error, HTTPError) else kind
    return ArgumentError(
        f"{trainer_class.__name__} refused its arguments or data: {kind}{printable(str(error).strip())}"
    )


def build(trainer_class: type, **parts: Any) -> Trainer:
    """Builds a trainer. A model that is a function is built now, for this trainer alone."""
    try:
        model = parts.pop("model")
        trainer = trainer_class(model=model() if callable(model) else model, **parts)
    except NanGuardError:
        raise
    except INPUT_ERRORS as error:
        raise convert_error(trainer_class, error) from error
    if isinstance(trainer.train_dataset, Sized) and not len(trainer.train_dataset):
        raise ArgumentError(
            "the training data must contain a row with labels, got none. If rows are cut off before their answers, raise "
            "--max_length."
        )
    return trainer


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


def train_and_save(trainer: Trainer, arguments: RecipeArguments) -> None:
    """Trains, saves the model, and pushes it to the hub if asked to, as TRL's scripts do."""
    args = arguments.training
    watch = StepWatch()
    trainer.add_callback(watch)
    with watch.handling_ctrl_c():
        try:
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        except NanGuardError:
            raise
        except INPUT_ERRORS as error:
            if not isinstance(error, watch.input_errors):
                raise
            raise convert_error(type(trainer), error) from error
        if not trainer.state.global_step:
            raise ArgumentError(
                "no step was taken because the training data has too few rows. Lower --per_device_train_batch_size, or add "
                "rows."
            )
        trainer.save_model(args.output_dir)
    watch.raise_if_pressed()
    trainer.accelerator.print(f"model: {args.output_dir}")
    if args.push_to_hub:
        try:
            trainer.push_to_hub(dataset_name=arguments.script.dataset_name)
        except (HTTPError, OSError, ValueError) as error:
            raise ArgumentError(
                f"--push_to_hub failed ({printable(str(error))}). The model is in {args.output_dir}."
            ) from error


def stdout_aside(is_json: bool) -> AbstractContextManager:
    """Redirects what host libraries, callbacks and reward functions print to standard error if standard output is for JSON."""
    return redirect_stdout(sys.stderr) if is_json else nullcontext()
