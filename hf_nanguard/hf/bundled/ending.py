"""How a recipe runs its trainer to the end and tells what came of it."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from typing import Any

from transformers import TrainerCallback

from ...errors import ArgumentError
from .dialect import Plan


def build(trainer_class: type, **parts: Any) -> Any:
    """Builds a trainer; what the host refuses about its arguments is told in a sentence."""
    try:
        return trainer_class(**parts)
    except ArgumentError:
        raise
    except ValueError as error:
        raise ArgumentError(
            f"{trainer_class.__name__} refused its arguments: {' '.join(str(error).split())}"
        ) from error


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
            raise KeyboardInterrupt
        self.pressed = True
        print("nanguard: stopping after this step; Ctrl-C again stops at once.", file=sys.stderr)


def train_and_save(trainer: Any, plan: Plan) -> None:
    """Trains, and saves the model as TRL's scripts do."""
    args = plan.training
    interruption = Interruption()
    trainer.add_callback(interruption)
    with interruption.listening():
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model(args.output_dir)
    interruption.raise_if_pressed()
    trainer.accelerator.print(f"model: {args.output_dir}")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=plan.script.dataset_name)


def is_whole(trainer: Any) -> bool:
    """Returns whether this process holds the whole model, so that it can be asked by itself."""
    return not trainer.is_fsdp_enabled and not trainer.is_deepspeed_enabled


def stdout_aside(is_json: bool) -> AbstractContextManager:
    """Leaves standard output to a JSON object: what hosts, callbacks and reward functions print meanwhile is none."""
    return redirect_stdout(sys.stderr) if is_json else nullcontext()
