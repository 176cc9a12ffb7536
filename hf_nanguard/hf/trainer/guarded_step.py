"""One optimizer step of a guarded trainer: its micro-batches are recorded, it is settled, and what is left of it is clipped."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...boundary import HostCall
from ...core.event import Event, Failure
from ...core.finite import local
from ...core.rerun.micro_batch import AccumulationGroup
from ...core.rerun.runner import same_on_all_ranks
from ...core.rerun.traceless_skip import clear_gradients, show_zero_gradients
from ...core.rerun.weight_copies import WeightCopies
from ...core.step.compiled_model import can_hook
from ...core.step.guard import Guard
from ...core.step.step_reading import StepOutcome
from ...core.torch_private import unwrap_compiled
from ...core.vocabulary import Action, Signal
from ..compat import accelerate as compat_accelerate
from ..compat import trainer as compat
from ..compat.logged_state import LogSums
from ..compat.online_trainer import GenerationBuffer, is_between_generations
from ..compat.trainer_protocol import HostTrainer
from ..custody.halting import Halting
from ..data.learning_signal import NoSignalDetector, OnlineData, StepSignal
from ..monitors.trainer_monitors import build_monitors
from .held_inputs import LossWeight
from .run_notices import log_unknown_copy
from .step_recorder import Phase, StepRecord, StepRecorder
from .trainer_runner import TrainerRunner
from .unguarded_updates import UnguardedUpdates


@dataclass(eq=False, repr=False)
class GuardedStep:
    """Settles the steps of a trainer, one at a time, in the order of its calls."""

    trainer: HostTrainer
    guard: Guard  # decides, and carries the decision out
    recorder: StepRecorder  # what is known of the step
    unguarded: UnguardedUpdates  # reports a step of which nothing is known
    halting: Halting  # ends the run

    def __post_init__(self) -> None:
        guard = self.guard
        self.policy, self.boundary, self.ranks = guard.policy, guard.boundary, guard.ranks
        self.journal, self.monitor_set, self.redo = guard.journal, guard.monitor_set, guard.redo
        self.acts = self.policy.acts
        self.deepspeed = compat_accelerate.steps_in_backward(self.trainer)
        self.no_signal = NoSignalDetector(self.policy.stall_steps, self.journal)
        self.online: OnlineData | None = None
        self.runner: TrainerRunner | None = None
        self._optimizer: object = None  # the one the monitors watch; a second run may have another
        self._hidden_filter = ExitStack()  # logging_nan_inf_filter while the host reads it: it hides NaN, by two reads
        self._has_left_out = False  # whether the mean loss of this run leaves out a step
        self._abandons_step = False  # the run halts within the step that is being recorded
        self._unguarded_group: AccumulationGroup | None = None  # for which no runner could be built

    def use_online(self, online: OnlineData) -> None:
        """Takes the data of an online trainer."""
        self.online = online

    def begin_run(self) -> None:
        """Begins the steps of a `train()`."""
        self.no_signal.begin_run()
        self._abandons_step = False
        self._has_left_out = False
        compat.begin_mean(self.trainer)

    def begin_group(self, batches: Sequence[object]) -> Sequence[object]:
        """Begins the accumulation group of the next optimizer step; returns its batches, made safe to run."""
        if not self.recorder.is_open:
            self.end_step()
        return self.recorder.begin_group(batches)

    def guard_step(
        self,
        training_step: HostCall,
        model: nn.Module,
        inputs: object,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Runs a `training_step` as one micro-batch of `train()`; as it is if it was called by hand, again, or by another."""
        if not self.recorder.watches or self.guard.replaying or self.recorder.phase is Phase.RUNNING:
            return training_step(model, inputs, num_items_in_batch)
        self.show_filter()
        if not self.recorder.is_open:  # the trainer has a get_batch_samples, or a loop, of its own
            self.begin_group([])
        runner = None if self.guard.group is self._unguarded_group else self._runner_for(model)
        if runner is None:
            return training_step(model, inputs, num_items_in_batch)
        if not self.recorder.has_micro_batches:
            self.boundary.call("snapshot", self._begin_snapshot, runner)
            runner.begin_group()
            self.recorder.begin_step(LossWeight(self.trainer.current_gradient_accumulation_steps, num_items_in_batch))
            self.monitor_set.begin_step(self.trainer.state.global_step)
        loss = self.recorder.record(training_step, runner, inputs, num_items_in_batch)
        if self.acts:
            self._hidden_filter.enter_context(compat.log_filter(self.trainer, False))
        return loss

    def show_filter(self) -> None:
        """Shows `logging_nan_inf_filter` as it was given again, once the host has read it for a micro-batch."""
        self._hidden_filter.close()

    def _begin_snapshot(self, runner: TrainerRunner) -> None:
        """Checks the state of the run before its first step, and takes a snapshot before a step if one is due."""
        trainer, guard, step = self.trainer, self.guard, self.trainer.state.global_step
        if self.deepspeed:
            return

        def watch() -> None:
            keepers = partial(compat.find_keepers, trainer)
            copies = WeightCopies(runner.bare_model, keepers, compat.KEPT_ELSEWHERE, partial(log_unknown_copy, guard))
            parts = (LogSums(trainer), GenerationBuffer(trainer), copies)
            guard.watch_state(runner, trainer.lr_scheduler, parts, copies.num_bytes())

        failure = guard.begin_step(step, runner, watch, is_between_generations(trainer))
        if failure is not None and not self._recover(runner.model, failure, step):
            self._abandons_step = True

    def _runner_for(self, model: nn.Module) -> TrainerRunner | None:
        """Returns the runner of this model; a new model or optimizer gets a new one on all ranks, or on none."""
        if self.runner is None or self.runner.model is not model or self._optimizer is not self.trainer.optimizer:
            self._optimizer = self.trainer.optimizer
            self.runner = self.boundary.together("runner", partial(self._build_runner, model), self._lose_runner)
        return self.runner

    def _lose_runner(self, why: str) -> None:
        """Leaves this group unguarded as a whole, on every rank."""
        self._unguarded_group = self.guard.group

    def _build_runner(self, model: nn.Module) -> TrainerRunner:
        """Returns a runner of this model, and begins with it."""
        runner = TrainerRunner(self.trainer, model, self.ranks, self.recorder)
        bare = unwrap_compiled(self.trainer.accelerator.unwrap_model(model))
        watched = None if self.deepspeed else self.trainer.optimizer
        compiled = not can_hook(runner, self.ranks)
        self.guard.begin_model(build_monitors(bare, watched, self.guard, compiled), runner)
        return runner

    def settle(self, model: nn.Module, max_norm: float, host_clip: HostCall, norm: object = None) -> object:
        """Settles the recorded step and clips what is left of it; returns the norm for the log, `None` for a step that is
        skipped.

        `max_norm` is what to clip to, 0 for no clipping. `host_clip` is for set-ups in which norm and clip cannot be separated;
        `norm` is given if somebody has clipped already.
        """
        given = (model, max_norm, host_clip, norm)
        return self.boundary.call("step", self._settle, *given, otherwise=self._settle_plainly, host=host_clip)

    def _settle_plainly(self, model: nn.Module, max_norm: float, host_clip: HostCall, norm: Any) -> object:
        """Clips as the host does after an error of the guard; a step that is known to be bad is skipped."""
        if norm is None:
            norm = host_clip.result if host_clip.has_run else host_clip()
        is_bad = norm is not None and not math.isfinite(float(norm))
        if self.recorder.phase is not Phase.SKIPPED and self.acts and is_bad:
            self.ranks.fail()  # the others are about to contain the step
            clear_gradients(model.parameters())
            self._skip_optimizer()
            step = self.trainer.state.global_step
            message = (
                f"the gradient norm is {float(norm)} at step {step}; the step was skipped because the guard failed"
            )
            self.journal.write_once(Event(step, Signal.GRAD_NONFINITE, Action.SKIPPED, message))
        return None if self.recorder.phase is Phase.SKIPPED else norm

    def _settle(self, model: nn.Module, max_norm: float, host_clip: HostCall, norm: object) -> object:
        runner, record, call = self.runner, self.recorder.finish(), self.boundary.call
        if self.online is not None:
            call("online data", self.online.add_readings, record.group)
        self.monitor_set.end_backward()
        if self._abandons_step:
            self._abandon_step()
            return None
        if record.group is self._unguarded_group:
            return self._settle_plainly(model, max_norm, host_clip, norm)
        if runner is None or not (record.group.micro_batches or record.group.failure):
            self.unguarded.report()
            return host_clip() if norm is None else norm
        if not self.deepspeed:  # whose engine has stepped already
            call("buffers", runner.buffers.note_writes)
        norm = self._mark(record, model, runner, host_clip, norm)
        is_clipped = norm is not None
        given = torch.as_tensor(norm, device=self.trainer.args.device) if is_clipped else None
        step = self.trainer.state.global_step
        outcome = self.guard.settle(record.group, runner, step, given, record.is_labelled)
        if not outcome.stepped or outcome.failure is not None:
            self._skip_optimizer(not outcome.moves_schedule)
        call("running loss", self._correct_log, outcome, runner)
        call("learning signal", self._observe_signal, record, runner)
        call("held inputs", self._finish_step, record, outcome)
        norm = self._clip(outcome, runner, max_norm, host_clip if is_clipped else None) if outcome.stepped else None
        if outcome.halt is not None:
            self._halt(model, outcome.halt)
        elif outcome.failure is not None:
            repeats = partial(self.redo.repeats, record.group, runner)
            self._recover(model, outcome.failure, step + 1, repeats)
        elif outcome.stepped:
            call("update", self.guard.begin_update, outcome)
        return norm

    def _mark(
        self, record: StepRecord, model: nn.Module, runner: TrainerRunner, host_clip: Callable[[], object], norm: object
    ) -> object:
        """Marks the gradients of a step that must not be taken as it is; returns the norm if somebody has clipped."""
        must_drop = any(micro.must_be_dropped for micro in record.group.micro_batches)
        if must_drop and runner.poisons_gradients:
            runner.poison()
        elif self.acts:
            runner.mark_losses(record.group.losses)
        if norm is not None and (must_drop or runner.lockstep):  # it was measured before the gradients were marked
            return local(same_on_all_ranks(torch.as_tensor(norm))) + 0.0 * local(runner.norm())
        return host_clip() if norm is None and not compat.clips_in_one_piece(self.trainer, model) else norm

    def _observe_signal(self, record: StepRecord, runner: TrainerRunner) -> None:
        """Classifies the settled step by what it could learn from."""
        norm = self.guard.last_norm
        if self.online is None:
            shown = None if runner.buffers.has_updates else norm
            signal: StepSignal | None = StepSignal.of_batches(record.no_signals, shown)
        else:
            signal = self.online.step_signal(norm)
        if signal is not None:
            self.no_signal.observe(self.trainer.state.global_step, signal, norm)

    def _finish_step(self, record: StepRecord, outcome: StepOutcome) -> None:
        """Leaves trainer and recorder ready for the next step."""
        compat.set_accumulation_steps(self.trainer, record.group.weight.steps)
        self.recorder.release(outcome.stepped and outcome.failure is None and outcome.redone is None)

    def _skip_optimizer(self, holds_schedule: bool = True) -> None:
        self.recorder.skip()
        compat_accelerate.bypass_optimizer(self.trainer.optimizer, holds_schedule)
        if compat_accelerate.is_bypassed(self.trainer.optimizer):
            show_zero_gradients(self.trainer.model.parameters())

    def _abandon_step(self) -> None:
        """Leaves out the step during which the run was halted, from weights and log alike."""
        self._skip_optimizer()
        self.recorder.restore_running_loss([])
        compat.forget_step(self.trainer)
        if self.runner is not None:
            self.runner.remove_metrics()
        self.recorder.release()

    def _clip(
        self, outcome: StepOutcome, runner: TrainerRunner, max_norm: float, host_clip: Callable[[], object] | None
    ) -> object:
        """Clips by the norm that is known already, or as the host does if it had clipped before; returns the norm."""
        norm: Any = outcome.norm
        bounds = [bound for bound in (max_norm, outcome.clip_to) if bound]
        if host_clip is not None:
            norm = host_clip() if outcome.fresh else norm
            bounds = [outcome.clip_to] if outcome.clip_to else []
        if bounds:
            by = norm if host_clip is None else runner.norm()
            runner.clip(min(bounds), by)
        return norm

    def _correct_log(self, outcome: StepOutcome, runner: TrainerRunner) -> None:
        """Makes the running loss what it would be if the dropped micro-batches had never come."""
        if outcome.redone is None or not self.acts:
            return
        floors = self.policy.on_nonfinite == "floor"
        self.recorder.restore_running_loss(
            outcome.redone, outcome.num_dropped * self.policy.loss_floor if floors else 0.0
        )
        if not outcome.stepped:
            runner.remove_metrics()
            if not floors:
                self._has_left_out = True
                compat.forget_step(self.trainer)

    @property
    def has_no_mean(self) -> bool:
        """Whether every step of the run was skipped, so that there is no loss to take the mean of."""
        return self._has_left_out and compat.counts_no_step(self.trainer)

    def logging(self) -> AbstractContextManager[None]:
        """Returns a context for a log of the host, which may come while a step is open."""
        return self.runner.logging() if self.runner is not None and self.recorder.is_open else nullcontext()

    def end_step(self) -> None:
        """Lets the optimizer step again, once a skipped step has passed."""
        if self.recorder.phase is Phase.SKIPPED:
            compat_accelerate.resume_optimizer(self.trainer.optimizer)
        self.recorder.end_step()

    def after_update(self) -> None:
        """Runs the monitors on what the optimizer did, before anything is logged, evaluated or saved."""
        failure = self.monitor_set.after_update()
        if failure is not None and self.runner is not None:
            self._recover(self.runner.model, failure, self.trainer.state.global_step)

    # ---- halt ----

    def end_if(self, reason: str | None) -> None:
        """Ends the run if there is a reason to, decided on every rank alike."""
        if reason is None:
            return
        self._abandons_step = self.recorder.phase is Phase.RUNNING  # in a step, not in an evaluation between two
        self._halt(self.trainer.model_wrapped if self.runner is None else self.runner.model, reason)

    def _halt(self, model: nn.Module, reason: str) -> None:
        """Ends the run, even if its last good state cannot be saved."""
        self.boundary.call("halt", self.halting.halt, model, reason, otherwise=self.halting.stop)

    def _recover(
        self, model: nn.Module, failure: Failure, step: int, repeats: Callable[[], bool] | None = None
    ) -> bool:
        """Rewinds or ends a run that cannot continue from its state; returns whether it was rewound."""

        def stop(*_: object) -> bool:
            self.halting.stop(model, f"{failure.reason} The guard failed to rewind the run.")
            return False

        return self.boundary.call("rewind", self.halting.recover, model, failure, step, repeats, otherwise=stop)
