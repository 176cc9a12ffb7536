"""A callback that watches the gradients of any trainer and reports them as they were before clipping."""

import logging
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback

from ...core.event import Culprit, Event
from ...core.finite import local, read_host
from ...core.rerun.skip import clear_gradients
from ...core.step.bad_gradients import Census, describe, format_bad_gradients, take_census
from ...core.vocabulary import Action, Cause, Signal
from ...errors import ArgumentError
from ...report.run_files import JsonlWriter, events_path
from ..compat.trainer import hold_schedule
from .gradient_tap import GradientTap

logger = logging.getLogger(__name__)


class GradientMonitorCallback(TrainerCallback):
    """Checks the gradients of every step, reports their norms, names the parameters that go bad.

    It only watches: to contain bad steps as well, add [`NanGuardCallback`] or use a guarded trainer.

    Args:
        check_every_n_steps (`int`, *optional*, defaults to `1`):
            How often the gradients are looked at: two fused reductions and one host read each time.
        log_every_n_steps (`int`, *optional*, defaults to `10`):
            How often mean, largest and smallest pre-clip norm and the counts of NaN and inf are reported.
        halt_on_nan (`bool`, *optional*, defaults to `False`):
            Stop the run at the first bad gradient, with the weights as they were before it.

    Example:

    ```python
    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[GradientMonitorCallback(halt_on_nan=True)])
    ```
    """

    def __init__(self, check_every_n_steps: int = 1, log_every_n_steps: int = 10, halt_on_nan: bool = False):
        for name, value in (("check_every_n_steps", check_every_n_steps), ("log_every_n_steps", log_every_n_steps)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name} must be an integer of at least 1, got {value!r}.")
        self.check_every_n_steps = check_every_n_steps
        self.log_every_n_steps = log_every_n_steps
        self.halt_on_nan = halt_on_nan
        self.num_nan = 0
        self.num_inf = 0
        self.norms: list[float] = []
        self.held = False
        self.failed = False
        self.tap: GradientTap | None = None
        self.writer: JsonlWriter | None = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.on_train_end(args, state, control)
        self.tap = GradientTap(model)
        self.writer = JsonlWriter(events_path(Path(args.output_dir) / "nanguard", args.process_index))
        self.norms = []
        self.failed = False

    def on_train_end(self, args, state, control, **kwargs):
        if self.tap is not None:
            self.tap.remove()
            self.tap = None

    def on_step_begin(self, args, state, control, **kwargs):
        if self.tap is not None and state.global_step % self.check_every_n_steps == 0:
            self.tap.arm()

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        tap = self.tap
        if tap is None or not tap.armed:
            return
        tap.armed = False
        if tap.norm is None:
            self._tell_failure(args, state)
            return
        [norm] = read_host([local(tap.norm)])
        if math.isfinite(norm):
            self.norms.append(norm / _scale(optimizer))
            return
        if optimizer is not None and optimizer.scaler is not None and all(map(math.isfinite, read_host(tap.losses))):
            return  # the scaler skips this step by itself: that is how it finds its scale
        census = take_census(tap.named_magnitudes())
        self.num_nan += sum(1 for kind in census.bad.values() if kind == "nan")
        self.num_inf += sum(1 for kind in census.bad.values() if kind == "inf")
        if args.process_index == 0:
            tqdm.write(format_bad_gradients(state.global_step, norm, census, self.num_nan, self.num_inf))
        self._write_event(args, state, norm, census)
        if self.halt_on_nan:
            clear_gradients(tap.model.parameters())
            hold_schedule(optimizer, True)
            self.held = True
            control.should_training_stop = True

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        if self.held:
            hold_schedule(optimizer, False)
            self.held = False
        if self.norms and args.process_index == 0 and state.global_step % self.log_every_n_steps == 0:
            tqdm.write(
                f"[step {state.global_step}] gradient norm before clipping: mean {fmean(self.norms):.6g}, "
                f"max {max(self.norms):.6g}, min {min(self.norms):.6g}; bad gradients so far: "
                f"{self.num_nan} NaN, {self.num_inf} inf"
            )
        if state.global_step % self.log_every_n_steps == 0:
            self.norms = []

    def _tell_failure(self, args: Any, state: Any) -> None:
        if self.failed or self.writer is None:
            return
        self.failed = True
        message = "the gradients could not be tapped: no output of the model's forward led to the backward pass"
        logger.warning("hf_nanguard: %s", message)
        event = Event(state.global_step, Signal.GUARD_FAILED, Action.OBSERVED, message, rank=args.process_index)
        self.writer(event.as_dict())

    def _write_event(self, args: Any, state: Any, norm: float, census: Census) -> None:
        event = Event(
            state.global_step,
            Signal.GRAD_NONFINITE,
            Action.HALTED if self.halt_on_nan else Action.OBSERVED,
            f"{describe(census)} at step {state.global_step}",
            rank=args.process_index,
            values={"grad_norm": norm, **census.as_values()},
            culprit=Culprit(phase="backward", parameter=census.suspect),
            cause=None if census.bad else Cause.NORM_OVERFLOW,
        )
        if self.writer is not None:
            self.writer(event.as_dict())


def _scale(optimizer: Any) -> float:
    """Returns the loss scale the gradients still carry when they are tapped."""
    return 1.0 if optimizer is None or optimizer.scaler is None else optimizer.scaler.get_scale()
