"""Examines a finite spike while its accumulation group is still held: each sample alone, then the rest without those to blame.

    suspect      outlier_watch.py: is a value out of line, and is an examination due; costs nothing
    measure      loss and gradient norm of each sample of the suspicious micro-batches, each as if it were the whole step
    compare      row_outliers.py: with the other samples, and with those of earlier examinations
    leave out    the micro-batch without those to blame must be usual again
    repeat       window_repeat.py: the steps since the last snapshot with and without them, if there is one
    otherwise    `batch` if other data passes, else what the last update was: last_update.py

An examination costs one pass per sample, within `nanguard_autopsy_seconds`; gradients, buffers, random state and the loop's
metrics are put back. On several ranks all of them examine, so only a norm out of line, which every rank knows, is examined.
Not examined: sharded parameters, because every pass would take every rank; losses that change their sign, as those of online
RL, where the size of a sample's loss says nothing about its row.

A row is blamed only if its loss is also above that at the start of the run and above that of a uniform guess, as the mean over wrong
labels is: a hard row is learned late, but is seldom worse than guessing. One hard target may be, so where samples have few targets the
loss must be a multiple of that at the start, or be one that a model which has learned almost excludes (confident_errors.py); and the verdict
is `labels`, suspects and no proof, because rows of a rare group look alike. A norm must
be a multiple of that at the start as well, and the loss above that.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from ..event import JsonObject
from ..journal import Journal
from ..rerun.micro_batch import AccumulationGroup
from ..rerun.runner import Runner
from ..settings import Policy
from ..vocabulary import Signal
from .confident_errors import DeniedRows, is_denied
from .last_update import measure_last_update
from .measured_batch import MeasuredBatch, measure_group
from .outlier_watch import OutlierWatch, Suspicion
from .rank_examinations import share_examination
from .row_outliers import UsualSamples, find_outliers
from .spike_examination import SampleReading, SpikeExamination, SpikeVerdict
from .window_repeat import LossWindow, repeat_window

ENOUGH = 24  # samples to compare with; more micro-batches are run until there are as many
MANY_TARGETS, FEW_TARGETS, START_NORM = 1.2, 10.0, 5.0  # multiples of loss and norm at the start
BLAME = {
    SpikeVerdict.ROWS: "to blame",
    SpikeVerdict.LABELS: "suspect (a wrong label, or a rare group that is not learned yet)",
}


class SpikeExaminer:
    """Examines steps that are out of line, and remembers which rows were to blame."""

    def __init__(
        self,
        policy: Policy,
        journal: Journal,
        replay: Callable[[Runner], AbstractContextManager[None]],
        find_window: Callable[[], LossWindow | None] = lambda: None,
    ):
        self.policy = policy
        self.find_window = find_window
        self.journal = journal
        self.boundary = journal.boundary
        self.ranks = journal.ranks
        self.replay = replay
        self.watch = OutlierWatch(policy.max_autopsies)
        self.begin_run()

    def begin_run(self) -> None:
        """Begins another run, with all the examinations that it may have."""
        self.watch.begin_run()
        self.blamed: set[int] = set()
        self.visits = DeniedRows()
        self.losses, self.norms = UsualSamples(), UsualSamples()
        self.seconds = 0.0

    def examine(
        self, group: AccumulationGroup, runner: Runner, step: int, losses: list[float], norm: float, is_spike: bool
    ) -> SpikeExamination | None:
        """Examines a step if it is out of line and an examination is due. Every rank calls it, for every step with a finite
        norm.

        `losses` are of the micro-batches, as the loop weighs them; none if they change their sign. `is_spike`, the same on
        every rank, says whether the step is a spike, and not only out of line.
        """
        if not self.policy.autopsy:
            return None
        alone = [runner.mean_loss([loss] * len(losses)) for loss in losses]
        can_compare = bool(alone) and all(0.0 < loss < math.inf for loss in alone)
        suspicion = self.watch.suspect(step, alone if can_compare else [], norm, self.ranks.size == 1)
        if suspicion is None or runner.lockstep:
            return None
        if not self.watch.is_due(step, is_spike, suspicion.is_apart):
            return None
        return self.boundary.together(
            "spike examination",
            lambda: (
                self._examine(group, runner, step, losses, suspicion, is_spike)
                if self._agree(group, runner, can_compare)
                else None
            ),
            lambda why: None,
        )

    def _agree(self, group: AccumulationGroup, runner: Runner, can_compare: bool) -> bool:
        """Returns whether no rank has a reason against an examination. Every rank calls it."""
        rows = {row for micro in group.micro_batches for row in micro.rows or ()}
        spent = self.seconds > self.policy.autopsy_seconds * self.policy.max_autopsies
        mine = not can_compare or bool(rows & self.blamed) or spent or runner.why_not(group) is not None
        return not self.ranks.any(mine)

    def _examine(
        self,
        group: AccumulationGroup,
        runner: Runner,
        step: int,
        losses: list[float],
        suspicion: Suspicion,
        is_spike: bool,
    ) -> SpikeExamination:
        ranks, limit = self.ranks, self.policy.autopsy_seconds
        begin = time.monotonic()
        with self.replay(runner), runner.undisturbed():
            suspects = [group.micro_batches[index] for index in suspicion.micro_batches]
            others = [micro for micro in group.micro_batches if micro.index not in suspicion.micro_batches]
            num_wanted = ENOUGH - len(self.losses.values)
            mine = measure_group(runner, suspects, others, num_wanted, begin + limit, ranks.rank)
            found = self._judge(mine, suspicion, len(group.micro_batches))
            if found.verdict is None and not found.noticed and (is_spike or suspicion.is_apart):
                found = self._judge_rest(suspicion, found, runner, len(group.micro_batches))
            found = share_examination(found, ranks)
            window = self.find_window() if found.verdict is SpikeVerdict.ROWS else None
            if window is not None:
                late = ranks.any(time.monotonic() > begin + limit)
                given = (window, group, runner, step, runner.mean_loss(losses), found.blamed, ranks)
                found = replace(found, window={"why_not": "no time was left"} if late else repeat_window(*given))
        seconds = time.monotonic() - begin
        self.seconds += seconds
        self.blamed.update(found.rows)
        names_rows = found.verdict in BLAME
        self.watch.conclude(step, is_spike, names_rows, found.verdict is not None, suspicion.is_apart)
        return replace(found, seconds=round(seconds, 3))

    # ---- judge ----

    def _judge(self, measured: list[MeasuredBatch], suspicion: Suspicion, size: int) -> SpikeExamination:
        """Looks for samples that are out of line, and leaves them out."""
        losses, norms = self.watch.losses, self.watch.norms
        usual = losses.usual, norms.usual
        readings = [reading for each in measured for reading in each.samples if reading.is_usable]
        num_runs = sum(each.suspect.num_runs for each in measured)
        found = SpikeExamination(None, "", [], readings, usual=usual, num_runs=num_runs)
        if usual[0] is None or usual[1] is None or not usual[0] or not usual[1]:
            return replace(found, why="there is no usual level yet to compare its samples with")
        failure = next((each.failure for each in measured if each.failure is not None), None)
        if not readings and failure is not None:
            return replace(found, why=f"its samples could not be run alone ({failure})")
        if suspicion.signal is Signal.LOSS_SPIKE and measured and measured[0].whole[0] < suspicion.midpoint:
            return replace(
                found, why=f"run again, the same batch has a loss of {measured[0].whole[0]:.4g}: not reproducible"
            )
        by_loss = [math.log(reading.loss / usual[0]) for reading in readings]
        by_norm = [math.log(reading.norm / usual[1]) for reading in readings]
        single = all(len(each.samples) == 1 for each in measured)  # then the run's own values are those of samples
        seen_losses = [log - math.log(usual[0]) for log in losses.logs] if single else self.losses.values
        seen_norms = (
            [log - math.log(usual[1]) for log in norms.logs] if single and len(measured) == 1 else self.norms.values
        )
        again = [index for index, each in enumerate(readings) if self._is_denied(each, measured)]
        if len(again) > max(1, (len(readings) - 1) // 2):  # not a minority
            again = []
        noticed = {row: readings[index].loss for index in again if (row := readings[index].row) is not None}
        kept = [index for index in again if self.visits.is_kept(readings[index].row, readings[index].loss)]
        self.visits.add(noticed)
        chosen = sorted(
            set(again if self.visits.are_kept() else kept)
            | {
                index
                for index in find_outliers(by_loss, seen_losses, self.losses.extremes)
                if self._exceeds_start(readings[index], measured)
            }
            | {
                index
                for index in find_outliers(by_norm, seen_norms, self.norms.extremes)
                if self._exceeds_first_norm(readings[index], measured)
            }
        )
        found = replace(found, noticed=sorted(noticed))
        if not chosen:  # a row above the start is no usual one, although it is not blamed yet
            self.losses.add(
                [
                    log
                    for index, (log, each) in enumerate(zip(by_loss, readings, strict=True))
                    if index not in again and not self._exceeds_start(each, measured)
                ]
            )
            self.norms.add(
                [
                    log
                    for index, (log, each) in enumerate(zip(by_norm, readings, strict=True))
                    if index not in again and not self._exceeds_first_norm(each, measured)
                ]
            )
            if not noticed:
                return replace(found, why="no sample is out of line with the others")
            why = f"dataset row {min(noticed)} alone is out of line, which may be one of a group that is still learned"
            return replace(found, why=why)
        blamed = [readings[index] for index in chosen]
        without = self._leave_out(measured, blamed)
        found = replace(found, without=without, num_runs=sum(each.suspect.num_runs for each in measured))
        # the norm of a part of the group is that of a mean over fewer samples
        bounds = losses.threshold() or math.inf, (norms.threshold() or math.inf) * math.sqrt(2 * size)
        if without is not None and any(not value <= bound for value, bound in zip(without, bounds, strict=True)):
            return replace(
                found,
                why=f"also without its largest samples the loss is {without[0]:.4g} and the norm {without[1]:.4g}",
            )
        is_label = any(self._find_batch(each, measured).is_one_class(each.sample) for each in blamed)
        verdict = SpikeVerdict.LABELS if is_label else SpikeVerdict.ROWS
        found = replace(found, verdict=verdict, blamed=blamed)
        many = len(blamed) > 1
        rest = "" if without is None else f", without {'them' if many else 'it'} {without[0]:.4g} and {without[1]:.4g}"
        worst = max(blamed, key=lambda reading: reading.loss)
        return replace(
            found,
            why=f"{found.name_blamed()} {'are' if many else 'is'} {BLAME[verdict]}: loss {worst.loss:.4g}, "
            f"norm {worst.norm:.4g} {'of the largest' if many else 'alone'}{rest}; usual are {usual[0]:.4g} and {usual[1]:.4g}",
        )

    @staticmethod
    def _find_batch(reading: SampleReading, measured: list[MeasuredBatch]) -> MeasuredBatch:
        return next(each for each in measured if each.index == reading.micro_step)

    def _exceeds_start(self, reading: SampleReading, measured: list[MeasuredBatch], few: float = FEW_TARGETS) -> bool:
        start = self.watch.losses.start or 0.0
        batch = self._find_batch(reading, measured)
        if batch.has_many_targets(reading.sample):
            return reading.loss > max(MANY_TARGETS * start, batch.guess)
        return reading.loss > few * max(start, batch.guess)

    def _is_denied(self, reading: SampleReading, measured: list[MeasuredBatch]) -> bool:
        """Returns whether a model that has learned gives almost no chance to the class of a sample, unlike to usual ones."""
        batch = self._find_batch(reading, measured)
        if not batch.is_one_class(reading.sample):
            return False
        guess = max(self.watch.losses.start or math.inf, batch.guess)
        return is_denied(reading.loss, guess) and self.watch.stands_apart(batch.whole[0])

    def _exceeds_first_norm(self, reading: SampleReading, measured: list[MeasuredBatch]) -> bool:
        """Returns whether the norm is above that at the start, of a sample that the model cannot predict better than then; never of one
        of few classes, as a hard one has both."""
        start = self.watch.norms.start
        if self._find_batch(reading, measured).is_one_class(reading.sample):
            return False
        is_large = start is None or reading.norm > START_NORM * start
        return is_large and self._exceeds_start(reading, measured, few=MANY_TARGETS)

    def _leave_out(self, measured: list[MeasuredBatch], blamed: list[SampleReading]) -> tuple[float, float] | None:
        """Returns the largest loss and norm of the micro-batches without these samples; `None` if nothing is left of any."""
        found: list[tuple[float, float]] = []
        for each in measured:
            bad = {reading.sample for reading in blamed if reading.micro_step == each.index}
            if bad and (rest := each.measure_without(bad)) is not None:
                found.append(rest)
        return (max(loss for loss, _ in found), max(norm for _, norm in found)) if found else None

    def _judge_rest(self, suspicion: Suspicion, found: SpikeExamination, runner: Runner, size: int) -> SpikeExamination:
        """Says what a spike comes from that no row is to blame for, as far as it was measured."""
        by_loss = suspicion.signal is Signal.LOSS_SPIKE
        values = [reading.loss if by_loss else reading.norm for reading in found.readings]
        passing = sum(value <= suspicion.threshold for value in values)
        if "not reproducible" in found.why:
            return found
        if by_loss and len(suspicion.micro_batches) < size:
            why = f"{found.why}, and other micro-batches of the step pass with the same weights"
            return replace(found, verdict=SpikeVerdict.BATCH, why=why)
        if not values:
            return found
        if 2 * passing >= len(values):
            why = f"{found.why}, and {passing} of {len(values)} samples pass alone with the same weights"
            return replace(found, verdict=SpikeVerdict.BATCH, why=why)
        update = measure_last_update(runner.optimizer)
        found = replace(found, update=None if update is None else update.relative)
        high = f"{len(values) - passing} of {len(values)} samples are far above the usual level"
        if update is not None and update.is_abnormal:
            why = f"{high}, and a first moment of the optimizer is {update.ratio:.3g} times the root of the second"
            return replace(found, verdict=SpikeVerdict.STATE, why=why)
        if update is not None and update.is_large:
            why = f"{high}, and the last update was {update.relative:.2g} of the size of the weights: lower the learning rate"
            return replace(found, verdict=SpikeVerdict.LEARNING_RATE, why=why)
        return replace(found, why=high, is_undecided=True)

    # ---- state ----

    def state_dict(self) -> JsonObject:
        return {
            "watch": self.watch.state_dict(), "losses": self.losses.state_dict(),
            "norms": self.norms.state_dict(), "blamed": sorted(self.blamed), "noticed": self.visits.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: JsonObject) -> None:
        self.watch.load_state_dict(state["watch"])
        self.losses.load_state_dict(state["losses"])
        self.norms.load_state_dict(state["norms"])
        self.blamed.update(map(int, state["blamed"]))  # a rewind does not make them good
        self.visits.load_state_dict(state.get("noticed", {"first": [], "changes": []}))
