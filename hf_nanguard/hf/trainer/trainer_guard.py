"""The guard of one trainer: owns what lasts a whole run, and settles each step that the recorder has finished."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...boundary import HostCall
from ...core.event import Culprit, Event, Failure
from ...core.finite import local, read_host
from ...core.ranks import Ranks
from ...core.rerun.micro_batch import AccumulationGroup
from ...core.rerun.runner import same_on_all_ranks
from ...core.rerun.traceless_skip import clear_gradients
from ...core.step.counters import find_news
from ...core.step.guard import Guard
from ...core.step.step_reading import StepOutcome
from ...core.vocabulary import Action, Signal
from ...doctor.start_check import report_start
from ...errors import LossMissingError
from ..compat import accelerate as compat_accelerate
from ..compat import trainer as compat
from ..compat.logged_state import LogSums
from ..compat.online_trainer import GenerationBuffer, is_between_generations
from ..compat.own_loss import has_own_batches
from ..compat.trainer_protocol import HostTrainer
from ..compat.unguardable_class import find_own_loop
from ..data.batch_limits import find_limits
from ..data.checked_collator import BatchCheck
from ..data.learning_signal import NoSignalDetector, StepSignal
from ..data.masked_samples import MAX_ROWS, format_rows
from ..generation.guard_generation import can_generate, guarded_sampling
from ..monitors.trainer_monitors import build_monitors
from .arguments import GuardArguments
from .checkpoint_custody import CheckpointCustody
from .evaluation import Evaluation
from .guarded_class import HostMethods
from .halting import Halting
from .held_inputs import LossWeight
from .run_record import RunRecord, load_guard
from .step_recorder import Phase, StepRecord, StepRecorder
from .trainer_runner import TrainerRunner

logger = logging.getLogger("hf_nanguard")

ONLINE_NORM = 0.1  # gradient norms below that, e.g. of a KL term where rewards are equal, count as that


class OnlineData(Protocol):
    """The data of an online trainer (GRPO, RLOO): sampled and scored while the run goes on.

    Handed over once by [`TrainerGuard.use_online`].
    """

    def add_readings(self, group: AccumulationGroup) -> None:
        """Adds scalars to what is read at the end of the step, right before it is settled."""

    def step_signal(self, grad_norm: float | None) -> StepSignal | None:
        """Returns what the step that was just settled could learn from, `None` if that is not known.

        Args:
            grad_norm (`float`, *optional*):
                The gradient norm of the step before clipping.
        """

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of a log row, counted since the last call."""


