"""A bad step redone micro-batch by micro-batch: run each alone, find the bad ones, run the good ones as if alone.

Every rank is here at once, because the gradient norm that led here is the same on every rank. Where parameters are sharded
(`runner.lockstep`) every pass takes every rank, so a micro-batch is dropped on all ranks or on none.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn

from ..autopsy.evidence.verdict import Verdict
from ..autopsy.examiner import Examiner
from ..finite import find_nonfinite, local, read_host
from ..journal import Journal
from ..rerun.micro_batch import AccumulationGroup, BatchAction, MicroBatch
from ..rerun.runner import Runner
from ..torch_private import rebuild_buckets
from ..vocabulary import Action, Signal
from .bad_gradients import Census, judge
from .counters import Counter
from .step_reading import BadMicroBatch, StepOutcome, StepReading

Explanation = tuple[BadMicroBatch | None, bool | None]


@dataclass(frozen=True)
class RedoResult:
    """What a redo has found and done."""

    blamed: list[BadMicroBatch]  # the dropped micro-batches of this rank, as far as this rank reports them
    spared: list[BadMicroBatch]  # those of which only terms of the loss were dropped
    reports: list[list[int]]  # the positions of the bad micro-batches, by rank
    good: list[MicroBatch]  # the micro-batches of this rank that were run again
    num_good: list[int]  # how many of them each rank has
    # the step without the bad ones; `None` if nothing is left or what is left is not finite either
    outcome: StepOutcome | None


class Redo:
    """Runs held micro-batches again."""

    def __init__(self, journal: Journal, counter: Counter, examiner: Examiner):
        self.journal = journal
        self.boundary = journal.boundary
        self.ranks = journal.ranks
        self.counter = counter
        self.examiner = examiner
        self.runner: Runner | None = None  # while it runs micro-batches again
        self.examining = False  # whether an autopsy runs them, which needs to see bad terms as they are

    @property
    def replaying(self) -> bool:
        """Whether a held micro-batch is being run again."""
        return self.runner is not None

    def leaves_out(self, name: str) -> bool:
        """Returns whether a term is left out of the loss of the micro-batch that is being run again."""
        return self.runner is not None and name in self.runner.left_out

    @property
    def reduced_parameters(self) -> list[nn.Parameter]:
        """The parameters that must all have a gradient because ranks reduce them together; none if this rank is alone."""
        return [] if self.runner is None or self.ranks.size == 1 else self.runner.parameters

    @contextmanager
    def replay(self, runner: Runner) -> Iterator[None]:
        """Marks what runs inside the block as held micro-batches that run again."""
        self.runner = runner
        rebuild_buckets(runner.model)
        try:
            with self.boundary.not_survivable(runner.lockstep and self.ranks.size > 1), runner.replayed():
                yield
        finally:
            self.runner = None

    @contextmanager
    def _examine(self) -> Iterator[None]:
        self.examining = True
        try:
            yield
        finally:
            self.examining = False

    # ---- what the step does with it ----

    def run(self, reading: StepReading, runner: Runner) -> RedoResult:
        """Finds the bad micro-batches, agrees on what is dropped and runs the good ones as if the others did not exist."""
        group = reading.group
        with self.replay(runner):
            found = self.find_bad(reading, runner)
            spared = [bad for bad in found if bad.can_be_spared]
            blamed = [bad for bad in found if not bad.can_be_spared]
            reports = self.ranks.gather([bad.micro.index for bad in blamed])
            mine = reports if runner.lockstep else [reports[self.ranks.rank]]
            dropped = {index for report in mine for index in report}
            others_pass = len(found) < len(group.micro_batches)
            blamed = self.examine(reading, runner, blamed, reports, others_pass)
            spared = self.examine(reading, runner, spared, reports, others_pass)
            if runner.lockstep:
                blamed = self.narrow_blame(blamed, reports)
            removable = {bad.micro.index: bad.removable_terms for bad in spared}
            good = [
                replace(micro, left_out=removable.get(micro.index, frozenset()))
                for micro in group.micro_batches
                if micro.index not in dropped
            ]
            size = len(group.micro_batches)
            num_good = [len(good) if runner.lockstep else size - len(report) for report in reports]
            outcome = self.run_good(reading, runner, good, num_good) if sum(num_good) else None
        return RedoResult(blamed, spared, reports, good, num_good, outcome)

    def explain(self, reading: StepReading, runner: Runner) -> Explanation:
        """Examines the first bad micro-batch of a group that is not redone. Every rank calls it. Returns the micro-batch and
        whether this rank reports it; `None` for both if no rank knows more than what was read of the step as a whole."""
        return self.boundary.together("redo", lambda: self._explain(reading, runner), lambda why: (None, None))

    def _explain(self, reading: StepReading, runner: Runner) -> Explanation:
        why_not = self.ranks.gather(runner.why_not(reading.group))
        if any(why_not) or not any(self.ranks.gather(self.examiner.due)):
            return None, None
        with self.replay(runner):
            blamed = self.find_bad(reading, runner)
            reports = self.ranks.gather([bad.micro.index for bad in blamed])
            others_pass = len(blamed) < len(reading.group.micro_batches)
            blamed = self.examine(reading, runner, blamed[:1], reports, others_pass)
            if runner.lockstep:
                blamed = self.narrow_blame(blamed, reports)
        found = next((bad for bad in blamed if bad.verdict is not None), None)
        facts = self.ranks.gather({"found": found is not None, "bad_loss": reading.bad_loss is not None})
        finders = [rank for rank, fact in enumerate(facts) if fact["found"]]
        if not finders or any(fact["bad_loss"] for fact in facts):  # a bad loss is reported by the rank it belongs to
            return found, None
        return found, finders[0] == self.ranks.rank

    def examine_loss(self, reading: StepReading, runner: Runner) -> BadMicroBatch | None:
        """Examines a non-finite loss whose gradients are finite. Only this rank knows of it, so among several ranks nothing
        is run again: a forward of DDP may wait for the others."""
        bad = reading.bad_loss
        if bad is None or self.ranks.size > 1 or runner.why_not(reading.group) is not None:
            return None
        micro = reading.group.micro_batches[bad[0]]
        with self.replay(runner), self._examine(), runner.undisturbed():
            verdict = self.examiner.examine(runner, micro, reading.group.weight, reading.step)
        return replace(BadMicroBatch.of_run(micro, bad[1], reading.census, reading.step), verdict=verdict)

    def repeats(self, group: AccumulationGroup, runner: Runner) -> bool:
        """Returns whether a held group is bad on any rank when it runs again, or cannot run again. Every rank calls it."""
        return self.boundary.together("redo", lambda: self._repeats(group, runner), lambda why: True)

    def _repeats(self, group: AccumulationGroup, runner: Runner) -> bool:
        if any(self.ranks.gather(runner.why_not(group))):
            return True
        is_bad = False
        with self.replay(runner), runner.undisturbed():
            for micro in group.micro_batches:
                is_known = bool(micro.findings_to(BatchAction.DROP))  # whatever the weights are
                if not is_known or runner.lockstep:
                    loss_dev = runner.probe(micro, group.weight)
                    is_known |= bool(self.take_census(runner).bad) or not math.isfinite(read_host([loss_dev])[0])
                is_bad |= is_known
        return self.ranks.any(is_bad)

    # ---- one micro-batch ----

    def find_bad(self, reading: StepReading, runner: Runner) -> list[BadMicroBatch]:
        """Runs every micro-batch alone and returns those whose loss or gradients are not finite, and those known to be bad."""
        blamed = []
        for micro in reading.group.micro_batches:
            known = next(iter(micro.findings_to(BatchAction.DROP)), None)
            if known is None or runner.lockstep:
                loss, census = self.probe(runner, micro, reading)
                is_bad = bool(census.bad) or not math.isfinite(loss)
            if known is not None:
                blamed.append(BadMicroBatch.of_finding(micro, known, reading.step))
            elif is_bad and micro.suspicion is not None:
                blamed.append(BadMicroBatch.of_finding(micro, micro.suspicion, reading.step))
            elif is_bad:
                removable_terms = self.find_removable_terms(reading, runner, micro)
                blamed.append(BadMicroBatch.of_run(micro, loss, census, reading.step, removable_terms))
        return blamed

    def probe(self, runner: Runner, micro: MicroBatch, reading: StepReading) -> tuple[float, Census]:
        """Runs a micro-batch alone and returns its loss and what is known of its gradients."""
        loss_dev = runner.probe(micro, reading.group.weight)
        census = self.take_census(runner)
        return read_host([loss_dev])[0], census

    def find_removable_terms(self, reading: StepReading, runner: Runner, micro: MicroBatch) -> frozenset[str]:
        """Runs a bad micro-batch again without some terms of its loss and returns those without which it is finite.

        Terms with non-finite values are tried first. If all values are finite, a gradient became non-finite inside a term: each is
        left out in turn. Nothing is tried where parameters are sharded, because every try would take every rank, and at
        least one term with a gradient always stays.
        """
        names = {term.name for term in micro.terms if term.learns}
        optional = frozenset(term.name for term in micro.terms if micro.may_drop(term.name))
        bad = frozenset(micro.bad_terms)
        tries = [bad] if bad else [frozenset([name]) for name in dict.fromkeys(term.name for term in micro.terms)]
        # a value that is not finite may hide another term's bad gradient
        tries += [optional] if len(optional) > 1 and optional != bad else []
        if runner.lockstep or (bad and not bad <= optional):  # it is known what was bad, and it may not be dropped
            return frozenset()
        for left_out in tries:
            if names - left_out:
                loss, census = self.probe(runner, replace(micro, left_out=left_out), reading)
                if math.isfinite(loss) and not census.bad:
                    return left_out
        return frozenset()

    def take_census(self, runner: Runner) -> Census:
        """Checks the gradients as they are now. Of sharded gradients the shards of all ranks count, because those of the
        rank with the fault may be finite; every rank runs every probe then, so every rank is here."""
        gradients = runner.named_gradients()
        bad = find_nonfinite(gradients)
        if runner.lockstep:
            bad = {name: kind for report in self.ranks.gather(bad) for name, kind in report.items()}
        return judge([name for name, _ in gradients], bad)

    def examine(
        self,
        reading: StepReading,
        runner: Runner,
        blamed: list[BadMicroBatch],
        reports: list[list[int]],
        others_pass: bool,
    ) -> list[BadMicroBatch]:
        """Adds an autopsy to every bad micro-batch that needs one. With sharded parameters all ranks examine only the first,
        and only locate the fault."""
        group = reading.group
        if runner.lockstep:
            chosen = [group.micro_batches[index] for index in sorted({i for report in reports for i in report})[:1]]
        else:
            chosen = [bad.micro for bad in blamed if not bad.micro.must_be_dropped]
        verdicts: dict[int, Verdict | None] = {}
        try:
            with self._examine():
                for micro in chosen:
                    verdicts[micro.index] = self.examiner.examine(
                        runner, micro, group.weight, reading.step, others_pass
                    )
        except KeyboardInterrupt:
            for bad in blamed:
                self.journal.write(bad.event(Action.SKIPPED, reading))
            raise
        return [replace(bad, verdict=verdicts.get(bad.micro.index)) for bad in blamed]

    def narrow_blame(self, blamed: list[BadMicroBatch], reports: list[list[int]]) -> list[BadMicroBatch]:
        """Keeps, where gradients are sharded and bad on all ranks alike, only the rank that caused it.

        That rank has a non-finite loss, a finding about its batch, or an autopsy whose origin lies on this rank. If no rank
        stands out, the first one reports it, without rows.
        """
        own = {bad.micro.index for bad in blamed if bad.signal is not Signal.GRAD_NONFINITE or bad.begins_here}
        known = {index for report in self.ranks.gather(sorted(own)) for index in report}
        first = {index: rank for rank, report in reversed(list(enumerate(reports))) for index in report}
        unassigned = [
            replace(bad, culprit=replace(bad.culprit, rows=None))
            for bad in blamed
            if bad.micro.index not in known and first[bad.micro.index] == self.ranks.rank
        ]
        return [bad for bad in blamed if bad.micro.index in own] + unassigned

    def run_good(
        self, reading: StepReading, runner: Runner, good: list[MicroBatch], num_good: list[int]
    ) -> StepOutcome | None:
        """Runs the good micro-batches; returns `None` if their losses or gradients are not finite either."""
        weight = runner.regroup(good, num_good)
        with self.boundary.not_survivable(self.ranks.size > 1):  # gradients are reduced inside
            losses = runner.rerun(reading.group, good, weight)
        norm_dev = runner.measure()
        *values, norm = read_host([*losses, local(norm_dev)])
        if self.ranks.any(not all(map(math.isfinite, [*values, norm]))):
            return None
        self.counter.count_norm(norm)
        num_dropped = len(reading.group.micro_batches) - len(good)
        return StepOutcome(norm=norm_dev, redone=losses, fresh=True, num_dropped=num_dropped)
