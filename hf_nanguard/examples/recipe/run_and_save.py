"""How a recipe runs its trainer to the end and tells what came of it."""

import signal
import sys
import threading
from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import Any

from huggingface_hub.errors import HTTPError
from transformers import TrainerCallback

from ...errors import ArgumentError, NanGuardError
from .recipe_parser import RecipeArguments

# How host libraries complain about arguments and data: values, packages that are missing, files, rows of another form, the hub.
COMPLAINTS = (
    AttributeError, HTTPError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError, ZeroDivisionError,
)  # fmt: skip


def refuse(trainer_class: type, error: Exception) -> ArgumentError:
    """Returns what the host complains about in a sentence."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    kind = f"the hub: {kind}" if isinstance(error, HTTPError) else kind
    return ArgumentError(
        f"{trainer_class.__name__} refused its arguments or data: {kind}{' '.join(str(error).split())}"
    )


def build(trainer_class: type, **parts: Any) -> Any:
    """Builds a trainer; what the host refuses about its arguments is told in a sentence."""
    try:
        trainer = trainer_class(**parts)
    except NanGuardError:
        raise
    except COMPLAINTS as error:
        raise refuse(trainer_class, error) from error
    if isinstance(trainer.train_dataset, Sized) and not len(trainer.train_dataset):
        raise ArgumentError(
            "the training data must have a row with something to learn, got none. If they are cut off before their answers, "
            "raise --max_length."
        )
    return trainer


class Beginning(TrainerCallback):
    """Knows which errors are complaints about arguments and data: most before the first step, some in it, none later."""

    def __init__(self) -> None:
        self.complaints: tuple[type[Exception], ...] = COMPLAINTS

    def on_step_begin(self, args, state, control, **kwargs):
        self.complaints = self.complaints and (ValueError,)

    def on_step_end(self, args, state, control, **kwargs):
        self.complaints = ()


class Interruption(TrainerCallback):
    """Ctrl-C ends a run between two steps, so that no file is half written; pressed again, at once."""

    def __init__(self) -> None:
        self.pressed = False

    def on_step_end(self, args, state, control, **kwargs):
        self.raise_if_pressed()

    def raise_if_pressed(self) -> None:
        """Ends the run if Ctrl-C was pressed."""
        if self.pressed:
            raise KeyboardInterrupt

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hears Ctrl-C meanwhile; only a process's main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._press)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _press(self, number: int, frame: Any) -> None:
        if self.pressed:
            raise KeyboardInterrupt("at once, so a file may be half written")
        self.pressed = True
        print("nanguard: stopping after this step; Ctrl-C again stops at once.", file=sys.stderr)


def train_and_save(trainer: Any, plan: RecipeArguments) -> None:
    """Trains, and saves the model as TRL's scripts do."""
    args = plan.training
    interruption, beginning = Interruption(), Beginning()
    trainer.add_callback(interruption)
    trainer.add_callback(beginning)
    with interruption.listening():
        try:
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        except NanGuardError:
            raise
        except COMPLAINTS as error:
            if not isinstance(error, beginning.complaints):
                raise
            raise refuse(type(trainer), error) from error
        if not trainer.state.global_step:
            raise ArgumentError(
                "the training data must have rows for a step, got too few, so that no step was taken. Lower "
                "--per_device_train_batch_size, or add rows."
            )
        trainer.save_model(args.output_dir)
    interruption.raise_if_pressed()
    trainer.accelerator.print(f"model: {args.output_dir}")
    if args.push_to_hub:
        push(trainer, plan)


def push(trainer: Any, plan: RecipeArguments) -> None:
    """Puts the model on the hub; if that fails, it is still in its folder."""
    try:
        trainer.push_to_hub(dataset_name=plan.script.dataset_name)
    except (HTTPError, OSError, ValueError) as error:
        raise ArgumentError(
            f"--push_to_hub failed ({' '.join(str(error).split())}). The model is in {plan.training.output_dir}."
        ) from error


def is_whole(trainer: Any) -> bool:
    """Returns whether this process holds the whole model, so that it can be asked by itself."""
    return not trainer.is_fsdp_enabled and not trainer.is_deepspeed_enabled


def stdout_aside(is_json: bool) -> AbstractContextManager:
    """Leaves standard output to a JSON object: what hosts, callbacks and reward functions print meanwhile is none."""
    return redirect_stdout(sys.stderr) if is_json else nullcontext()
