"""The callback that contains bad steps on an untouched stock trainer: all that a callback can do."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...core.event import Culprit, Event
from ...core.finite import local, read_host
from ...core.monitors.weights import find_bad_weights
from ...core.ranks import Ranks
from ...core.rerun.micro_batch import AccumulationGroup, MicroBatch
from ...core.rng import RngState
from ...core.step.guard import Guard
from ...core.vocabulary import Action, Signal
from ...errors import NonFiniteError
from ...report.run_files import GUARD_FOLDER, JsonlWriter, events_path
from ..compat.accelerate import bare_optimizer, hold_schedule
from ..monitors.trainer_monitors import build_monitors
from ..trainer.arguments import GuardArguments, find_guard_arguments
from ..trainer.run_record import STATE_FILE, load_guard, save_guard
from .forward_replay import CallbackRunner, share_out
from .gradient_tap import NOT_TAPPED, GradientTap

logger = logging.getLogger("hf_nanguard")

CANNOT = (
    "hf_nanguard: NanGuardCallback skips bad steps whole. What only a guarded trainer or attach(trainer) can do: redo an "
    "accumulation group without its bad micro-batch, check labels and inputs before the forward, name dataset rows, look "
    "into a loss outside the model, and keep a filtered loss out of the logged mean."
)


class NanGuardCallback(TrainerCallback):
    """Sees bad gradients before clipping has spread them, names the parameters, and skips the step without a trace.

    Works on an untouched stock trainer. What it cannot do is said once at the start and in the README.

    Args:
        guard (`GuardArguments`, *optional*):
            The settings; taken from guarded training arguments or the defaults otherwise.

    It adds the same `nanguard/` metrics to log rows as [`GuardedTrainerMixin`].

    Example:

    ```python
    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[NanGuardCallback()])
    ```
    """

    def __init__(self, guard: GuardArguments | None = None):
        self.arguments = guard
        self.guard: Guard | None = None
        self.runner: CallbackRunner | None = None
        self.writer: JsonlWriter | None = None
        self.halting: str | None = None
        self.is_spoiled = False  # weights or moments are bad: nothing is saved any more
        self.last_good: Path | None = None
        self.num_substeps = 0
        self.steps_since_log = 0
        self.skips_since_log = 0

    def on_train_begin(self, args, state, control, model=None, processing_class=None, optimizer=None, **kwargs):
        self._close()
        policy = find_guard_arguments(self.arguments, args).policy()
        if policy.mode == "off":
            self.guard = None
            return
        # A callback sees gradients that are clipped already: there is nothing left to repair, or to clip once more.
        milder = {"drop": "drop", "floor": "drop", "skip": "skip", "repair": "skip", "halt": "halt"}
        policy = replace(
            policy,
            on_nonfinite=milder[policy.on_nonfinite],
            on_spike="observe" if policy.on_spike == "clip" else policy.on_spike,
        )
        if args.process_index == 0:
            logger.warning(CANNOT)
        self.writer = JsonlWriter(events_path(Path(args.output_dir) / GUARD_FOLDER, args.process_index))
        folder = Path(args.output_dir) / GUARD_FOLDER
        self.guard = Guard(policy=policy, ranks=Ranks(args.device), on_event=self.writer, folder=folder)
        self.runner = CallbackRunner(model, GradientTap(model, holds_calls=policy.autopsy), processing_class)
        self.guard.monitor_set.begin(build_monitors(args, model, optimizer, self.guard))
        self.halting, self.is_spoiled, self.last_good = None, False, None
        if state.global_step:
            self._load_state(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        self._close()

    def _close(self) -> None:
        if self.runner is not None:
            self.runner.tap.remove()
            self.runner = None
        if self.guard is not None:
            self.guard.monitor_set.close()

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        if self.guard is None or self.runner is None:
            return
        self.guard.group = AccumulationGroup(None, [MicroBatch(0, None, RngState.capture(args.device.type))])
        self.num_substeps = 0
        self.runner.buffers.keep()
        self.runner.tap.arm()
        self.guard.monitor_set.begin_step(state.global_step)
        if optimizer.scaler is None:
            hold_schedule(optimizer, False)

    def on_substep_end(self, args, state, control, **kwargs):
        self.num_substeps += 1

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        guard, runner = self.guard, self.runner
        if guard is None or runner is None:
            return
        tap = runner.tap
        tap.disarm()
        guard.monitor_set.end_backward()
        if tap.norm is None:
            if Signal.GUARD_FAILED not in guard.journal.written:
                guard.journal.write(
                    Event(state.global_step, Signal.GUARD_FAILED, Action.OBSERVED, NOT_TAPPED, rank=args.process_index)
                )
            return
        if optimizer.scaler is not None:
            self._leave_to_scaler(args, state, guard, tap)
            guard.monitor_set.before_update()
            return
        first, size = guard.group.micro_batches[0], self.num_substeps + 1
        losses = tap.losses if len(tap.losses) == size else [None] * size  # else they cannot be told apart
        calls = share_out(tap.calls, size)
        guard.group.micro_batches = [MicroBatch(i, calls[i], first.rng, loss=loss) for i, loss in enumerate(losses)]
        runner.optimizer = bare_optimizer(optimizer)
        with runner.at_rest():
            outcome = guard.settle(guard.group, runner, state.global_step)
        self.steps_since_log += 1
        if outcome.stepped:
            guard.monitor_set.before_update()
            return
        self.skips_since_log += 1
        hold_schedule(optimizer, True)
        if outcome.halt is not None:
            self._halt(args, state, control, model, outcome.halt)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.guard is None:
            return
        reason = self.guard.monitor_set.after_update()
        if reason is None and control.should_save:
            reason = self.guard.monitor_set.check_before_save(state.global_step)
        if reason is not None:
            self._halt(args, state, control, model, reason)

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        if self.guard is None or self.halting is not None:
            return
        if self.is_spoiled:  # told, and the run is about to stop
            control.should_save = control.should_evaluate = False
        elif (
            control.should_save and (reason := self.guard.monitor_set.check_before_save(state.global_step)) is not None
        ):
            self._halt(args, state, control, model, reason)

    def _leave_to_scaler(self, args: Any, state: Any, guard: Guard, tap: GradientTap) -> None:
        """Lets the scaler skip by itself, which is how it finds its scale; a loss that is not finite is no matter of scale."""
        assert tap.norm is not None
        *losses, norm = read_host([*tap.losses, local(tap.norm)])
        if not math.isfinite(norm):
            guard.counter.count_scaler_skip()
        bad = next(((index, loss) for index, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if bad is not None:
            message = (
                f"loss is {bad[1]} at step {state.global_step}; with a loss scaler a callback leaves the step to it"
            )
            guard.journal.write(
                Event(state.global_step, Signal.LOSS_NONFINITE, Action.OBSERVED, message, bad[0], args.process_index,
                      {"loss": bad[1], "grad_norm": norm}, Culprit(phase="loss"))
            )  # fmt: skip

    def _halt(self, args: Any, state: Any, control: Any, model: nn.Module, message: str) -> None:
        assert self.guard is not None
        control.should_training_stop = True
        bad_weights = bool(find_bad_weights(model))
        if self.guard.ranks.any(bad_weights or not self.guard.monitor_set.is_sound()):
            self.is_spoiled = True
            control.should_save = control.should_evaluate = False  # an evaluation may ask for a save as well
            message += " Nothing was saved, for the weights or the state of the optimizer are not finite."
            if self.last_good is not None:
                message += f" The last good checkpoint is {self.last_good}."
            logger.error("hf_nanguard: %s", message)
            if self.guard.policy.on_halt == "raise":
                self._close()
                raise NonFiniteError(message)
            return
        control.should_save = True
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step + 1}"
        self.halting = f"{message} The last good state is in {folder}."
        logger.error("hf_nanguard: %s", self.halting)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        for name, value in (metrics or {}).items():
            if (
                self.guard is not None
                and name.endswith("loss")
                and isinstance(value, float)
                and not math.isfinite(value)
            ):
                message = f"{name} is {value} at step {state.global_step}"
                culprit = Culprit(phase="loss")
                self.guard.journal.write(
                    Event(state.global_step, Signal.EVAL_NONFINITE, Action.OBSERVED, message, rank=args.process_index,
                          values={name: value}, culprit=culprit)
                )  # fmt: skip

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.guard is None or logs is None or "loss" not in logs:
            return
        row = state.log_history[-1]
        metrics: dict[str, Any] = {**self.guard.counter.as_metrics(), **self.guard.monitor_set.metrics()}
        if self.steps_since_log and self.skips_since_log == self.steps_since_log:
            for shown in (logs, row):  # every step was skipped: what stands there is the host's filter, not a loss
                shown.pop("loss", None)
                shown.pop("grad_norm", None)
        self.steps_since_log = self.skips_since_log = 0
        logs.update(metrics)
        row.update(metrics)

    def on_save(self, args, state, control, **kwargs):
        if self.guard is not None and not self.is_spoiled:
            self.last_good = self._checkpoint(args, state)
        if self.guard is not None and args.should_save:
            save_guard(self.guard, self._checkpoint(args, state))
        if self.halting is not None and self.guard is not None and self.guard.policy.on_halt == "raise":
            self._close()
            raise NonFiniteError(self.halting)

    def _load_state(self, args: Any, state: Any) -> None:
        """Restores the guard's state where a callback can find it; it is not told which checkpoint a run goes on from."""
        assert self.guard is not None
        given = args.resume_from_checkpoint
        folders = [Path(given)] if isinstance(given, str) else []
        folders.append(self._checkpoint(args, state))
        if not any(load_guard(self.guard, folder) for folder in folders):
            logger.warning(
                "hf_nanguard: the run goes on from step %d, but there is no %s, so the counts start at 0. Set "
                "resume_from_checkpoint in the training arguments to the folder of the checkpoint.",
                state.global_step,
                folders[0] / STATE_FILE,
            )

    def _checkpoint(self, args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
