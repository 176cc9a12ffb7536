"""The guard of one trainer: what the mixin's overrides call, in the order of a training step."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from ...core.event import Culprit, Event
from ...core.finite import read_host
from ...core.ranks import Ranks
from ...core.rerun.micro_batch import AccumulationGroup
from ...core.step.guard import Guard
from ...core.step.step_reading import StepOutcome
from ...core.vocabulary import Action, Signal
from ...errors import LossMissingError
from ..compat import trainer as compat
from ..data.batch_limits import find_limits
from ..data.checked_collator import CheckedCollator
from ..generation.guard_generation import can_generate, guard_generation
from ..rl.ratio_bound import RatioBound
from ..rl.rollout import Rollout
from .arguments import GuardArguments
from .evaluation import Evaluation
from .halting import Ending
from .host_methods import HostMethods
from .learning_watch import LearningWatch
from .run_record import RunRecord
from .step_recorder import StepRecorder

logger = logging.getLogger("hf_nanguard")


class TrainerGuard:
    """Everything the guard knows about one trainer.

    Args:
        trainer (`Trainer`):
            The guarded trainer, already built.
        arguments (`GuardArguments`):
            The settings.
    """

    def __init__(self, trainer: Any, arguments: GuardArguments):
        self.trainer = trainer
        self.arguments = arguments
        self.policy = arguments.policy()
        self.on = self.policy.mode != "off"
        self.deepspeed = trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
        if self.deepspeed and self.on:
            self.policy = replace(self.policy, mode="observe", skip_grad_norm=None)
        self.acts = self.policy.acts
        ranks = Ranks(trainer.args.device)
        self.record = RunRecord(trainer, ranks.rank)
        self.guard = Guard(policy=self.policy, ranks=ranks, on_event=self.record.events, folder=self.record.directory)
        self.evaluation = Evaluation(trainer, self.guard)
        self.intake = StepRecorder(trainer, self.guard, self.deepspeed)
        self.training_now = False
        self.filters = trainer.args.logging_nan_inf_filter
        self.stepping = False
        self.has_forgotten = False  # a step of this run
        self.bypassed = False
        self.rollout: Rollout | None = None  # of an online trainer, as the next
        self.ratio: RatioBound | None = None
        self.learning = LearningWatch(trainer, self.guard)
        self.guarding_generation = False
        self.ending = Ending(trainer, self.guard)
        self.host: HostMethods | None = None  # as the mixin found it
        self.is_ending = False  # the run stops with the step in the making, which must not be taken

    @property
    def watches(self) -> bool:
        """Whether the guard takes part in the steps that are run now; those that somebody runs by hand are their own."""
        return self.on and self.training_now

    @property
    def replaying(self) -> bool:
        """Whether the guard is running a held micro-batch again."""
        return self.guard.replaying

    # ---- a run ----

    @contextmanager
    def training(self) -> Iterator[None]:
        """Surrounds `train()`: steps are guarded meanwhile, and not those that anybody runs by hand."""
        self.intake.settled, self.is_ending, self.training_now = True, False, True
        self.ending.last_good = None
        self.has_forgotten = False
        self.guard.escalation.healthy()
        if self.on and self.guard.ranks.rank == 0:
            self._say_limits()
        try:
            with self._guarded_own_step():
                yield
        finally:
            self.intake.recording = self.training_now = False
            self.guard.monitor_set.close()
            self.after_step()  # an error may have come between a skipped step and its end
            self.guard.group = AccumulationGroup()

    @contextmanager
    def log_filter(self, on: bool) -> Iterator[None]:
        """Turns the log filter that hides NaN (and reads every loss twice) on or off meanwhile, for a guard that acts.

        It is off in an epoch, but for what logs, evaluates and saves there: the arguments are shown and kept as they were
        given.
        """
        args = self.trainer.args
        before = args.logging_nan_inf_filter
        if self.acts:
            args.logging_nan_inf_filter = on
        try:
            yield
        finally:
            args.logging_nan_inf_filter = before

    @contextmanager
    def _guarded_own_step(self) -> Iterator[None]:
        """Guards a `training_step` that was put on the trainer itself, where it hides that of its class."""
        own = vars(self.trainer).get("training_step")
        if own is None:
            yield
            return

        def training_step(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            return self.guard_step(own, model, inputs, num_items_in_batch)

        vars(self.trainer)["training_step"] = training_step
        try:
            yield
        finally:
            vars(self.trainer)["training_step"] = own

    def _say_limits(self) -> None:
        if self.deepspeed:
            logger.warning(
                "hf_nanguard: DeepSpeed steps its engine inside the backward. Bad labels and inputs are filled before "
                "they reach it (nanguard_on_bad_input='repair'), but a bad loss or gradient is only reported, whatever "
                "nanguard_on_nonfinite says. Use DDP or FSDP2 to have it contained."
            )
        if compat.dispatches_batches(self.trainer):
            logger.warning(
                "hf_nanguard: rank 0 dispatches the batches of this dataset, so labels and inputs are not checked before "
                "the forward and rows are not known. Set accelerator_config={'dispatch_batches': False} to have that."
            )

    @contextmanager
    def guarded_generation(self) -> Iterator[None]:
        """Guards whatever generates meanwhile: an evaluation, a callback that shows completions. An online trainer guards
        its own generation, completion by completion."""
        policy, model = self.policy, self.trainer.model
        idle = self.rollout is not None or not self.acts or policy.logits_mode == "off" or self.guarding_generation
        if idle or not can_generate(model):
            yield
            return
        self.guarding_generation = True
        settings = (policy.logits_mode, policy.logits_clip_value, policy.logits_min_prob)
        try:
            with guard_generation(model, *settings) as watch:
                yield
        finally:
            self.guarding_generation = False
        if watch.num_repaired or watch.num_ended:
            step = self.trainer.state.global_step
            values = {"num_repaired": watch.num_repaired, "num_ended": watch.num_ended}
            self.guard.journal.write(
                Event(step, Signal.LOGITS_NONFINITE, Action.REPAIRED, f"at step {step}, {watch.describe()}", None,
                      self.guard.ranks.rank, values, Culprit(phase="sampling"))
            )  # fmt: skip

    @contextmanager
    def checked_collate(self) -> Iterator[None]:
        """Wraps the data collator while the training dataloader is built."""
        trainer = self.trainer
        collator = trainer.data_collator
        if not compat.dispatches_batches(trainer):
            limits = find_limits(trainer.model, compat.loss_shifts_labels(trainer), compat.has_own_loss(trainer))
            verdict = self.policy.on_bad_input if self.acts else "repair" if self.deepspeed else "observe"
            trainer.data_collator = CheckedCollator(collator, limits, verdict, can_drop=self.acts)
        try:
            yield
        finally:
            trainer.data_collator = collator

    # ---- a group ----

    def guard_step(
        self, training_step: Callable[..., Tensor], model: nn.Module, inputs: Any, num_items: Tensor | int | None
    ) -> Tensor:
        """Runs a `training_step` as one micro-batch of `train()`, or as it is: called by hand, again, or by another one."""
        if not self.watches or self.replaying or self.stepping:
            return training_step(model, inputs, num_items)
        self.stepping = True
        try:
            return self.intake.take(training_step, model, inputs, num_items)
        finally:
            self.stepping = False

    # ---- the decision ----

    def settle(self, model: nn.Module, max_norm: float, host_clip: Callable[[], Any] | None, norm: Any = None) -> Any:
        """Settles the group and clips what is left of it.

        Args:
            model (`nn.Module`):
                The model in training.
            max_norm (`float`):
                What to clip to; 0 for no clipping.
            host_clip (`Callable`, *optional*):
                The host's own clip, for set-ups where norm and clip cannot be told apart.
            norm (`Tensor` or `float`, *optional*):
                The norm, if somebody has clipped already.

        Returns:
            The norm for the log, `None` for a step that is skipped.
        """
        guard, trainer, runner = self.guard, self.trainer, self.intake.runner
        self.intake.settled = True
        guard.monitor_set.end_backward()
        if self.is_ending:
            return self._forgo_step()
        if runner is None or not guard.group.micro_batches:
            self._tell_unseen()
            return norm if host_clip is None else host_clip()
        apart = host_clip is None or compat.clips_in_one_piece(trainer, model)
        if not apart and norm is None:
            norm = host_clip()  # type: ignore[misc]
        clipped = norm is not None
        told_here = runner.lockstep or guard.ranks.size == 1  # a training_step may have a backward of its own
        if told_here and any(micro.must_be_dropped for micro in guard.group.micro_batches):
            runner.poison()
            norm = float("nan") if clipped else None
        given = torch.as_tensor(norm, device=trainer.args.device) if clipped else None
        outcome = guard.settle(guard.group, runner, trainer.state.global_step, given, self.intake.labelled)
        self._keep_log_true(outcome)
        self.learning.observe([note.lesson for note in self.intake.notes], self.rollout)
        if outcome.stepped:
            norm = self._clip(outcome, max_norm, host_clip if clipped else None)
            if outcome.redone is None and self.policy.on_loss_error == "drop" and guard.ranks.size > 1:
                self.intake.stand_in = guard.group.micro_batches[0].payload
        else:
            norm = None
            self.bypassed = True
            compat.bypass_optimizer(trainer)
        trainer.current_gradient_accumulation_steps = guard.group.weight.steps
        guard.group = AccumulationGroup()
        if outcome.halt is not None:
            self.ending.halt(model, outcome.halt)
        elif outcome.stepped:
            guard.monitor_set.before_update()
        return norm

    def _tell_unseen(self) -> None:
        """Tells, once, of a step that was made past the guard: its `training_step` was replaced in the middle of a run."""
        if self.training_now and Signal.GUARD_FAILED not in self.guard.journal.written:
            step = self.trainer.state.global_step
            message = (
                f"step {step} did not come through the guarded training_step, which was replaced: it is not guarded"
            )
            self.guard.journal.write_once(Event(step, Signal.GUARD_FAILED, Action.OBSERVED, message))

    def _forgo_step(self) -> None:
        """Leaves out a step in whose making the run was ended, from weights and log alike."""
        self.bypassed = True
        compat.bypass_optimizer(self.trainer)
        if self.intake.runner is not None and self.intake.loss_before is not None:
            compat.running_loss(self.trainer).copy_(self.intake.loss_before)
            self._forget_step()
            self.intake.runner.strike_group()
        self.guard.group = AccumulationGroup()

    def _clip(self, outcome: StepOutcome, max_norm: float, host_clip: Callable[[], Any] | None) -> Any:
        """Clips by the norm that is known already, or as the host does if it had clipped before; returns the norm."""
        assert self.intake.runner is not None
        norm: Any = outcome.norm
        bounds = [bound for bound in (max_norm, outcome.clip_to) if bound]
        if host_clip is not None:
            norm = host_clip() if outcome.fresh else norm
            bounds = [outcome.clip_to] if outcome.clip_to else []
        if bounds:
            by = norm if host_clip is None else self.intake.runner.norm()
            torch.nn.utils.clip_grads_with_norm_(self.intake.runner.parameters, min(bounds), by)
        return norm

    def _keep_log_true(self, outcome: StepOutcome) -> None:
        """Makes the running loss what it would be had the dropped micro-batches never come."""
        if outcome.redone is None or not self.acts:
            return
        assert self.intake.runner is not None
        assert self.intake.loss_before is not None
        total = compat.running_loss(self.trainer)
        total.copy_(self.intake.loss_before)
        for loss in outcome.redone:
            total += loss.to(total.device)
        if self.policy.on_nonfinite == "floor":
            total += outcome.num_dropped * self.policy.loss_floor
        elif not outcome.stepped:
            self._forget_step()
        if not outcome.stepped:
            self.intake.runner.strike_group()

    def _forget_step(self) -> None:
        self.has_forgotten = True
        compat.forget_step(self.trainer)

    @property
    def has_no_mean(self) -> bool:
        """Whether every step of the run was skipped, so that there is no loss to take the mean of."""
        return self.has_forgotten and compat.counts_no_step(self.trainer)

    def after_step(self) -> None:
        """Runs once the step has passed: the optimizer listens again."""
        if self.bypassed:
            self.bypassed = False
            compat.resume_optimizer(self.trainer)

    def after_update(self) -> None:
        """Lets the monitors look at what the optimizer did, before anything is logged, evaluated or saved."""
        reason = self.guard.monitor_set.after_update()
        if reason is not None and self.intake.runner is not None:
            self.ending.halt(self.intake.runner.model, reason)

    def after_epoch(self) -> None:
        """Keeps a loss that is not finite out of the log when an epoch ends inside a group, which no step decides."""
        losses = self.guard.group.losses
        if not self.acts or not losses or all(map(math.isfinite, read_host(losses))):
            return
        total = compat.running_loss(self.trainer)
        assert self.intake.loss_before is not None
        total.copy_(self.intake.loss_before)
        for loss in losses:
            total += torch.where(torch.isfinite(loss), loss, 0.0).to(total.device)

    def rollout_metrics(self) -> dict[str, float]:
        """Returns what an online trainer adds to a row of the log: how many log-ratios had to be bounded, if any."""
        counts = {} if self.ratio is None else self.ratio.take_counts()
        return {f"nanguard/bounded_{name}": float(number) for name, number in counts.items() if number}

    def end_if(self, reason: str | None) -> None:
        """Ends the run if there is a reason to, decided on every rank alike."""
        if reason is None:
            return
        self.is_ending = self.intake.recording  # in a step, not in an evaluation between two
        model = self.trainer.model_wrapped if self.intake.runner is None else self.intake.runner.model
        self.ending.halt(model, reason)

    def check_loss(self, result: Any, with_outputs: bool, training: bool) -> Any:
        """Looks at what `compute_loss` returned: nothing at all is an error, an evaluation loss is kept."""
        loss = result[0] if with_outputs and isinstance(result, tuple) else result
        if loss is None:
            raise LossMissingError(
                "compute_loss must return a loss, got None. Check that the batch holds labels and that the model or "
                "compute_loss_func returns its loss."
            )
        if not training:
            self.evaluation.keep(loss)
        return result
