"""How the micro-batches of a group come in: each runs through the host's `training_step` and is held until the step is decided."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...core.event import Culprit, Event
from ...core.rerun.micro_batch import AccumulationGroup, BatchAction, Finding, MicroBatch
from ...core.rng import RngState
from ...core.step.guard import Guard
from ...core.vocabulary import Action, Signal
from ...errors import LossMissingError, NonFiniteError
from ..compat import trainer as compat
from ..data.checked_collator import NOTE, BatchNote, name_rows
from ..data.dataset_rows import ROWS, RowRecord
from ..monitors.trainer_monitors import build_monitors
from .trainer_runner import HeldInputs, LossWeight, TrainerRunner


class StepRecorder:
    """Holds what is known of the group that is being made.

    Args:
        trainer (`Trainer`):
            The guarded trainer.
        guard (`Guard`):
            Its guard.
        deepspeed (`bool`):
            Whether DeepSpeed has the optimizer.
    """

    def __init__(self, trainer: Any, guard: Guard, deepspeed: bool):
        self.trainer = trainer
        self.guard = guard
        self.policy = guard.policy
        self.deepspeed = deepspeed
        self.rows = RowRecord()
        self.runner: TrainerRunner | None = None
        self.watched_optimizer: Any = None  # a second run may have another one
        self.notes: list[BatchNote] = []
        self.batch_rows: list[list[int] | None] = []
        self.prepared: tuple[HeldInputs, RngState] | None = None
        self.recording = False
        self.settled = True
        self.stand_in: HeldInputs | None = None
        self.exchange: compat.Exchange | None = None
        self.loss_before: Tensor | None = None
        self.labelled = False

    def begin_group(self, batches: list[Any]) -> None:
        """Takes the notes out of the batches of the next optimizer step and looks up their rows.

        A stream may have ended inside a group: the host then leaves what its last batches have added to the gradients to
        the first step of the next pass, so they belong to that group.
        """
        if self.settled:
            self.notes, self.batch_rows = [], []
            self.guard.group = AccumulationGroup()
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
        self.prepared = (HeldInputs.of(inputs), RngState.capture(device_type))

    def take(
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
        must_go = any(finding.action in (BatchAction.DROP, BatchAction.HALT) for finding in findings)
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
            self.guard.monitor_set.begin(build_monitors(self.trainer.args, bare, optimizer, self.guard))
        self.runner.keep_books()
        self.runner.buffers.keep()
        self.guard.group.weight = LossWeight(self.trainer.current_gradient_accumulation_steps, num_items)
        self.loss_before = compat.running_loss(self.trainer).clone()
        self.guard.monitor_set.begin_step(self.trainer.state.global_step)

    def _rows_of(self, payload: HeldInputs | None, index: int) -> list[int] | Tensor | None:
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
        drop = (
            self.policy.acts and self.policy.on_loss_error == "drop" and not isinstance(error, torch.OutOfMemoryError)
        )
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
            self.guard.group = AccumulationGroup()  # the host may catch it and begin anew, with a smaller batch
            self.settled = True
            raise error
        return Finding(signal, message, BatchAction.DROP, None, "loss")

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
