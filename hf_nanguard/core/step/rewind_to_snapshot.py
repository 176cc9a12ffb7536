"""Snapshots of a healthy run, and the rewind to one when the run cannot continue from its current state.

    recovery.begin_step(step)          a snapshot if one is due: one finite check, one copy to host memory
    recovery.note(group)               the dataset rows of a settled step, by reference
    recovery.resolve(failure, step)    every rank at once: rewind, or return why the run has to halt

A rewind restores the snapshot and continues with the data stream, so the batches since the snapshot are not used again. The
number of the step does not go back; the learning rate schedule does. A remedy that was tried on a copy of the bad update and
worked is applied. Where only batches were bad, the last of them is run again with the restored weights: if it is finite now,
the updates since the snapshot were the cause, and the learning rate is divided by 10; if the failure returns before the next
snapshot, by 100 more, then by 10,000 more. Where the first updates of a run have moved the weights by many times their size, it is
divided by that as well: a rate that is far too high would need more rewinds than a run has. Later in a run one batch may have moved
them, with a rate that was right until then.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.optim import Optimizer

from ..event import Culprit, Event, Failure, JsonValue
from ..journal import Journal
from ..optimizer.applied_remedies import SMALLER, choose_remedy, raise_eps, scale_rates
from ..rerun.host_memory import find_free_share
from ..rerun.micro_batch import AccumulationGroup
from ..rerun.snapshot import Snapshot, StatePart
from ..settings import Policy
from ..spikes.window_repeat import LossWindow
from ..vocabulary import Action, Signal
from .decision import Escalation

logger = logging.getLogger("hf_nanguard")

PERIOD = 100
EARLY = (10, 20, 40)  # a run that fails early has not lost much, but all it had
FEW_UPDATES = 3  # the first of a run, which show how far the learning rate is off; more may have grown exponentially
MOST_LOWERED = 5  # rewinds, of which each divides the rate by the square of what the one before did
FAR = 1e3  # times the size of the weights: by far more than a rate that is 10 or 100 times too high moves them
NUM_KEPT = 2  # the older one is for a failure that returns
SHARE = 0.1  # of the free host memory that snapshots may use by default
MAX_ROWS = 100
STATE = (Signal.PARAM_NONFINITE, Signal.OPTIMIZER_NONFINITE)


@dataclass(frozen=True)
class Window:
    """The dataset rows of a step that the run may have to leave out."""

    step: int
    rows: list[list[int] | Tensor | None]  # of each micro-batch; a tensor is read only when an event needs it
    loss: float | None  # if the step was taken as it came


class Recovery:
    """Takes snapshots, and rewinds to them."""

    def __init__(self, policy: Policy, journal: Journal, escalation: Escalation, is_suspect: Callable[[], bool]):
        self.policy = policy
        self.journal = journal
        self.ranks = journal.ranks
        self.escalation = escalation
        self.is_suspect = is_suspect  # whether the loss or the norm is in an episode of spikes or of divergence
        self.parts: Sequence[StatePart] = ()
        self.optimizer: Optimizer | None = None
        self.scheduler: object = None
        self.begin_run()

    def begin_run(self) -> None:
        """Forgets the snapshots of an earlier run."""
        self.snapshots: list[Snapshot] = []  # the newest is the last
        self.windows: deque[Window] = deque()
        self.is_watching = False
        self.num_kept = self.next_due = 0
        self.num_updates = self.num_rewinds = 0
        self.num_lost = 0  # updates that were taken back
        self.rate_factor = 1.0  # what rewinds have multiplied the learning rate by
        self.num_lowered = 0  # rewinds since the last snapshot that have shown it to be too high
        self.is_slow = False  # whether nanguard_rewind_lr_factor is a part of that now
        self.raises_eps = False

    def forget(self) -> None:
        """Drops all snapshots: they are those of another model or optimizer."""
        self.snapshots, self.is_watching = [], False
        self.windows.clear()

    def watch(self, parts: Sequence[StatePart], num_bytes: int, optimizer: Optimizer, scheduler: object) -> None:
        """Takes what snapshots consist of, once model and optimizer exist, and decides whether to take any. Every rank calls it."""
        self.parts, self.next_due, self.is_watching = parts, 0, True
        self.optimizer, self.scheduler = optimizer, scheduler
        self.num_kept = self._choose_number(num_bytes)
        if self.num_kept and self.ranks.rank == 0:
            logger.info(
                "hf_nanguard: the run can go back to a snapshot, taken every %d steps: %d of %.3g MB of host memory on each rank.",
                self.period, self.num_kept, num_bytes / 1e6,
            )  # fmt: skip

    @property
    def period(self) -> int:
        """The number of steps between two snapshots."""
        return PERIOD if self.policy.snapshot_steps is None else self.policy.snapshot_steps

    def _choose_number(self, num_bytes: int) -> int:
        """Returns how many snapshots are kept: by default as many as fit into a share of the free memory, on every rank."""
        policy, ranks = self.policy, self.journal.ranks
        if not policy.acts or not policy.max_rewinds or policy.snapshot_steps == 0:
            return 0
        if policy.snapshot_steps is not None:
            return NUM_KEPT
        free = find_free_share()
        fitting = 0 if free is None else int(SHARE * free) // max(num_bytes, 1)
        number = min(min(ranks.gather(fitting)), NUM_KEPT)
        if not number and ranks.rank == 0:
            what = "is not known" if free is None else f"is {free / 1e9:.3g} GB"
            logger.info(
                "hf_nanguard: no snapshots are taken because one needs %.3g GB and free host memory %s; a run that cannot "
                "continue will halt. Set nanguard_snapshot_steps to take them.", num_bytes / 1e9, what,
            )  # fmt: skip
        return number

    # ---- in the order of a step ----

    def begin_step(self, step: int, check: Callable[[int], Failure | None], is_boundary: bool = True) -> Failure | None:
        """Takes a snapshot before the first forward of a step if one is due and the state is healthy; returns what `check`
        finds in weights and optimizer state. None is taken unless `is_boundary`: an online trainer cannot begin anew between
        two generations. Every rank calls it."""
        if not self.is_due(step, is_boundary):
            return None
        if self.ranks.any(self.is_suspect() or self.escalation.bad_in_a_row > 0):
            return None
        if (failure := check(step)) is not None:
            return failure
        self._end_slow()
        spare = self.snapshots.pop(0) if len(self.snapshots) == self.num_kept else None
        self.snapshots.append(
            replace(Snapshot.take(step, self.num_updates, self.parts, spare), rate_factor=self.rate_factor)
        )
        self.next_due = self._find_next(step)
        self.num_lowered = 0  # the rate was right since the last rewind
        while self.windows and self.windows[0].step < self.snapshots[0].step:
            self.windows.popleft()
        return None

    def is_due(self, step: int, is_boundary: bool = True) -> bool:
        """Returns whether [`Recovery.begin_step`] has something to do, the same on every rank."""
        return self.num_kept > 0 and step >= self.next_due and is_boundary

    def lose(self, step: int) -> None:
        """Continues without the snapshot of a step, and without the spare one it was written into, because a rank could not
        take it: all ranks must have the same."""
        older = [each for each in self.snapshots if each.step < step]
        self.snapshots = older[max(len(older) - self.num_kept + 1, 0) :]
        self.is_watching, self.next_due = True, self._find_next(step)

    def _find_next(self, step: int) -> int:
        return min([each for each in EARLY if each > step] + [(step // self.period + 1) * self.period])

    def note(self, step: int, group: AccumulationGroup, loss: float | None = None) -> None:
        """Notes the dataset rows of a step, in case it has to be left out, and its loss if it was taken as it came."""
        if self.num_kept:
            self.windows.append(Window(step, [micro.row_numbers for micro in group.micro_batches], loss))

    def list_losses(self) -> LossWindow | None:
        """Returns the losses of the steps since the last snapshot, `None` without one."""
        if not self.snapshots:
            return None
        begin = self.snapshots[-1].step
        known = [(each.step, each.loss) for each in self.windows if each.step >= begin and each.loss is not None]
        return LossWindow(begin, [step for step, _ in known], [loss for _, loss in known])

    def count_update(self) -> None:
        self.num_updates += 1

    # ---- a failure ----

    def resolve(self, failure: Failure, step: int, repeats: Callable[[], bool] | None = None) -> str | None:
        """Rewinds the run, which continues with `step`, or returns why it has to halt. `repeats` returns whether the last
        batches are bad with the weights of now as well. Every rank calls it."""
        snapshot = self._choose(failure)
        if snapshot is None or self.num_rewinds == self.policy.max_rewinds:
            return self._give_up(failure, snapshot, step)
        self.num_rewinds += 1
        num_lost = self.num_updates - snapshot.num_updates
        rows = self._gather_rows(snapshot.step)
        moved = self._measure_update(snapshot, num_lost)
        self._restore(snapshot, step)
        remedy = self._choose_remedy(failure, repeats)
        divisor = self._apply(remedy, moved)
        if failure.event is not None:
            self.journal.write_once(self._describe(failure.event, snapshot, num_lost, rows, remedy, divisor))
        return None

    def _measure_update(self, snapshot: Snapshot, num_lost: int) -> float:
        """Returns by how much too far an update since a snapshot has moved the weights; 1 if that is not much, or these were not
        the first updates of the run."""
        if not 0 < num_lost <= self.num_updates <= FEW_UPDATES:
            return 1.0
        reports = self.ranks.gather(snapshot.measure_change())
        changed, size = (sum(values) for values in zip(*reports, strict=True))
        moved = math.sqrt(changed / size) / num_lost if size else 0.0
        return moved * self._find_rise() / SMALLER if moved > FAR else 1.0  # a hundredth of their size is usual

    def _find_rise(self) -> float:
        """Returns how much higher than now the learning rate will be after a warm-up."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        rates = [(float(group["lr"] or 0.0), float(group.get("initial_lr") or 0.0)) for group in groups]
        return max((max(peak / rate, 1.0) for rate, peak in rates if rate > 0.0), default=1.0)

    def _give_up(self, failure: Failure, snapshot: Snapshot | None, step: int) -> str | None:
        """Does what is done without a rewind; returns why the run has to halt, `None` if it goes on."""
        if failure.event is not None:
            self.journal.write_once(replace(failure.event, action=failure.fallback))
        if failure.fallback is not Action.HALTED:
            return None
        if snapshot is None or not self.num_rewinds:
            return failure.reason
        self._restore(snapshot, step)  # so that the last good state can be saved
        return f"{failure.reason} The run was rewound {self.num_rewinds} times (nanguard_max_rewinds)."

    def _choose_remedy(self, failure: Failure, repeats: Callable[[], bool] | None) -> str | None:
        """Returns what is to be changed, once the snapshot is restored."""
        if failure.event is None or failure.event.signal is Signal.GRAD_SPIKE:
            return None
        if failure.event.signal in STATE:
            return choose_remedy(failure.event.remedies)
        if failure.event.signal is Signal.LOSS_DIVERGED:
            return "smaller_lr"
        return None if repeats is None or repeats() else "smaller_lr"

    def _apply(self, remedy: str | None, moved: float) -> float:
        """Changes the settings of the optimizer, beside those that earlier rewinds have changed; returns what the learning rate
        was divided by. An update has `moved` the weights by that much too far."""
        divisor = 1.0
        self.raises_eps |= remedy == "larger_eps"
        if self.raises_eps and self.optimizer is not None:
            raise_eps(self.optimizer)
        if remedy == "smaller_lr":
            divisor = moved * SMALLER ** -(2 ** min(self.num_lowered, MOST_LOWERED))
            self._scale(1 / divisor)
            self.num_lowered += 1
        if self.policy.rewind_lr_factor < 1.0:
            self._scale(self.policy.rewind_lr_factor)
            self.is_slow = True
        return divisor

    def _scale(self, factor: float) -> None:
        if self.optimizer is not None:
            scale_rates(self.optimizer, self.scheduler, factor)
            self.rate_factor *= factor

    def _end_slow(self) -> None:
        if self.is_slow:
            self._scale(1 / self.policy.rewind_lr_factor)
            self.is_slow = False

    def _choose(self, failure: Failure) -> Snapshot | None:
        """Returns the snapshot to go back to: the newest one, or an older one if the failure has returned after that."""
        is_state = failure.event is None or failure.event.signal in STATE
        if is_state and self.policy.on_param_nonfinite == "halt":
            return None
        # Where only batches were bad, a snapshot of the very state that they were bad with is no way out.
        usable = [each for each in self.snapshots if is_state or each.num_updates < self.num_updates]
        if failure.since is not None:
            usable = [each for each in usable if each.step <= failure.since] or usable[:1]
        unused = [each for each in usable if not each.num_used]
        return next(iter([*unused[::-1], *usable[::-1]]), None)

    def _restore(self, snapshot: Snapshot, step: int) -> None:
        self._end_slow()
        snapshot.restore(step)
        factor, self.rate_factor = self.rate_factor / snapshot.rate_factor, snapshot.rate_factor
        if factor != 1.0:
            self._scale(factor)
        self.snapshots = [each for each in self.snapshots if each.step <= snapshot.step]
        self.num_lost += self.num_updates - snapshot.num_updates
        self.num_updates = snapshot.num_updates
        self.next_due = step + self.period
        self.windows.clear()
        self.escalation.begin_run()

    def _gather_rows(self, since: int) -> list[int]:
        """Returns the dataset rows, of all ranks, of the steps since a snapshot."""
        held = [rows for window in self.windows if window.step >= since for rows in window.rows if rows is not None]
        mine = [int(row) for rows in held for row in (rows.tolist() if isinstance(rows, Tensor) else rows)]
        return list(dict.fromkeys(row for rows in self.ranks.gather(mine) for row in rows))

    def _describe(
        self, event: Event, snapshot: Snapshot, num_lost: int, rows: list[int], remedy: str | None, divisor: float
    ) -> Event:
        message = (
            f"{event.message.rstrip('.')}. Rewound to the state before step {snapshot.step} (rewind {self.num_rewinds} of "
            f"{self.policy.max_rewinds}): {_format_updates(num_lost)} taken back, and the batches since then are left out."
        )
        changes = {
            "larger_eps": " eps was raised.",
            "smaller_lr": f" The learning rate was divided by {divisor:{',.0f' if divisor < 1e6 else '.2g'}}.",
        }
        message += changes.get(remedy or "", "")
        window: dict[str, JsonValue] = {
            "snapshot_step": snapshot.step, "lost_updates": num_lost, "num_rows": len(rows), "rewinds": self.num_rewinds,
            "applied": remedy,
        }  # fmt: skip
        culprit = replace(event.culprit or Culprit(), rows=rows[:MAX_ROWS] or None)
        return replace(
            event, action=Action.REWOUND, message=message, values={**event.values, **window}, culprit=culprit
        )

    def format_end(self) -> str | None:
        """Returns a sentence about the rewinds of a run for its end, `None` without any."""
        if not self.num_rewinds:
            return None
        times = "once" if self.num_rewinds == 1 else f"{self.num_rewinds} times"
        return (
            f"The run was rewound {times}, by which {_format_updates(self.num_lost)} taken back; the learning rate schedule "
            "ends that much earlier."
        )


def _format_updates(number: int) -> str:
    return "1 update was" if number == 1 else f"{number} updates were"
