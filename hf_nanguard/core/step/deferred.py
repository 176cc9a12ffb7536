"""Bad steps skipped on the device and read back only every so often, for fused optimizers in hand-written loops.

A fused optimizer takes the flag on the device and leaves everything bit-unchanged where it is set, so a step costs no
host read at all. The price: the whole step is skipped, nothing is redone, and the scheduler is not held.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ..event import Event
from ..finite import local, read_host
from ..journal import Journal, tell_bad_terms, tell_watched
from ..ranks import Ranks
from ..rerun.micro_batch import AccumulationGroup
from ..rerun.runner import LoopRunner
from ..rerun.skip import can_skip_on_device, step_unless
from ..robust_window import RobustWindow
from ..settings import Policy
from ..vocabulary import Action, Signal
from .counters import Counter
from .decision import Escalation

POSSIBLE: dict[str, tuple[Any, ...]] = {
    "mode": ("act", "off"),
    "on_nonfinite": ("drop", "skip"),
    "on_spike": ("observe",),
    "skip_grad_norm": (None,),
}


def check_deferred(period: int, policy: Policy, optimizer: Any, scaler: Any) -> None:
    """Raises an [`ArgumentError`] if steps cannot be skipped on the device as asked."""
    if period < 1:
        raise ArgumentError(f"read_every_n_steps must be at least 1, got {period!r}.")
    if period == 1:
        return
    if optimizer is None or scaler is not None or not can_skip_on_device(optimizer):
        raise ArgumentError(
            f"read_every_n_steps was {period!r}, but only a fused optimizer without a GradScaler can skip a step on the "
            "device. Build the optimizer with fused=True or leave read_every_n_steps at 1."
        )
    settings = vars(policy)
    wrong = [f"{name}={settings[name]!r}" for name, possible in POSSIBLE.items() if settings[name] not in possible]
    if wrong:
        raise ArgumentError(
            f"read_every_n_steps was {period!r}, but {', '.join(wrong)} needs the norm of every step on the host. Leave "
            "one of the two out; read_every_n_steps=1 allows all policies."
        )


class Deferred:
    """Steps unless a device flag is set, and tells later.

    Args:
        policy (`Policy`), ranks (`Ranks`), journal (`Journal`), counter (`Counter`), ladder (`Escalation`),
        norms (`RobustWindow`):
            Those of the guard.
        period (`int`):
            How many steps lie between two reads.
    """

    def __init__(
        self,
        policy: Policy,
        ranks: Ranks,
        journal: Journal,
        counter: Counter,
        escalation: Escalation,
        norms: RobustWindow,
        period: int,
    ):
        self.policy = policy
        self.ranks = ranks
        self.journal = journal
        self.counter = counter
        self.escalation = escalation
        self.norms = norms
        self.period = period
        self.unread: list[tuple[int, AccumulationGroup, Tensor]] = []

    def step(self, group: AccumulationGroup, runner: LoopRunner, norm_dev: Tensor, step: int) -> str | None:
        """Steps the optimizer unless the norm is not finite; returns why the run has to end, if a read tells so."""
        bad_dev = ~torch.isfinite(local(norm_dev))
        step_unless(runner.optimizer, bad_dev)
        runner.buffers.restore_where(bad_dev)
        self.unread.append((step, group, norm_dev))
        return self.read_back() if (step + 1) % self.period == 0 else None

    def read_back(self) -> str | None:
        """Reads what the steps since the last read have left on the device; returns why the run has to end."""
        notes_dev = [note for _, group, _ in self.unread for note in group.notes]
        values = read_host([*(local(norm) for *_, norm in self.unread), *notes_dev])
        norms, notes = values[: len(self.unread)], values[len(self.unread) :]
        skipped, halts = [], False
        for (step, group, _), norm in zip(self.unread, norms, strict=True):
            mine, notes = notes[: len(group.notes)], notes[len(group.notes) :]
            tell_watched(self.journal, group, group.take_notes(mine), step)
            tell_bad_terms(self.journal, group, [], step, skipped=not math.isfinite(norm))
            seen = len(group.micro_batches) * self.ranks.size
            if math.isfinite(norm):
                self.counter.count_microbatches(seen, 0)
                self.counter.count_terms(group.micro_batches)
                self.counter.grad_norm_max = max(self.counter.grad_norm_max, norm)
                self.escalation.healthy()
                self.norms.add(norm)
            else:
                self.counter.count_microbatches(seen, seen)
                skipped.append(step)
                halts = self.escalation.bad() or halts
        self.unread = []
        self.counter.skipped_steps += len(skipped)
        if not skipped:
            return None
        message = f"the gradient norm was not finite at steps {', '.join(map(str, skipped))}"
        action = Action.HALTED if halts else Action.SKIPPED
        self.journal.write_once(Event(skipped[-1], Signal.GRAD_NONFINITE, action, message, values={"steps": skipped}))
        why = f"Training was halted after {self.policy.max_bad_steps} bad steps in a row: {message}."
        return f"{why} Raise max_bad_steps to go on." if halts else None
