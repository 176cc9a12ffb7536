"""Exceptions inside a loss: an event each, and, with `nanguard_on_loss_error="drop"`, a dropped micro-batch."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn

from ...boundary import is_of_a_signal
from ...core.autopsy.evidence.blamed_samples import find_raising
from ...core.autopsy.evidence.suspect_batch import SuspectBatch
from ...core.autopsy.examiner import Budget
from ...core.event import Culprit, Event
from ...core.rerun.micro_batch import BatchAction, Finding, MicroBatch
from ...core.step.guard import Guard
from ...core.vocabulary import Action, Signal
from ...errors import LossMissingError
from ...plain_text import first_line, format_rows, quote
from ..compat.accelerate import Exchange, replaced_method
from ..compat.trainer import lost_loss
from ..compat.trainer_protocol import HostTrainer
from .held_inputs import HeldInputs, LossWeight
from .trainer_runner import TrainerRunner


class LossErrors:
    """Decides what becomes of a micro-batch whose loss raised.

    To drop it, the host's step is run to its end with another loss: among several ranks with a batch that is known to
    work, so that this rank takes part in every exchange; alone with a constant zero.
    """

    def __init__(self, trainer: HostTrainer, guard: Guard):
        self.trainer = trainer
        self.journal, self.boundary, self.redo = guard.journal, guard.boundary, guard.redo
        self.ranks, self.policy = guard.ranks, guard.policy
        policy = self.policy
        self.drops = policy.acts and policy.on_loss_error == "drop"
        self.needs_replacement = policy.on_loss_error == "drop" and self.ranks.size > 1
        self.replacement: HeldInputs | None = None  # of a step that went through as it was
        self._exchange: Exchange | None = None

    def watched(self, model: nn.Module) -> AbstractContextManager[None]:
        """Surrounds a `training_step`; where a failing loss is dropped among ranks, what they exchange is counted."""
        self._exchange = Exchange(self.trainer.accelerator, model) if self.needs_replacement else None
        return nullcontext() if self._exchange is None else self._exchange.counted()

    def begin_forward(self) -> None:
        """Resets the counts once the inputs are prepared: generation is not repeated."""
        if self._exchange is not None:
            self._exchange.forget()

    def keep_replacement(self, inputs: HeldInputs | None) -> None:
        """Keeps a batch that is known to work."""
        if self.needs_replacement:
            self.replacement = inputs

    def judge(self, error: Exception, micro: MicroBatch, runner: TrainerRunner, weight: LossWeight) -> Finding | None:
        """Returns the finding for which a micro-batch is dropped whose loss raised; `None`, after an event, if the error must
        be raised. The micro-batch has no payload if its inputs had not been prepared."""
        if self.trainer.args.auto_find_batch_size and should_reduce_batch_size(error):
            return None  # the host is about to try a smaller batch
        is_prepared = micro.payload is not None
        given = (error, micro, runner, weight)
        samples = self.boundary.call("autopsy", self._find_samples, *given, otherwise=lambda *_: ())
        missing = isinstance(error, LossMissingError) or lost_loss(error)
        signal = Signal.LOSS_MISSING if missing else Signal.LOSS_ERROR
        message = f"{type(error).__name__} inside the loss: {quote(first_line(error))}"
        drops = self.drops and not isinstance(error, torch.OutOfMemoryError)
        can_drop = is_prepared and (self.ranks.size == 1 or self.replacement is not None)
        if drops and runner.lockstep and self._exchange is not None and self._exchange.forwards > 0:
            can_drop = False  # another forward would gather shards that no other rank gathers now
            message += "; it cannot be dropped because its forward had begun and the parameters are sharded"
        if drops and can_drop:
            return Finding(signal, message, BatchAction.DROP, None, "loss", samples)
        step, rows = self.trainer.state.global_step, micro.rows
        rows = [rows[sample] for sample in samples] if rows is not None and samples else rows
        message += f", in micro-batch {micro.index} of step {step}{format_rows(rows)}"
        culprit = Culprit(phase="loss", samples=list(samples) or None, rows=rows)
        self.journal.write(Event(step, signal, Action.REFUSED, message, micro.index, culprit=culprit))
        return None

    def _find_samples(
        self, error: Exception, micro: MicroBatch, runner: TrainerRunner, weight: LossWeight
    ) -> tuple[int, ...]:
        """Returns the samples for which the loss raises, while it does not for others; none if that cannot be tried: among
        ranks that exchange something, without memory, and on a device that is lost."""
        is_lost = isinstance(error, (torch.AcceleratorError, LossMissingError))
        if is_lost or should_reduce_batch_size(error) or is_of_a_signal(error):
            return ()
        held = micro.payload
        if not isinstance(held, HeldInputs) or held.written or self.ranks.size > 1 or not self.policy.autopsy:
            return ()
        budget = Budget(self.policy.autopsy_seconds)
        budget.begin()
        with self.redo.replay(runner), runner.undisturbed():
            suspect = SuspectBatch(runner, micro, weight)
            found = find_raising(suspect, type(error), budget.allowed)
        rows = micro.rows
        return tuple(found) if rows is None or len(rows) == suspect.num_samples else ()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Surrounds the step that runs in place of one whose loss raised."""
        with ExitStack() as stack:
            if self._exchange is not None:
                stack.enter_context(self._exchange.resumed())
            if self.replacement is None:
                stack.enter_context(replaced_method(self.trainer, "compute_loss", lambda _: self._zero_loss))
            yield

    def _zero_loss(self, *args: object, **kwargs: object) -> torch.Tensor:
        return torch.zeros((), device=self.trainer.args.device)
