"""The guard of one trainer: what the mixin's overrides call, in the order of a training step."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from ..core.agreement import Ranks
from ..core.event import Culprit, Event
from ..core.finite import read_host
from ..core.group import Finding, Group, MicroBatch
from ..core.guard import Guard
from ..core.incident import Settlement
from ..core.rng import RngState
from ..core.signal import Action, Signal
from ..errors import LossMissingError, NonFiniteError
from . import compat
from .arguments import GuardArguments
from .collate import NOTE, BatchNote, CheckedCollator, name_rows
from .ending import Ending
from .evaluation import Evaluation
from .fact import find_limits
from .generation import can_generate, guard_generation
from .learning import LearningWatch
from .patrol import build_monitors
from .ratio import RatioBound
from .record import RunRecord
from .rollout import Rollout
from .row import ROWS, RowRecord
from .runner import Prepared, Share, TrainerRunner

logger = logging.getLogger("hf_nanguard")


class Session:
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
        self.rows = RowRecord()
        self.runner: TrainerRunner | None = None
        self.watched_optimizer: Any = None  # a second run may have another one
        self.notes: list[BatchNote] = []
        self.batch_rows: list[list[int] | None] = []
        self.prepared: tuple[Prepared, RngState] | None = None
        self.recording = False
        self.training_now = False
        self.stepping = False
        self.has_forgotten = False  # a step of this run
        self.settled = True
        self.stand_in: Prepared | None = None
        self.exchange: compat.Exchange | None = None
        self.loss_before: Tensor | None = None
        self.bypassed = False
        self.labelled = False
        self.rollout: Rollout | None = None  # of an online trainer, as the next
        self.ratio: RatioBound | None = None
        self.learning = LearningWatch(trainer, self.guard)
        self.guarding_generation = False
        self.ending = Ending(trainer, self.guard)
        self.is_ending = False  # the run stops with the step in the making, which must not be taken

    @property
    def replaying(self) -> bool:
        """Whether the guard is running a held micro-batch again."""
        return self.guard.replaying

    # ---- a run ----

    @contextmanager
    def training(self) -> Iterator[None]:
        """Surrounds `train()`: the log filter that hides NaN (and reads every loss twice) is off meanwhile."""
        args = self.trainer.args
        hidden = args.logging_nan_inf_filter
        self.settled, self.is_ending, self.training_now = True, False, True
        self.ending.last_good = None
        self.has_forgotten = False
        self.guard.ladder.healthy()
        if self.on and self.guard.ranks.rank == 0:
            self._say_limits()
        if self.acts:
            args.logging_nan_inf_filter = False
        try:
            with self._guarded_own_step():
                yield
        finally:
            args.logging_nan_inf_filter = hidden
            self.recording = self.training_now = False
            self.guard.patrol.close()
            self.after_step()  # an error may have come between a skipped step and its end
            self.guard.group = Group()

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
        if self.on and self.training_now and not compat.dispatches_batches(trainer):
            limits = find_limits(trainer.model, compat.loss_shifts_labels(trainer), compat.has_own_loss(trainer))
            verdict = self.policy.on_bad_input if self.acts else "repair" if self.deepspeed else "observe"
            trainer.data_collator = CheckedCollator(collator, limits, verdict, can_drop=self.acts)
        try:
            yield
        finally:
            trainer.data_collator = collator

    # ---- a group ----

    def begin_group(self, batches: list[Any]) -> None:
        """Takes the notes out of the batches of the next optimizer step and looks up their rows.

        A stream may have ended inside a group: the host then leaves what its last batches have added to the gradients to
        the first step of the next pass, so they belong to that group.
        """
        if self.settled:
            self.notes, self.batch_rows = [], []
            self.guard.group = Group()
            self.settled = False
        for batch in batches:
            note = batch.pop(NOTE, BatchNote()) if isinstance(batch, MutableMapping) else BatchNote()
            note, rows = name_rows(note, self.rows.next(batch, note.num_samples))
            self.notes.append(note)
            self.batch_rows.append(rows)

    def hold_inputs(self, inputs: Any) -> None:
        """Takes hold of what `_prepare_inputs` returned, and of the random state right before the forward."""
        if self.exchange is not None:
            self.exchange.forget()  # generation is not done again
        device_type = self.trainer.args.device.type
        self.prepared = (Prepared.of(inputs), RngState.capture(device_type))

    def guard_step(
        self, training_step: Callable[..., Tensor], model: nn.Module, inputs: Any, num_items: Tensor | int | None
    ) -> Tensor:
        """Runs a `training_step` as one micro-batch of `train()`, or as it is: called by hand, again, or by another one."""
        if not self.on or not self.training_now or self.replaying or self.stepping:
            return training_step(model, inputs, num_items)
        self.stepping = True
        try:
            return self.run_micro_batch(training_step, model, inputs, num_items)
        finally:
            self.stepping = False

    def run_micro_batch(
        self, training_step: Callable[..., Tensor], model: nn.Module, inputs: Any, num_items: Tensor | int | None
    ) -> Tensor:
        """Runs one micro-batch of the group through the host's `training_step` and holds it."""
        guard, trainer = self.guard, self.trainer
        group = guard.group
        if not group.micro_batches:
            self._open_group(model, num_items)
        assert self.runner is not None
        index = len(group.micro_batches)
        note = self.notes[index] if index < len(self.notes) else BatchNote()
        findings = note.findings
        must_go = any(finding.verdict in ("drop", "halt") for finding in findings)
        self.prepared, self.recording = None, True
        rows = None
        try:
            with (
                self._poisoned() if must_go else nullcontext(),
                self._counted_exchange(model),
                self._counted_backward(),
            ):
                loss = training_step(model, inputs, num_items)
        except NonFiniteError:  # a halt that was decided on the way, on every rank
            raise
        except Exception as error:  # any user code may raise here; it is raised again unless the policy drops it
            self.recording = False
            finding = self._judge_error(error, index)
            rows = self._rows_of(self.prepared[0] if self.prepared else None, index)
            with nullcontext() if self.exchange is None else self.exchange.resumed():
                loss = self._stand_in_for(training_step, model, num_items)
            findings = (*findings, finding)
        finally:
            self.recording = False
        payload, rng = self.prepared or (None, RngState.capture(trainer.args.device.type))
        rows = self._rows_of(payload, index) if rows is None else rows
        micro = MicroBatch(index, payload, rng, findings, rows, loss.detach())
        group.micro_batches.append(micro)
        return loss

    def _counted_exchange(self, model: nn.Module) -> AbstractContextManager:
        """Returns a context that counts what ranks exchange, if a loss that fails on one of them is to be dropped."""
        together = self.policy.on_loss_error == "drop" and self.guard.ranks.size > 1
        self.exchange = compat.Exchange(self.trainer.accelerator, model) if together else None
        return nullcontext() if self.exchange is None else self.exchange.counted()

    @contextmanager
    def _counted_backward(self) -> Iterator[None]:
        """Takes note of a `training_step` that runs several backward passes, if there are ranks that have to keep up."""
        if self.guard.ranks.size == 1:
            yield
            return
        assert self.runner is not None
        count = compat.BackwardCount(self.trainer.accelerator)
        with count.counted():
            yield
        self.runner.num_backwards = max(self.runner.num_backwards, count.number)

    def _poisoned(self) -> AbstractContextManager:
        """Returns a context whose backward tells all ranks that this micro-batch must go. Shards are told in `settle`."""
        assert self.runner is not None
        if self.runner.lockstep:
            return nullcontext()
        return compat.poisoned_backward(self.trainer.accelerator, self.runner.parameters[0])

    def _open_group(self, model: nn.Module, num_items: Tensor | int | None) -> None:
        same = self.watched_optimizer is self.trainer.optimizer
        if self.runner is None or self.runner.model is not model or not same:
            self.watched_optimizer = self.trainer.optimizer
            self.runner = TrainerRunner(self.trainer, model, self.guard.ranks)
            bare = self.trainer.accelerator.unwrap_model(model)
            optimizer = None if self.deepspeed else self.trainer.optimizer
            self.guard.patrol.begin(build_monitors(self.trainer.args, bare, optimizer, self.guard))
        self.runner.keep_books()
        self.runner.buffers.keep()
        self.guard.group.share = Share(self.trainer.current_gradient_accumulation_steps, num_items)
        self.loss_before = compat.running_loss(self.trainer).clone()
        self.guard.patrol.begin_step(self.trainer.state.global_step)

    def _rows_of(self, payload: Prepared | None, index: int) -> list[int] | Tensor | None:
        if payload is not None and isinstance(payload.inputs, Mapping):
            self.labelled = "labels" in payload.inputs
            if ROWS in payload.inputs:
                return payload.inputs[ROWS]
        return self.batch_rows[index] if index < len(self.batch_rows) else None

    def current_rows(self) -> list[int] | None:
        """Returns the dataset rows of the batch that is being prepared."""
        index = len(self.guard.group.micro_batches)
        return self.batch_rows[index] if self.recording and index < len(self.batch_rows) else None

    def _judge_error(self, error: Exception, index: int) -> Finding:
        """Turns an exception inside the loss into an event and raises it again, unless the policy drops it."""
        missing = isinstance(error, LossMissingError) or compat.lost_loss(error)
        signal = Signal.LOSS_MISSING if missing else Signal.LOSS_ERROR
        text = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        message = f"{type(error).__name__} inside the loss: {text}"
        drop = self.acts and self.policy.on_loss_error == "drop" and not isinstance(error, torch.OutOfMemoryError)
        helpless = self.prepared is None or (self.guard.ranks.size > 1 and self.stand_in is None)
        if drop and self._has_begun_sharded_forward():  # a stand-in would gather shards that nobody else gathers now
            helpless = True
            message += "; it cannot be dropped, for its forward had begun and the parameters are sharded"
        if not drop or helpless:
            rows = self.batch_rows[index] if index < len(self.batch_rows) else None
            self.guard.journal.write(
                Event(self.trainer.state.global_step, signal, Action.REFUSED, message, index, self.guard.ranks.rank,
                      culprit=Culprit(phase="loss", rows=rows))
            )  # fmt: skip
            self.guard.group = Group()  # the host may catch it and begin anew, with a smaller batch
            self.settled = True
            raise error
        return Finding(signal, message, "drop", None, "loss")

    def _has_begun_sharded_forward(self) -> bool:
        return (
            self.runner is not None
            and self.runner.lockstep
            and self.exchange is not None
            and self.exchange.forwards > 0
        )

    def _stand_in_for(
        self, training_step: Callable[..., Tensor], model: nn.Module, num_items: Tensor | int | None
    ) -> Tensor:
        """Runs the host's step to its end in place of a batch whose loss failed, leaving NaN in a gradient.

        Among several ranks with a batch that is known to work, so that this rank takes part in all they do together;
        alone with nothing but the NaN.
        """
        runner = self.runner
        assert runner is not None
        assert self.prepared is not None
        alone = self.stand_in is None
        runner.replayed = self.prepared[0] if self.stand_in is None else self.stand_in
        self.prepared = (runner.replayed, self.prepared[1])
        try:
            with self._lossless() if alone else nullcontext(), self._poisoned():
                return training_step(model, runner.replayed.again(), num_items)
        finally:
            runner.replayed = None

    @contextmanager
    def _lossless(self) -> Iterator[None]:
        """Replaces the loss by a constant zero for a moment."""
        trainer = self.trainer
        before = vars(trainer).get("compute_loss")
        vars(trainer)["compute_loss"] = lambda *args, **kwargs: torch.zeros((), device=trainer.args.device)
        try:
            yield
        finally:
            del vars(trainer)["compute_loss"]
            if before is not None:
                vars(trainer)["compute_loss"] = before

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
        guard, trainer, runner = self.guard, self.trainer, self.runner
        self.settled = True
        guard.patrol.end_backward()
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
        if told_here and any(micro.must_go for micro in guard.group.micro_batches):
            runner.poison()
            norm = float("nan") if clipped else None
        given = torch.as_tensor(norm, device=trainer.args.device) if clipped else None
        settlement = guard.settle(guard.group, runner, trainer.state.global_step, given, self.labelled)
        self._keep_log_true(settlement)
        self.learning.observe([note.lesson for note in self.notes], self.rollout)
        if settlement.steps:
            norm = self._clip(settlement, max_norm, host_clip if clipped else None)
            if settlement.redone is None and self.policy.on_loss_error == "drop" and guard.ranks.size > 1:
                self.stand_in = guard.group.micro_batches[0].payload
        else:
            norm = None
            self.bypassed = True
            compat.bypass_optimizer(trainer)
        trainer.current_gradient_accumulation_steps = guard.group.share.steps
        guard.group = Group()
        if settlement.halt is not None:
            self.ending.halt(model, settlement.halt)
        elif settlement.steps:
            guard.patrol.before_update()
        return norm

    def _tell_unseen(self) -> None:
        """Tells, once, of a step that was made past the guard: its `training_step` was replaced in the middle of a run."""
        if self.training_now and Signal.GUARD_FAILED not in self.guard.journal.told:
            step = self.trainer.state.global_step
            message = (
                f"step {step} did not come through the guarded training_step, which was replaced: it is not guarded"
            )
            self.guard.journal.write_once(Event(step, Signal.GUARD_FAILED, Action.OBSERVED, message))

    def _forgo_step(self) -> None:
        """Leaves out a step in whose making the run was ended, from weights and log alike."""
        self.bypassed = True
        compat.bypass_optimizer(self.trainer)
        if self.runner is not None and self.loss_before is not None:
            compat.running_loss(self.trainer).copy_(self.loss_before)
            self._forget_step()
            self.runner.strike_group()
        self.guard.group = Group()

    def _clip(self, settlement: Settlement, max_norm: float, host_clip: Callable[[], Any] | None) -> Any:
        """Clips by the norm that is known already, or as the host does if it had clipped before; returns the norm."""
        assert self.runner is not None
        norm: Any = settlement.norm
        bounds = [bound for bound in (max_norm, settlement.clip_to) if bound]
        if host_clip is not None:
            norm = host_clip() if settlement.fresh else norm
            bounds = [settlement.clip_to] if settlement.clip_to else []
        if bounds:
            by = norm if host_clip is None else self.runner.norm()
            torch.nn.utils.clip_grads_with_norm_(self.runner.parameters, min(bounds), by)
        return norm

    def _keep_log_true(self, settlement: Settlement) -> None:
        """Makes the running loss what it would be had the dropped micro-batches never come."""
        if settlement.redone is None or not self.acts:
            return
        assert self.runner is not None
        assert self.loss_before is not None
        total = compat.running_loss(self.trainer)
        total.copy_(self.loss_before)
        for loss in settlement.redone:
            total += loss.to(total.device)
        if self.policy.on_nonfinite == "floor":
            total += settlement.num_dropped * self.policy.loss_floor
        elif not settlement.steps:
            self._forget_step()
        if not settlement.steps:
            self.runner.strike_group()

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
        reason = self.guard.patrol.after_update()
        if reason is not None and self.runner is not None:
            self.ending.halt(self.runner.model, reason)

    def after_epoch(self) -> None:
        """Keeps a loss that is not finite out of the log when an epoch ends inside a group, which no step decides."""
        losses = self.guard.group.losses
        if not self.acts or not losses or all(map(math.isfinite, read_host(losses))):
            return
        total = compat.running_loss(self.trainer)
        assert self.loss_before is not None
        total.copy_(self.loss_before)
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
        self.is_ending = self.recording  # in a step, not in an evaluation between two
        model = self.trainer.model_wrapped if self.runner is None else self.runner.model
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