class TrainerGuard:
    """Everything the guard knows about one trainer.

    Args:
        trainer (`Trainer`):
            The guarded trainer, already built.
        arguments (`GuardArguments`):
            The settings.
        host (`HostMethods`):
            The host's own methods, for overrides that must not be entered twice.
    """

    def __init__(self, trainer: HostTrainer, arguments: GuardArguments, host: HostMethods):
        self.trainer = trainer
        self.host = host
        self.arguments = arguments
        self.policy = arguments.policy()
        self.on = self.policy.mode != "off"
        self.deepspeed = trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
        if self.deepspeed and self.on:
            self.policy = replace(self.policy, mode="observe", skip_grad_norm=None)
        self.acts = self.policy.acts
        ranks = Ranks(trainer.args.device)
        self.record = RunRecord(trainer, ranks.rank, self.policy)
        self.guard = Guard(policy=self.policy, ranks=ranks, on_event=self.record.write_event)
        self.guard.number_steps(lambda: trainer.state.global_step)
        self.boundary = self.guard.boundary
        self.recorder = StepRecorder(trainer, self.guard)
        self.evaluation = Evaluation(trainer, self.guard)
        self.custody = CheckpointCustody(trainer, self.guard)
        self.halting = Halting(trainer, self.guard, self.custody)
        self.no_signal = NoSignalDetector(self.policy.stall_steps, self.guard.journal)
        self.online: OnlineData | None = None
        self.runner: TrainerRunner | None = None
        self._optimizer: Any = None  # the one the monitors watch; a second run may have another
        self._hidden_filter = ExitStack()  # logging_nan_inf_filter while the host reads it: it hides NaN, by two reads
        self._joined = ExitStack()  # of a train() that is not ours
        self._run_end = ExitStack()  # of a guard that took the place of this one
        self._checks_updates = False
        self._has_reported_update = False
        self._is_guarding_generation = False
        self._num_left_out = 0  # steps of this run that the mean of its losses does not count
        self._creates_optimizer = False  # the host does, with the learning rate of its arguments
        self._abandons_step = False  # the run halts within the step that is being recorded

    def use_online(self, online: OnlineData) -> None:
        """Takes the data of an online trainer, which guards its own generation."""
        self.online = online
        self.guard.loss_watch.expect_sign_changes()
        self.guard.norms.raise_floor(ONLINE_NORM)

    @property
    def watches(self) -> bool:
        """Whether the guard takes part in the steps that run now. Steps that somebody runs by hand are not guarded."""
        return self.on and self.recorder.phase is not Phase.OUTSIDE

    @property
    def settles(self) -> bool:
        """Whether the step that is being clipped now is guarded and not settled yet."""
        return self.watches and self.recorder.phase is Phase.COLLECTING

    @property
    def replaying(self) -> bool:
        """Whether the guard is running a held micro-batch again."""
        return self.guard.replaying

    # ---- a run ----

    @contextmanager
    def training(self) -> Iterator[None]:
        """Surrounds `train()`: steps are guarded inside the block only."""
        self._joined.close()  # of a run that failed between two epochs
        if self.recorder.phase is not Phase.OUTSIDE:  # a train() inside another
            yield
            return
        try:
            self._begin_run()
            yield
        finally:
            self._end_run()

    def _begin_run(self) -> None:
        self.boundary.begin_run()
        self.recorder.begin_run()
        self.record.begin_run()
        self.guard.begin_run(self.record.directory)
        self.no_signal.begin_run()
        self._abandons_step = self._has_reported_update = False
        self._num_left_out = 0
        self.custody.begin_run()
        self._creates_optimizer = self.trainer.optimizer is None
        if self.on and self.guard.ranks.rank == 0:
            self.boundary.call("limits", self._log_limits)
            self.boundary.call("removed rows", self._report_removed_rows)
        if self.on:
            self.boundary.call(
                "doctor", report_start, self.trainer, self.policy.doctor, self.guard.ranks, self.policy.bundle_text
            )

    def _end_run(self) -> None:
        """Puts everything back, each piece even if another fails or is interrupted."""
        parts = {
            "summary": self._log_summary,
            "monitors": self.guard.monitor_set.close,
            "recorder": self.recorder.end_run,
            "skipped step": self.end_step,  # an error may have come between a skipped step and its end
            "log filter": self.show_filter,
            "successor": self._run_end.close,
        }
        with ExitStack() as stack:  # the last one first
            for part, end in parts.items():
                stack.callback(self.boundary.call, part, end)

    def join_run(self) -> None:
        """Begins to guard a `train()` that is running already, until it ends or fails; not one that is guarded."""
        if self.recorder.phase is Phase.OUTSIDE:
            self._joined.enter_context(self.training())

    def hand_over(self, successor: "TrainerGuard") -> None:
        """Turns the guard off for good, because another takes its place, in a run that is going on too."""
        if self.watches:
            self.end_step()
            self.recorder.abandon()
            successor.join_run()
            self._run_end.callback(successor._joined.close)
        self.on = False

    @contextmanager
    def checked_updates(self) -> Iterator[None]:
        """Reports an optimizer that updates the model inside the block without a decision of the guard."""
        if not self.on or self.deepspeed or self._checks_updates:  # DeepSpeed steps before the guard can decide
            yield
            return
        self._checks_updates = True
        try:
            with register_optimizer_step_pre_hook(self.boundary.wrapped("update check", self._check_update)):
                yield
        finally:
            self._checks_updates = False

    @contextmanager
    def epoch(self, dataloader: Any, position: int, resumed: str | None) -> Iterator[None]:
        """Surrounds one epoch.

        Args:
            dataloader (`DataLoader`):
                The prepared training dataloader.
            position (`int`):
                Its first batch; not 0 after a resume in mid-epoch.
            resumed (`str`, *optional*):
                The checkpoint that the run continues from, given with its first epoch.
        """
        if not self.on:
            yield
            return
        self.join_run()  # if the train() that is running is not ours: it began before the guard, or was replaced
        if resumed is not None:
            self.boundary.call("resume", self._resume, Path(resumed))
        try:
            with ExitStack() as stack:
                parts: dict[str, Callable[[], AbstractContextManager[None]]] = {
                    "update check": self.checked_updates,
                    "own training_step": self._guarded_own_step,
                    "batches": lambda: self._recorded_batches(dataloader, position),
                    "generation": self.guarded_generation,
                }
                for part, surround in parts.items():
                    self.boundary.call(part, lambda make=surround: stack.enter_context(make()))
                yield
        except BaseException:
            self.end_step()
            self.recorder.abandon()  # the host may catch it and begin anew with a smaller batch
            self._joined.close()
            raise

    def _resume(self, checkpoint: Path) -> None:
        load_guard(self.guard, checkpoint)
        self.custody.note_resumed(checkpoint)
        self._check_resumed_rate()

    def _recorded_batches(self, dataloader: Any, position: int) -> AbstractContextManager[None]:
        """Checks the batches of an epoch and records the rows they consist of; rows that rank 0 dispatches are not known."""
        dispatched = compat_accelerate.dispatches_batches(self.trainer)
        followed, check = (None, None) if dispatched else (dataloader, self._batch_check())
        return self.recorder.batches.recording(followed, self.trainer.accelerator.num_processes, position, check)

    @contextmanager
    def finalizing(self) -> Iterator[None]:
        """Surrounds what comes after the last epoch."""
        compat.leave_out_of_mean(self.trainer, self._num_left_out)
        with self._joined, self.guarded_generation():
            yield

    def show_filter(self) -> None:
        """Shows `logging_nan_inf_filter` as it was given again, once the host has read it for a micro-batch."""
        self._hidden_filter.close()

    def _guarded_own_step(self) -> AbstractContextManager[None]:
        """Guards a `training_step` that was put on the trainer itself, where it hides that of its class."""

        def wrap(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def training_step(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
                return self.boundary.around("training_step", self.guard_step, own, model, inputs, num_items_in_batch)

            return training_step

        if not compat.has_own_method(self.trainer, "training_step"):
            return nullcontext()
        return compat_accelerate.replaced_method(self.trainer, "training_step", wrap)

    def _log_limits(self) -> None:
        if self.policy.precision == "auto" and not isinstance(self.trainer.args, GuardArguments):
            logger.warning(
                "hf_nanguard: nanguard_precision='auto' has no effect here because the trainer was built with %s. Set it in a "
                "guarded config, e.g. GuardedTrainingArguments.",
                type(self.trainer.args).__name__,
            )
        if self.deepspeed:
            logger.warning(
                "hf_nanguard: DeepSpeed steps its engine inside the backward. Bad labels and inputs are filled before "
                "they reach it (nanguard_on_bad_input='repair'), but a bad loss or gradient is only reported, whatever "
                "nanguard_on_nonfinite says. Use DDP or FSDP2 to have it contained."
            )
        if compat_accelerate.dispatches_batches(self.trainer):
            logger.warning(
                "hf_nanguard: rank 0 dispatches the batches of this dataset, so labels and inputs are not checked before "
                "the forward and rows are not known. Set accelerator_config={'dispatch_batches': False} to change that."
            )

    def _log_summary(self) -> None:
        """Ends a run that had events with what they were and where they are."""
        text = self.guard.journal.summary.format_end(self.record.events.path, self.guard.recovery.format_end())
        if text is not None and self.guard.ranks.rank == 0:
            logger.warning(text)

    def _check_resumed_rate(self) -> None:
        """Warns that a resumed run keeps the learning rate of its checkpoint, whatever it was given. Several rates are those of
        parameter groups, which the arguments do not know."""
        asked, restored = self.trainer.args.learning_rate, compat.base_rates(self.trainer)
        if self._creates_optimizer and len(restored) == 1 and asked not in restored and self.guard.ranks.rank == 0:
            logger.warning(
                "hf_nanguard: learning_rate=%g was asked for, but the schedule of the checkpoint is resumed with %g. For "
                "another rate, load the weights of the checkpoint into the model and train without resume_from_checkpoint, or "
                "remove optimizer.pt and scheduler.pt from a copy of the checkpoint.",
                asked,
                max(restored),
            )

    def _report_removed_rows(self) -> None:
        """Reports the rows that the host has removed before the run, which it does without a word."""
        prepared, name = self.recorder.batches.prepared, type(self.trainer).__name__
        if prepared.is_rebuilt:
            logger.info("hf_nanguard: dataset rows are those of the dataset that %s has prepared.", name)
        if not (removed := prepared.removed):
            return
        message = (
            f"{name} removed {len(removed)} of {prepared.num_given} rows of the training dataset{format_rows(removed)} "
            "because truncation to max_length left nothing to learn from in them."
        )
        values: dict[str, Any] = {"num_rows": len(removed), "num_given": prepared.num_given}
        culprit = Culprit(phase="input", rows=removed[:MAX_ROWS])
        self.guard.journal.write(Event(0, Signal.LABELS_MASKED, Action.OBSERVED, message, None, 0, values, culprit))

    @contextmanager
    def guarded_generation(self) -> Iterator[None]:
        """Guards whatever generates inside the block: an evaluation, a callback that shows completions. An online trainer
        guards its own generation, completion by completion."""
        policy, model = self.policy, self.trainer.model
        idle = self.online is not None or not self.acts or policy.logits_mode == "off" or self._is_guarding_generation
        if idle or not can_generate(model):
            yield
            return
        self._is_guarding_generation = True
        try:
            bounds = policy.logits_clip_value, policy.logits_min_prob
            with guarded_sampling(model, policy.logits_mode, *bounds, True, self.boundary) as sampling:
                yield
        finally:
            self._is_guarding_generation = False
        if sampling.num_repaired or sampling.num_ended:
            step = self.trainer.state.global_step
            values = {"num_repaired": sampling.num_repaired, "num_ended": sampling.num_ended}
            self.guard.journal.write(
                Event(step, Signal.LOGITS_NONFINITE, Action.REPAIRED, f"at step {step}, {sampling.describe()}", None,
                      self.guard.ranks.rank, values, Culprit(phase="sampling"))
            )  # fmt: skip

    def _batch_check(self) -> BatchCheck:
        """Returns how the batches of this trainer are checked."""
        trainer = self.trainer
        limits = find_limits(trainer.model, compat.loss_shifts_labels(trainer), has_own_batches(trainer))
        verdict = self.policy.on_bad_input if self.acts else "repair" if self.deepspeed else "observe"
        return BatchCheck(limits, verdict, can_drop=self.acts)

    # ---- a step, in the order of its calls ----

    def begin_group(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Begins the accumulation group of the next optimizer step; returns its batches, made safe to run."""
        if not self.recorder.is_open:
            self.end_step()
        return self.recorder.begin_group(batches)

    def guard_step(
        self, training_step: HostCall, model: nn.Module, inputs: Any, num_items: Tensor | int | None
    ) -> Tensor:
        """Runs a `training_step` as one micro-batch of `train()`; as it is if it was called by hand, again, or by another."""
        if not self.watches or self.replaying or self.recorder.phase is Phase.RUNNING:
            return training_step(model, inputs, num_items)
        self.show_filter()
        runner = self._runner_for(model)
        if not self.recorder.is_open:  # the trainer has a get_batch_samples, or a loop, of its own
            self.begin_group([])
        if not self.recorder.has_micro_batches:
            self.boundary.call("snapshot", self._begin_snapshot, runner)
            runner.begin_group()
            self.recorder.begin_step(LossWeight(self.trainer.current_gradient_accumulation_steps, num_items))
            self.guard.monitor_set.begin_step(self.trainer.state.global_step)
        loss = self.recorder.record(training_step, runner, inputs, num_items)
        if self.acts:
            self._hidden_filter.enter_context(compat.log_filter(self.trainer, False))
        return loss

    def _begin_snapshot(self, runner: TrainerRunner) -> None:
        """Checks the state of the run before its first step, and takes a snapshot before a step if one is due."""
        trainer, guard, step = self.trainer, self.guard, self.trainer.state.global_step
        if self.deepspeed:
            return

        def watch() -> None:
            guard.watch_state(runner, trainer.lr_scheduler, (LogSums(trainer), GenerationBuffer(trainer)))

        failure = guard.begin_step(step, runner, watch, is_between_generations(trainer))
        if failure is not None and not self._recover(runner.model, failure, step):
            self._abandons_step = True

    def _runner_for(self, model: nn.Module) -> TrainerRunner:
        """Returns the runner of this model; a new model or optimizer gets a new runner and new monitors."""
        trainer = self.trainer
        if self.runner is None or self.runner.model is not model or self._optimizer is not trainer.optimizer:
            self._optimizer = trainer.optimizer
            self.guard.recovery.forget()
            self.runner = TrainerRunner(trainer, model, self.guard.ranks, self.recorder)
            bare = trainer.accelerator.unwrap_model(model)
            watched = None if self.deepspeed else trainer.optimizer
            self.guard.monitor_set.begin(build_monitors(trainer.args, bare, watched, self.guard))
        return self.runner

    def settle(self, model: nn.Module, max_norm: float, host_clip: HostCall, norm: Any = None) -> Any:
        """Settles the recorded step and clips what is left of it.

        Args:
            model (`nn.Module`):
                The model in training.
            max_norm (`float`):
                What to clip to; 0 for no clipping.
            host_clip (`HostCall`):
                The host's own clip, for set-ups in which norm and clip cannot be separated.
            norm (`Tensor` or `float`, *optional*):
                The norm, if somebody has clipped already.

        Returns:
            The norm for the log, `None` for a step that is skipped.
        """
        given = (model, max_norm, host_clip, norm)
        return self.boundary.call("step", self._settle, *given, otherwise=self._settle_plainly, host=host_clip)

    def _settle_plainly(self, model: nn.Module, max_norm: float, host_clip: HostCall, norm: Any) -> Any:
        """Clips as the host does after an error of the guard; a step that is known to be bad is skipped."""
        if norm is None:
            norm = host_clip.result if host_clip.has_run else host_clip()
        is_bad = norm is not None and not math.isfinite(float(norm))
        if self.recorder.phase is not Phase.SKIPPED and self.acts and is_bad:
            self.guard.ranks.fail()  # the others are about to contain the step
            clear_gradients(model.parameters())
            self._skip_optimizer()
            step = self.trainer.state.global_step
            message = (
                f"the gradient norm is {float(norm)} at step {step}; the step was skipped because the guard failed"
            )
            self.guard.journal.write_once(Event(step, Signal.GRAD_NONFINITE, Action.SKIPPED, message))
        return None if self.recorder.phase is Phase.SKIPPED else norm

    def _settle(self, model: nn.Module, max_norm: float, host_clip: HostCall, norm: Any) -> Any:
        runner, record, call = self.runner, self.recorder.finish(), self.boundary.call
        if self.online is not None:
            call("online data", self.online.add_readings, record.group)
        self.guard.monitor_set.end_backward()
        if self._abandons_step:
            self._abandon_step()
            return None
        if runner is None or not (record.group.micro_batches or record.group.failure):
            self._report_unguarded()
            return host_clip() if norm is None else norm
        norm = self._mark(record, model, runner, host_clip, norm)
        is_clipped = norm is not None
        given = torch.as_tensor(norm, device=self.trainer.args.device) if is_clipped else None
        step = self.trainer.state.global_step
        outcome = self.guard.settle(record.group, runner, step, given, record.is_labelled)
        if not outcome.stepped or outcome.failure is not None:
            self._skip_optimizer()
        call("running loss", self._correct_log, outcome, runner)
        call("learning signal", self._observe_signal, record)
        call("held inputs", self._finish_step, record, outcome)
        norm = self._clip(outcome, runner, max_norm, host_clip if is_clipped else None) if outcome.stepped else None
        if outcome.halt is not None:
            self._halt(model, outcome.halt)
        elif outcome.failure is not None:
            repeats = partial(self.guard.redo.repeats, record.group, runner)
            self._recover(model, outcome.failure, step + 1, repeats)
        elif outcome.stepped:
            call("update", self.guard.begin_update, outcome)
        return norm

    def _mark(
        self, record: StepRecord, model: nn.Module, runner: TrainerRunner, host_clip: Callable[[], Any], norm: Any
    ) -> Any:
        """Marks the gradients of a step that must not be taken as it is; returns the norm if somebody has clipped."""
        must_drop = any(micro.must_be_dropped for micro in record.group.micro_batches)
        if must_drop and runner.poisons_gradients:
            runner.poison()
        elif self.acts:
            runner.mark_losses(record.group.losses)
        if norm is not None and (must_drop or runner.lockstep):  # it was measured before the gradients were marked
            return local(same_on_all_ranks(torch.as_tensor(norm))) + 0.0 * local(runner.norm())
        return host_clip() if norm is None and not compat.clips_in_one_piece(self.trainer, model) else norm

    def _observe_signal(self, record: StepRecord) -> None:
        """Classifies the settled step by what it could learn from."""
        norm = self.guard.last_norm
        if self.online is None:
            signal: StepSignal | None = StepSignal.of_batches(record.no_signals, norm)
        else:
            signal = self.online.step_signal(norm)
        if signal is not None:
            self.no_signal.observe(self.trainer.state.global_step, signal, norm)

    def _finish_step(self, record: StepRecord, outcome: StepOutcome) -> None:
        """Leaves trainer and recorder ready for the next step."""
        if outcome.stepped and outcome.failure is None and outcome.redone is None and record.group.micro_batches:
            self.recorder.loss_errors.keep_replacement(record.group.micro_batches[0].payload)
        compat.set_accumulation_steps(self.trainer, record.group.weight.steps)
        self.recorder.release()

    def _skip_optimizer(self) -> None:
        self.recorder.skip()
        compat_accelerate.bypass_optimizer(self.trainer.optimizer)

    def _check_update(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        """Runs before every `optimizer.step()` of the process: an update of the model that was not settled is reported."""
        if not self.watches or self.recorder.phase in (Phase.DECIDED, Phase.SKIPPED):
            return
        mine = {id(parameter) for parameter in self.trainer.model.parameters()}
        if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            self._report_unguarded()
            if self.settles:  # nobody will
                self.recorder.abandon()

    def _report_unguarded(self) -> None:
        """Reports, once a run, a step that passed by the guard."""
        if self._has_reported_update or self.boundary.off:  # which says more
            return
        self._has_reported_update = True
        hidden = self.host.find_hidden(self.trainer) or find_own_loop(type(self.trainer))
        inside = self.recorder.phase is Phase.RUNNING
        why = f"{', '.join(hidden)} of {type(self.trainer).__name__} replaces the method of the Trainer" if hidden else (
            "training_step updates the weights itself" if inside else "its training loop is not that of the Trainer"
        )  # fmt: skip
        step = self.trainer.state.global_step
        message = f"step {step} and others like it are not guarded because {why}"
        self.guard.journal.write_once(Event(step, Signal.GUARD_FAILED, Action.OBSERVED, message))

    def _abandon_step(self) -> None:
        """Leaves out the step during which the run was halted, from weights and log alike."""
        self._skip_optimizer()
        self.recorder.restore_running_loss([])
        self._leave_out_step()
        if self.runner is not None:
            self.runner.remove_metrics()
        self.recorder.release()

    def _clip(
        self, outcome: StepOutcome, runner: TrainerRunner, max_norm: float, host_clip: Callable[[], Any] | None
    ) -> Any:
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
                self._leave_out_step()

    def _leave_out_step(self) -> None:
        self._num_left_out += 1
        compat.forget_step(self.trainer)

    @property
    def has_no_mean(self) -> bool:
        """Whether every step of the run was skipped, so that there is no loss to take the mean of."""
        return self._num_left_out > 0 and compat.counts_no_step(self.trainer, self._num_left_out)

    def end_step(self) -> None:
        """Lets the optimizer step again, once a skipped step has passed."""
        if self.recorder.phase is Phase.SKIPPED:
            compat_accelerate.resume_optimizer(self.trainer.optimizer)
        self.recorder.end_step()

    def after_update(self) -> None:
        """Runs the monitors on what the optimizer did, before anything is logged, evaluated or saved."""
        failure = self.guard.monitor_set.after_update()
        if failure is not None and self.runner is not None:
            self._recover(self.runner.model, failure, self.trainer.state.global_step)

    def after_epoch(self) -> None:
        """Keeps a non-finite loss out of the log when an epoch ends inside a group, which no step decides."""
        losses = self.guard.group.losses
        if self.acts and losses and not all(map(math.isfinite, read_host(losses))):
            self.recorder.restore_running_loss([torch.where(torch.isfinite(loss), loss, 0.0) for loss in losses])

    # ---- losses, log, halt ----

    def log_metrics(self) -> dict[str, float]:
        """Returns what the guard adds to a row of training losses; what is not news goes to `metrics.jsonl` only."""
        online = {} if self.online is None else self.online.take_metrics()
        counted = {**self.guard.counter.as_metrics(), **online}
        metrics = {**counted, **self.guard.monitor_set.metrics()}
        self.record.keep_metrics(metrics)
        return metrics if self.policy.full_metrics else find_news(counted)

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

        def stop(*_: Any) -> bool:
            self.halting.stop(model, f"{failure.reason} The guard failed to rewind the run.")
            return False

        return self.boundary.call("rewind", self.halting.recover, model, failure, step, repeats, otherwise=stop)

    def check_loss(self, result: Any, with_outputs: bool, training: bool) -> Any:
        """Checks what `compute_loss` returned: `None` is an error, an evaluation loss is kept."""
        loss = result[0] if with_outputs and isinstance(result, tuple) else result
        if loss is None and training:  # a prediction_step may do without
            raise LossMissingError(
                "compute_loss must return a loss, got None. Check that the batch holds labels and that the model or "
                "compute_loss_func returns its loss."
            )
        if not training:
            self.evaluation.keep(loss)
        return result
