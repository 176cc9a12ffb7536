"""What is known of one optimizer step, from the first batch of its accumulation group to the clip."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from threading import get_ident

import torch
from torch import Tensor

from ...boundary import HostCall
from ...core.event import Event
from ...core.finite import read_host
from ...core.rerun.buffers import BufferKeeper
from ...core.rerun.micro_batch import AccumulationGroup, BatchAction, MicroBatch
from ...core.rng import RngState
from ...core.step.guard import Guard
from ...core.vocabulary import Action, Signal
from ...errors import NonFiniteError
from ..compat.accelerate import surrounded_backwards
from ..compat.prepared_dataset import PreparedRows, find_prepared_rows
from ..compat.trainer import running_loss, surrounded_own_method
from ..compat.trainer_protocol import HostTrainer
from ..data.checked_collator import BatchNote, name_rows
from ..data.dataset_rows import ROWS, BatchRecord
from ..data.learning_signal import NoSignal
from ..data.masked_samples import MaskedSamples
from ..data.row_quarantine import RowQuarantine
from .held_inputs import HeldInputs, LossWeight
from .loss_errors import LossErrors
from .trainer_runner import TrainerRunner


class Phase(Enum):
    """Where a guarded trainer is.

    OUTSIDE     no `train()` is running: whatever somebody runs by hand is not guarded
    IDLE        in `train()`, and no accumulation group is open
    COLLECTING  batches have been fetched; the group is open, between two micro-batches
    RUNNING     inside the host's `training_step` of one micro-batch
    DECIDED     the step is settled; the optimizer may step
    SKIPPED     the step is settled; the optimizer does not step, until the trainer logs and saves
    """

    OUTSIDE = "outside"
    IDLE = "idle"
    COLLECTING = "collecting"
    RUNNING = "running"
    DECIDED = "decided"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class StepRecord:
    """A finished accumulation group, ready to be settled."""

    group: AccumulationGroup
    no_signals: list[NoSignal | None]  # for each batch, why it has nothing to learn from
    # Whether its batches have labels for a loss of the hosts: then a loss of exactly 0 is worth an event. A margin loss of the
    # user's is 0 wherever the margin is kept.
    is_labelled: bool


class StepRecorder:
    """Records the micro-batches of a trainer's current step."""

    def __init__(self, trainer: HostTrainer, guard: Guard, quarantine: RowQuarantine):
        self.trainer = trainer
        self.guard = guard
        self.journal, self.boundary = guard.journal, guard.boundary
        self.group = guard.group  # the accumulation group that is being recorded, or was last
        self.on, self.acts, self.num_ranks = guard.policy.mode != "off", guard.policy.acts, guard.ranks.size
        self.phase = Phase.OUTSIDE
        self.batches = BatchRecord(guard.boundary, quarantine)
        self.masked = MaskedSamples(guard.journal)
        self.loss_errors = LossErrors(trainer, guard)
        self.num_backwards = 0  # largest number in one training_step, counted where several ranks run it
        self._runner: TrainerRunner | None = None  # of the running micro-batch,
        self._buffers: BufferKeeper | None = None  # what it keeps of modules,
        self._thread = 0  # and the thread it runs in
        self._noted: list[tuple[BatchNote, list[int] | None]] = []  # of the group, with their rows
        self._held: tuple[HeldInputs, RngState] | None = None  # of the running micro-batch
        self._device_type = trainer.args.device.type
        self._rng_before = RngState.capture(self._device_type)  # before its training_step
        self._replayed: HeldInputs | None = None  # what _prepare_inputs returns while a micro-batch runs again
        self._loss_before: Tensor | None = None

    def turn_off(self) -> None:
        """Ends the guarding of this trainer for good."""
        self.on = False

    @property
    def watches(self) -> bool:
        """Whether the steps that run now are guarded. Those that somebody runs by hand are not."""
        return self.on and self.phase is not Phase.OUTSIDE

    @property
    def settles(self) -> bool:
        """Whether the step that is being clipped now is guarded and not settled yet."""
        return self.on and self.phase is Phase.COLLECTING

    @property
    def is_open(self) -> bool:
        """Whether a step has begun that is not settled yet."""
        return self.phase in (Phase.COLLECTING, Phase.RUNNING)

    @property
    def has_micro_batches(self) -> bool:
        """Whether the first micro-batch of the group has run."""
        return bool(self.group.micro_batches)

    # ---- in the order of a step ----

    def begin_run(self) -> None:
        """Begins to record a `train()`."""
        self.phase = Phase.IDLE
        self.masked.begin_run()
        # Rows are an explanation: a host in which they cannot be found is guarded anyway.
        unknown = PreparedRows(is_rebuilt=True)
        self.batches.begin_run(
            self.boundary.call("rows", find_prepared_rows, self.trainer, otherwise=lambda trainer: unknown)
        )

    def end_run(self) -> None:
        """Lets go of everything that `train()` left, also after an error."""
        self.phase = Phase.OUTSIDE
        self._held = None
        self.loss_errors.keep_replacement(None)
        self.group = self.guard.begin_group()
        self.masked.report(self.trainer.state.global_step)

    def begin_group(self, batches: Sequence[object]) -> Sequence[object]:
        """Looks up notes and rows of the batches of the next optimizer step; returns the batches, made safe to run.

        A stream may end inside a group. The host then leaves the gradients of its last batches to the first step of the
        next pass, so they belong to that group.
        """
        if not self.is_open:
            self._noted, self._loss_before = [], None
            self.group = self.guard.begin_group()
            self.phase = Phase.OUTSIDE if self.phase is Phase.OUTSIDE else Phase.COLLECTING
        if not isinstance(batches, Sequence):  # of a get_batch_samples of the user's own; it can be read only once
            return batches
        safe = [self._take(batch) for batch in batches]
        is_changed = any(one is not other for one, other in zip(safe, batches, strict=True))
        return safe if is_changed else batches

    def _take(self, batch: object) -> object:
        batch, note, rows = self.batches.next(batch)
        if all(finding.signal is not Signal.LABELS_MASKED for finding in note.findings):  # else it has its own event
            self.masked.count(self.trainer.state.global_step, note.masked, rows)
        note, rows = name_rows(note, rows)
        self._noted.append((note, rows))
        if note.failure is not None and Signal.GUARD_FAILED not in self.journal.written:
            message = f"batches are not checked because {note.failure}"
            event = Event(self.trainer.state.global_step, Signal.GUARD_FAILED, Action.OBSERVED, message)
            self.journal.write(event)
        return batch

    def begin_step(self, weight: LossWeight) -> None:
        """Notes what the first micro-batch of the group is about to change: the running loss."""
        self.group.weigh(weight)
        self._loss_before = running_loss(self.trainer).clone()

    def record(
        self,
        training_step: HostCall,
        runner: TrainerRunner,
        inputs: object,
        num_items: Tensor | int | None,
    ) -> Tensor:
        """Runs one micro-batch of the group through the host's `training_step` and holds it."""
        group, model = self.group, runner.model
        index = len(group.micro_batches)
        if index == len(self._noted):  # it did not come through get_batch_samples
            self._noted.append((BatchNote(), None))
        findings = self._noted[index][0].findings
        must_be_dropped = any(finding.action in (BatchAction.DROP, BatchAction.HALT) for finding in findings)
        self._held, self._rng_before, self.phase = None, RngState.capture(self._device_type), Phase.RUNNING
        self._runner, self._buffers, self._thread = runner, runner.buffers, get_ident()
        rows: list[int] | Tensor | None = None
        try:
            with (
                runner.poisoned() if must_be_dropped else nullcontext(),
                self.loss_errors.watched(model),
                self._watched_backwards(runner),
                surrounded_own_method(self.trainer, "compute_loss", self._watch_loss),
            ):
                loss = training_step(model, inputs, num_items)
        except NonFiniteError:  # a halt that every rank has decided
            raise
        except Exception as error:  # the loss is the user's code; raised again unless the policy drops it
            if error is not training_step.error:  # the guard's own
                raise
            held = self._held
            rows = self._noted[index][1] if held is None else self._rows_of(held[0], index)
            payload, rng = held or (None, self._rng_before)
            finding = self.loss_errors.judge(
                error, MicroBatch(index, payload, rng, row_numbers=rows), runner, group.weight
            )
            if finding is None or held is None:
                self.abandon()
                runner.buffers.abandon()
                raise
            findings = (*findings, finding)
            batch = self.loss_errors.replacement or held[0]
            self._held = (batch, held[1])
            with self.loss_errors.replacing(), runner.poisoned(), self.replaying(batch):
                loss = training_step(model, batch.again(), num_items)
        finally:
            self.phase = Phase.COLLECTING if self.phase is Phase.RUNNING else self.phase
            self._runner = self._buffers = None
        payload, rng = self._held or (None, self._rng_before)
        self._held, ids = None, self._noted[index][0].ids
        rows = self._rows_of(payload, index) if rows is None else rows
        group.micro_batches.append(MicroBatch(index, payload, rng, findings, rows, loss.detach(), ids))
        return loss

    def prepare(self, inputs: object, host_prepare: Callable[[object], object]) -> object:
        """Returns what the host prepares of a batch, and holds it; while a micro-batch runs again, what was held of it.

        A `training_step` may prepare several times: the first one counts.
        """
        if self._replayed is not None:
            return self._replayed.again()
        if self.phase is not Phase.RUNNING or self._held is not None:
            return host_prepare(inputs)
        before = RngState.capture(self._device_type)
        with self._runner.preparing() if self._runner else nullcontext():
            prepared = host_prepare(inputs)
        self.loss_errors.begin_forward()
        after = RngState.capture(self._device_type)
        # Preparing is not repeated, so a run of held inputs begins after what it has drawn (completions, say); what a
        # training_step draws before it prepares is drawn again.
        rng = self._rng_before if before == after else after
        self._held = (HeldInputs.of(prepared), rng)
        return prepared

    def _watch_loss(self, compute_loss: Callable[..., object]) -> Callable[..., object]:
        def watched(*args: object, **kwargs: object) -> object:
            with self.watched_loss():
                return compute_loss(*args, **kwargs)

        return watched

    @contextmanager
    def watched_loss(self) -> Iterator[None]:
        """Surrounds `compute_loss`, also as its decorator: what it writes outside the model is kept, unless it runs again."""
        buffers, has_returned = self._buffers, False
        if buffers is None or self.replays or self.guard.replaying:
            yield
            return
        self.boundary.call("loss state", buffers.begin_loss)
        try:
            yield
            has_returned = True
        finally:
            self.boundary.call("loss state", buffers.end_loss, has_returned)

    @property
    def replays(self) -> bool:
        """Whether held inputs take the place of those of the batch."""
        return self._replayed is not None

    @contextmanager
    def replaying(self, held: HeldInputs) -> Iterator[None]:
        """Makes `_prepare_inputs` return held inputs inside the block."""
        self._replayed = held
        try:
            yield
        finally:
            self._replayed = None

    def finish(self) -> StepRecord:
        """Closes the group and returns what was recorded of it."""
        self.phase = Phase.DECIDED
        held = [micro.payload for micro in self.group.micro_batches if isinstance(micro.payload, HeldInputs)]
        is_labelled = bool(held) and held[-1].has_labels and self.batches.are_judged
        return StepRecord(self.group, [note.no_signal for note, _ in self._noted], is_labelled)

    def skip(self) -> None:
        """Marks the step as skipped: the optimizer must not step."""
        self.phase = Phase.SKIPPED

    def release(self, is_replacement: bool = False) -> None:
        """Lets go of the held inputs once the step is settled, unless its first micro-batch may replace a later one."""
        if is_replacement and self.group.micro_batches:
            self.loss_errors.keep_replacement(self.group.micro_batches[0].payload)
        self.group = self.guard.begin_group()

    def end_step(self) -> None:
        """Ends a settled step, once the optimizer and the schedule have had their turn."""
        self.phase = Phase.IDLE if self.phase in (Phase.DECIDED, Phase.SKIPPED) else self.phase

    # ---- what others ask ----

    def current_rows(self) -> list[int] | None:
        """Returns the dataset rows of the batch that is being prepared."""
        return self._noted[len(self.group.micro_batches)][1] if self.phase is Phase.RUNNING else None

    def keep_optimizer(self, optimizer: torch.optim.Optimizer, is_own: bool) -> None:
        """Keeps an optimizer that is about to step inside a `training_step`: one of the model, from whatever thread, or of another
        model, if it is not another trainer's in a thread of its own."""
        if self._buffers is not None and (is_own or self._thread == get_ident()):
            self._buffers.keep_optimizer(optimizer)

    def restore_running_loss(self, losses: list[Tensor], extra: float = 0.0) -> None:
        """Sets the running loss of the log to what it was before the group, plus the losses that count, plus `extra` for the
        others."""
        if self._loss_before is None:
            return
        total = running_loss(self.trainer)
        total.copy_(self._loss_before)
        for loss in losses:
            total += loss.to(total.device)
        total += extra

    def end_epoch(self) -> None:
        """Keeps a non-finite loss out of the log when an epoch ends inside a group, which no step decides."""
        losses = self.group.losses
        if self.acts and losses and not all(map(math.isfinite, read_host(losses))):
            self.restore_running_loss([torch.where(torch.isfinite(loss), loss, 0.0) for loss in losses])

    def begin_row(self) -> None:
        """Takes the losses so far out of the running loss of an open group, once the host has logged them."""
        if self.phase is Phase.COLLECTING and self.has_micro_batches:
            logged = sum(torch.where(torch.isfinite(loss), loss, 0.0) for loss in self.group.losses)
            self._loss_before = running_loss(self.trainer) - logged

    def abandon(self) -> None:
        """Forgets a group that will not be settled."""
        self.group = self.guard.begin_group()
        self.phase = Phase.IDLE

    def _watched_backwards(self, runner: TrainerRunner) -> AbstractContextManager[None]:
        """Counts the backward passes of a `training_step`, each an exchange of all ranks, and marks non-finite losses."""
        count = 0

        def around(loss: Tensor) -> AbstractContextManager[None]:
            nonlocal count
            count += 1
            self.num_backwards = max(self.num_backwards, count)
            return runner.marking(loss, self.boundary) if self.acts else nullcontext()

        if self.num_ranks == 1:  # a non-finite loss is known without a mark
            return nullcontext()
        return surrounded_backwards(self.trainer.accelerator, around)

    def _rows_of(self, held: HeldInputs | None, index: int) -> list[int] | Tensor | None:
        if held is not None and isinstance(held.inputs, Mapping) and ROWS in held.inputs:
            return held.inputs[ROWS]
        return self._noted[index][1]
