"""A callback that measures the gradients of any trainer before they are clipped."""

import logging
import math
from pathlib import Path
from statistics import fmean

import torch
from accelerate.optimizer import AcceleratedOptimizer
from tqdm import tqdm
from transformers import TrainerControl, TrainerState, TrainingArguments

from ...core.event import Culprit, Event
from ...core.event_summary import EventSummary
from ...core.finite import local, read_host
from ...core.rerun.traceless_skip import clear_gradients
from ...core.step.bad_gradients import Census, describe, format_bad_gradients, take_census
from ...core.vocabulary import Action, Cause, Signal
from ...errors import ArgumentError
from ...report.run_files import GUARD_FOLDER, JsonlWriter, events_path
from ..compat.accelerate import bypass_optimizer, resume_optimizer
from .gradient_tap import NOT_TAPPED, GradientTap
from .harmless_callback import HarmlessCallback, harmless

logger = logging.getLogger("hf_nanguard")


@harmless
class GradientMonitorCallback(HarmlessCallback):
    """Checks the gradients of every step, reports their norms, and names the parameters whose gradients are non-finite.

    It does not change a run, except with `halt_on_nan`. To contain bad steps as well, add [`NanGuardCallback`] or use a guarded
    trainer.

    Args:
        check_every_n_steps (`int`, *optional*, defaults to `1`):
            How often gradients are checked. A check takes two fused reductions and one host read.
        log_every_n_steps (`int`, *optional*, defaults to `10`):
            How often mean, largest and smallest norm before clipping and the counts of NaN and inf are printed.
        halt_on_nan (`bool`, *optional*, defaults to `False`):
            Stop the run at the first non-finite gradient, with the weights as they were before it.

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
        self.is_skipping = False
        self.has_failed = False
        self.tap: GradientTap | None = None
        self.writer: JsonlWriter | None = None
        self.summary = EventSummary()

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.on_train_end(args, state, control)
        self.tap = GradientTap(model, self.enter(args, state))
        self.writer = JsonlWriter(events_path(Path(args.output_dir) / GUARD_FOLDER, args.process_index))
        self.norms = []
        self.has_failed = False

    def on_train_end(self, args, state, control, **kwargs):
        if self.tap is not None:
            self.tap.disarm()
            self.tap = None

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        self._resume(optimizer)
        if self.tap is not None and state.global_step % self.check_every_n_steps == 0:
            self.tap.arm()

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        tap = self.tap
        if tap is None or not tap.armed:
            return
        tap.disarm()
        if tap.norm is None:
            self._emit_failure(args, state, NOT_TAPPED)
            return
        [norm] = read_host([local(tap.norm)])
        if math.isfinite(norm):
            self.norms.append(norm / _read_scale(optimizer))
            return
        if _scaler_of(optimizer) is not None and all(map(math.isfinite, read_host(tap.losses))):
            return  # the scaler skips this step itself, which is how it finds its scale
        action = self.contain(optimizer, control)  # first: the report may fail
        census = take_census(tap.magnitudes)
        kinds = list(census.bad.values())
        self.num_nan += kinds.count("nan")
        self.num_inf += kinds.count("inf")
        if args.process_index == 0:
            tqdm.write(format_bad_gradients(state.global_step, norm, census, self.num_nan, self.num_inf))
        self._emit_nonfinite(args, state, norm, census, action)

    def contain(self, optimizer: AcceleratedOptimizer | None, control: TrainerControl) -> Action:
        """Does what is to be done about a step with a non-finite gradient, and returns it."""
        if not self.halt_on_nan:
            return Action.OBSERVED
        self.skip_step(optimizer)
        control.should_training_stop = True
        return Action.HALTED

    def skip_step(self, optimizer: AcceleratedOptimizer | None) -> None:
        """Keeps the optimizer and the schedule from stepping, until the step has passed."""
        if self.tap is not None:
            clear_gradients(self.tap.model.parameters())
        if isinstance(optimizer, AcceleratedOptimizer):  # any other one finds no gradient
            bypass_optimizer(optimizer)
        self.is_skipping = True

    def _resume(self, optimizer: AcceleratedOptimizer | None) -> None:
        if self.is_skipping and isinstance(optimizer, AcceleratedOptimizer):
            resume_optimizer(optimizer)
        self.is_skipping = False

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        self._resume(optimizer)
        if state.global_step % self.log_every_n_steps:
            return
        if self.norms and args.process_index == 0:
            tqdm.write(
                f"[step {state.global_step}] gradient norm before clipping: mean {fmean(self.norms):.6g}, "
                f"max {max(self.norms):.6g}, min {min(self.norms):.6g}; bad gradients so far: "
                f"{self.num_nan} NaN, {self.num_inf} inf"
            )
        self.norms = []

    def _emit_failure(self, args: TrainingArguments, state: TrainerState, message: str) -> None:
        if not self.has_failed:
            logger.warning("hf_nanguard: %s", message)
            rank = args.process_index
            self._write(Event(state.global_step, Signal.GUARD_FAILED, Action.OBSERVED, message, rank=rank))
        self.has_failed = True

    def _emit_nonfinite(
        self, args: TrainingArguments, state: TrainerState, norm: float, census: Census, action: Action
    ) -> None:
        self._write(
            Event(
                state.global_step,
                Signal.GRAD_NONFINITE,
                action,
                f"{describe(census)} at step {state.global_step}",
                rank=args.process_index,
                values={"grad_norm": norm, **census.as_values()},
                culprit=Culprit(phase="backward", parameter=census.suspect),
                cause=None if census.bad else Cause.NORM_OVERFLOW,
            )
        )

    def _write(self, event: Event) -> None:
        if self.writer is not None:
            self.writer(event.as_dict())
            self.summary.add(event.as_dict())


def _scaler_of(optimizer: AcceleratedOptimizer | None) -> torch.amp.GradScaler | None:
    return optimizer.scaler if isinstance(optimizer, AcceleratedOptimizer) else None


def _read_scale(optimizer: AcceleratedOptimizer | None) -> float:
    """Returns the loss scale that gradients still carry when they are measured."""
    scaler = _scaler_of(optimizer)
    return 1.0 if scaler is None else scaler.get_scale()
