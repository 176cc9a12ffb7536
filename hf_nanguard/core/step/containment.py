"""What is done about a step whose gradient norm is not finite.

The norm is the same on every rank, so every rank is here at once and may talk to the others. In order: the loss scaler's
own overflows are left to it; what the policy wants to skip, repair or halt is; otherwise each micro-batch is run alone
to find the bad ones, and the good ones are run as if the others had never come.
"""

import logging
import math
from dataclasses import asdict, replace
from typing import Any

from ..autopsy.evidence.verdict import Verdict
from ..autopsy.examiner import Examiner
from ..event import Culprit, Event
from ..finite import find_nonfinite, local, read_host
from ..journal import Journal
from ..optimizer.update import examine_update, try_update_remedies
from ..ranks import Ranks
from ..rerun.micro_batch import MicroBatch
from ..rerun.runner import Runner
from ..rng import RngState
from ..settings import Escalation, Policy, StepAction
from ..vocabulary import Action, Cause, Signal
from .bad_gradients import Census, describe, format_incident, judge
from .counters import Counter
from .step_reading import BadMicroBatch, StepOutcome, StepReading

logger = logging.getLogger("hf_nanguard")


class Containment:
    """Carries out what was decided about bad steps.

    Args:
        policy (`Policy`), ranks (`Ranks`), journal (`Journal`), counter (`Counter`), ladder (`Escalation`), examiner
        (`Examiner`):
            Those of the guard.
    """

    def __init__(
        self,
        policy: Policy,
        ranks: Ranks,
        journal: Journal,
        counter: Counter,
        escalation: Escalation,
        examiner: Examiner,
    ):
        self.policy = policy
        self.ranks = ranks
        self.journal = journal
        self.counter = counter
        self.escalation = escalation
        self.examiner = examiner
        self.replaying = False
        self.examining = False
        self.runner: Runner | None = None  # while it runs micro-batches again
        self.shown: dict[str, str] = {}  # the bad gradients that were logged last
        self.drawn: RngState | None = None  # the random state after the group has run, before anything is run again
        self.untouched: RngState | None = None  # the random state before the first of the bad steps in a row

    @property
    def cut(self) -> frozenset[str]:
        """The terms without which a micro-batch is being run again."""
        current = None if self.runner is None or not self.replaying or self.examining else self.runner.current
        return frozenset() if current is None else current.cut

    def contain(self, reading: StepReading, runner: Runner) -> StepOutcome:
        """Contains a step whose norm is not finite."""
        self.drawn = RngState.capture(runner.device_type)
        group = reading.group
        gradients = runner.named_gradients()
        facts = self.ranks.gather(
            {
                "bad": find_nonfinite(gradients),
                "loss_is_finite": reading.bad_loss is None and not group.has_bad_term,
                "must_go": any(micro.must_go for micro in group.micro_batches) or reading.suspected,
                "halts": any(f.verdict == "halt" for micro in group.micro_batches for f in micro.findings),
                "why_not": runner.why_not(group),
            }
        )
        told = any(fact["must_go"] for fact in facts)
        finite = all(fact["loss_is_finite"] for fact in facts)
        if runner.scaler is not None and finite and not told:
            return self.leave_to_scaler(reading, runner)
        census = judge([name for name, _ in gradients], {k: v for fact in facts for k, v in fact["bad"].items()})
        reading = replace(reading, census=census)
        self.counter.count_gradients(census.bad)
        if any(fact["halts"] for fact in facts):
            return self.halt_on_input(reading, runner)
        if not reading.clipped and not told:
            self.show(reading)
        mine = reading.bad_loss is not None or group.has_bad_term or (finite and self.ranks.rank == 0)
        if not reading.clipped and not census.bad:
            return self.skip_norm_overflow(reading, runner)
        why_not = next((fact["why_not"] for fact in facts if fact["why_not"]), None)
        course = StepAction.REDO if told else reading.decision.course
        if course is StepAction.REDO and why_not is None:
            return self.redo(reading, runner)
        if course is StepAction.REPAIR and finite:  # a non-finite loss leaves nothing in its gradients to keep
            return self.repair(reading, runner)
        return self.skip_whole(reading, runner, mine, course, why_not)

    def show(self, reading: StepReading) -> None:
        """Logs which gradients are bad, on one rank, and again only when others are."""
        census, counter = reading.census, self.counter
        if self.ranks.rank == 0 and census.bad != self.shown:
            logger.warning(format_incident(reading.step, reading.norm, census, counter.num_nan, counter.num_inf))
        self.shown = census.bad

    # ---- the whole step ----

    def leave_to_scaler(self, reading: StepReading, runner: Runner) -> StepOutcome:
        """Lets a GradScaler skip the step by itself: with finite losses, its scale was too large. That is its job."""
        self.counter.scaler_skips += 1
        self.count(reading, 0)
        scale = runner.scaler.get_scale()
        if scale <= 1.0:
            message = (
                f"gradients overflow at step {reading.step} although the loss scale has fallen to {scale:g}: the fault "
                "is not the scale"
            )
            values = {"loss_scale": scale}
            self.journal.write_once(Event(reading.step, Signal.GRAD_NONFINITE, Action.OBSERVED, message, values=values))
        return StepOutcome(norm=reading.norm_dev, scaler_skips=True)

    def skip_norm_overflow(self, reading: StepReading, runner: Runner) -> StepOutcome:
        """Skips a step whose gradients are all finite though their norm is not: nobody is to blame."""
        message = f"the gradient norm is {reading.norm} at step {reading.step} though every gradient is finite"
        halts = reading.decision.course is StepAction.HALT
        action = Action.HALTED if halts else Action.SKIPPED
        event = reading.event(action, message, Signal.GRAD_NONFINITE, Cause.NORM_OVERFLOW)
        self.journal.write_once(event)
        outcome = self.skip(reading, runner, event.signal, message)
        return self.halt(outcome, reading, message) if halts else outcome

    def skip_whole(
        self, reading: StepReading, runner: Runner, mine: bool, course: StepAction, why_not: str | None
    ) -> StepOutcome:
        """Skips the step as one, because the policy says so or because it cannot be redone."""
        halts = course is StepAction.HALT
        message = reading.tell()
        if course is StepAction.REDO and why_not is not None:
            message += f"; the whole group was skipped because {why_not}"
        blamed, told_here = self.explain(reading, runner)
        event = reading.event(Action.HALTED if halts else Action.SKIPPED, message, blamed=blamed)
        known = [
            BadMicroBatch.of_finding(micro, finding, reading.step).event(Action.SKIPPED, reading)
            for micro in reading.group.micro_batches
            for finding in micro.findings
            if finding.verdict == "drop" or (finding.verdict == "suspect" and reading.suspected)
        ]
        self.journal.share(known or ([event] if (mine if told_here is None else told_here) else []))
        outcome = self.skip(reading, runner, event.signal, message)
        return self.halt(outcome, reading, message) if halts else outcome

    def halt_on_input(self, reading: StepReading, runner: Runner) -> StepOutcome:
        """Ends the run because of a batch that the policy does not accept."""
        blamed = [
            BadMicroBatch.of_finding(micro, finding, reading.step)
            for micro in reading.group.micro_batches
            for finding in micro.findings
            if finding.verdict == "halt"
        ]
        messages = [message for report in self.ranks.gather([bad.message for bad in blamed]) for message in report]
        self.journal.share([bad.event(Action.HALTED, reading) for bad in blamed])
        outcome = self.skip(reading, runner, None, messages[0])
        outcome.halt = f"Training was halted at step {reading.step}: {messages[0]}. The policy on_bad_input is 'halt'."
        return outcome

    def repair(self, reading: StepReading, runner: Runner) -> StepOutcome:
        """Zeroes the bad entries of the gradients and lets the rest step, unless nothing is left."""
        with runner.undisturbed():
            blamed, told_here = self.explain(reading, runner)
        for _, gradient in runner.named_gradients():
            local(gradient).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        norm_dev = runner.norm()
        [norm] = read_host([local(norm_dev)])
        works = math.isfinite(norm) and norm > 0.0
        message = reading.tell() + ("" if works else "; nothing was left after zeroing the bad entries")
        action = Action.REPAIRED if works else Action.SKIPPED
        event = reading.event(action, message, Signal.GRAD_NONFINITE, blamed=blamed, grad_norm_repaired=norm)
        self.journal.share([event] if (self.ranks.rank == 0 if told_here is None else told_here) else [])
        if not works:
            return self.skip(reading, runner, event.signal, message)
        self.count(reading, 0)
        return self.climb(StepOutcome(norm=norm_dev, fresh=True), reading, event.signal, message)

    # ---- micro-batch by micro-batch ----

    def redo(self, reading: StepReading, runner: Runner) -> StepOutcome:
        """Finds the bad micro-batches, agrees on what is dropped and runs the good ones as if the others never came."""
        self.replaying, self.runner = True, runner
        runner.meet()
        try:
            found = self.find_bad(reading, runner)
            spared = [bad for bad in found if self.spare(bad)]
            blamed = [bad for bad in found if not bad.micro.cut]
            reports = self.ranks.gather([bad.micro.index for bad in blamed])
            gone = (
                {index for report in reports for index in report} if runner.lockstep else set(reports[self.ranks.rank])
            )
            for micro in reading.group.micro_batches:
                micro.is_dropped = micro.index in gone
            blamed = self.examine(reading, runner, blamed, reports)
            spared = self.examine(reading, runner, spared, reports)
            if runner.lockstep:
                blamed = self.narrow_blame(blamed, reports)
            good = [micro for micro in reading.group.micro_batches if micro.index not in gone]
            size = len(reading.group.micro_batches)
            num_good = [len(good) if runner.lockstep else size - len(report) for report in reports]
            outcome = self.run_good(reading, runner, good, num_good) if sum(num_good) else None
        finally:
            self.replaying = False
        self.tell_redo(reading, runner, blamed, reports, num_good, outcome, spared)
        signal = blamed[0].signal if blamed else Signal.GRAD_NONFINITE
        message = blamed[0].message if blamed else reading.tell()
        suspicious = not good and not any(micro.must_go for micro in reading.group.micro_batches)
        if suspicious and blamed:  # a row of an embedding that only some samples need is no reason to end the run
            suspicious = not all(bad.verdict is not None and bad.verdict.spares_others for bad in blamed)
        sick = self.find_sick_parameter(reading, runner, suspicious)
        if outcome is None:
            outcome = self.skip(reading, runner, signal, message)
        else:
            num_dropped = size * self.ranks.size - sum(num_good)
            self.count(reading, num_dropped)
            outcome = self.climb(outcome, reading, signal, message) if num_dropped else outcome
        outcome.halt = sick or outcome.halt
        return outcome

    def find_bad(self, reading: StepReading, runner: Runner) -> list[BadMicroBatch]:
        """Runs every micro-batch alone and returns those whose gradients are not finite, and those known to be bad."""
        blamed = []
        for micro in reading.group.micro_batches:
            known = next((finding for finding in micro.findings if finding.verdict == "drop"), None)
            if known is None or runner.lockstep:
                loss_dev = runner.probe(micro, reading.group.share)
                census = self.take_census(runner)
                [loss] = read_host([loss_dev])
            if known is not None:
                blamed.append(BadMicroBatch.of_finding(micro, known, reading.step))
            elif census.bad and micro.suspicion is not None:
                blamed.append(BadMicroBatch.of_finding(micro, micro.suspicion, reading.step))
            elif census.bad:
                cure = self.find_cure(reading, runner, micro)
                blamed.append(BadMicroBatch.of_run(micro, loss, census, reading.step, cure))
        return blamed

    def find_cure(self, reading: StepReading, runner: Runner, micro: MicroBatch) -> frozenset[str]:
        """Runs a bad micro-batch again without some terms of its loss and returns those without which it is healthy.

        Values that are not finite are suspected first. If all are finite, a gradient went bad inside a term: each is left
        out by turns. Nothing is tried where parameters are sharded, which would take every rank for every try, and at
        least one term that learns is always left.
        """
        names = {term.name for term in micro.terms if term.learns}
        optional = frozenset(term.name for term in micro.terms if self.is_optional(micro, term.name))
        bad = frozenset(micro.bad_terms)
        tries = [bad] if bad else [frozenset([name]) for name in dict.fromkeys(term.name for term in micro.terms)]
        # a value that is not finite may hide another term's bad gradient
        tries += [optional] if len(optional) > 1 and optional != bad else []
        if runner.lockstep or (bad and not bad <= optional):  # it is known what was bad, and it may not be dropped
            return frozenset()
        try:
            for left_out in tries:
                if not names - left_out:
                    continue
                micro.cut = left_out
                runner.probe(micro, reading.group.share)
                if not self.take_census(runner).bad:
                    return left_out
        finally:
            micro.cut = frozenset()
        return frozenset()

    def is_optional(self, micro: MicroBatch, name: str) -> bool:
        """Returns whether the loss may go on without a term."""
        return all(term.drops for term in micro.terms if term.name == name)

    def spare(self, bad: BadMicroBatch) -> bool:
        """Keeps a micro-batch in the step, without its bad terms, if that cures it and they may be dropped."""
        if bad.cure and all(self.is_optional(bad.micro, name) for name in bad.cure):
            bad.micro.cut = bad.cure
        return bool(bad.micro.cut)

    def examine(
        self, reading: StepReading, runner: Runner, blamed: list[BadMicroBatch], reports: list[list[int]]
    ) -> list[BadMicroBatch]:
        """Adds an autopsy to every bad micro-batch that does not explain itself. Sharded models need every rank in every
        pass, so there all ranks look at the first one and at where it broke, no more."""
        group = reading.group
        verdicts: dict[int, Verdict | None] = {}
        self.examining = True
        try:
            for index in sorted({i for report in reports for i in report})[:1] if runner.lockstep else ():
                micro = group.micro_batches[index]
                verdicts[index] = self.examiner.examine(runner, micro, group.share, reading.step)
            for bad in blamed if not runner.lockstep else ():
                if not bad.micro.must_go:
                    verdicts[bad.micro.index] = self.examiner.examine(runner, bad.micro, group.share, reading.step)
        except KeyboardInterrupt:
            for bad in blamed:
                self.journal.write(bad.event(Action.SKIPPED, reading))
            raise
        finally:
            self.examining = False
        return [replace(bad, verdict=verdicts.get(bad.micro.index)) for bad in blamed]

    def explain(self, reading: StepReading, runner: Runner) -> tuple[BadMicroBatch | None, bool | None]:
        """Examines the first bad micro-batch of a group that is not redone. Every rank calls it.

        Returns:
            `tuple[BadMicroBatch | None, bool | None]`: the micro-batch, and whether this rank is the one to tell it; `None`
            if no rank has more to tell than the step as a whole.
        """
        why_not = self.ranks.gather(runner.why_no_autopsy(reading.group))
        if any(why_not) or not any(self.ranks.gather(self.examiner.due)):
            return None, None
        self.replaying, self.runner = True, runner
        runner.meet()
        try:
            blamed = self.find_bad(reading, runner)
            reports = self.ranks.gather([bad.micro.index for bad in blamed])
            if not any(reports) and not runner.knows_loss:
                self.examiner.log_out_of_sight(reading.step)
            blamed = self.examine(reading, runner, blamed[:1], reports)
            if runner.lockstep:
                blamed = self.narrow_blame(blamed, reports)
        finally:
            self.replaying = False
        found = next((bad for bad in blamed if bad.verdict is not None), None)
        facts = self.ranks.gather({"found": found is not None, "bad_loss": reading.bad_loss is not None})
        tellers = [rank for rank, fact in enumerate(facts) if fact["found"]]
        if not tellers or any(fact["bad_loss"] for fact in facts):  # a bad loss is told by the rank it belongs to
            return found, None
        return found, tellers[0] == self.ranks.rank

    def take_census(self, runner: Runner) -> Census:
        """Looks at the gradients as they are now, of sharded ones at the shards of all ranks: the culprit's own may be
        clean. Every rank runs every probe then, so every rank is here."""
        gradients = runner.named_gradients()
        bad = find_nonfinite(gradients)
        if runner.lockstep:
            bad = {name: kind for report in self.ranks.gather(bad) for name, kind in report.items()}
        return judge([name for name, _ in gradients], bad)

    def narrow_blame(self, blamed: list[BadMicroBatch], reports: list[list[int]]) -> list[BadMicroBatch]:
        """Keeps, where gradients are sharded and bad on all ranks alike, only the rank that is really to blame.

        It is known by a loss that is not finite, by what was found in its batch, or by an autopsy that ends on this rank.
        If no rank stands out, the first one tells it, without rows.
        """
        own = {bad.micro.index for bad in blamed if bad.signal is not Signal.GRAD_NONFINITE or bad.begins_here}
        known = {index for report in self.ranks.gather(sorted(own)) for index in report}
        first = {index: rank for rank, report in reversed(list(enumerate(reports))) for index in report}
        anybody = [
            replace(bad, culprit=replace(bad.culprit, rows=None))
            for bad in blamed
            if bad.micro.index not in known and first[bad.micro.index] == self.ranks.rank
        ]
        return [bad for bad in blamed if bad.micro.index in own] + anybody

    def run_good(
        self, reading: StepReading, runner: Runner, good: list[MicroBatch], num_good: list[int]
    ) -> StepOutcome | None:
        """Runs the good micro-batches; `None` if even their gradients are not finite."""
        losses = runner.rerun(reading.group, good, runner.regroup(good, num_good))
        norm_dev = runner.measure()
        *values, norm = read_host([*losses, local(norm_dev)])
        if not math.isfinite(norm):
            return None
        self.counter.grad_norm_max = max(self.counter.grad_norm_max, norm)
        shown = [loss for loss, value in zip(losses, values, strict=True) if math.isfinite(value)]
        num_dropped = len(reading.group.micro_batches) - len(good)
        return StepOutcome(norm=norm_dev, redone=shown, fresh=True, num_dropped=num_dropped)

    def tell_redo(
        self,
        reading: StepReading,
        runner: Runner,
        blamed: list[BadMicroBatch],
        reports: list[list[int]],
        num_good: list[int],
        outcome: StepOutcome | None,
        spared: list[BadMicroBatch],
    ) -> None:
        """Writes an event for every bad micro-batch or term, and one if nobody in particular is to blame."""
        action = Action.SKIPPED if outcome is None else Action.DROPPED
        note = ""
        if runner.lockstep and self.ranks.size > 1:
            note = "; dropped on every rank, as parameters are sharded"
        events = [bad.event(action, reading, note) for bad in blamed]
        for bad in spared:
            events.append(bad.event(action, reading, f"; only the term was dropped: {', '.join(sorted(bad.cure))}"))
        num_spared = sum(self.ranks.gather(len(spared)))
        what = f"{describe(reading.census)} at step {reading.step}"
        if self.ranks.rank == 0 and not any(reports) and not num_spared and outcome is not None:
            message = f"{what}, but not when the step was run again: suspect hardware or non-determinism"
            events = [reading.event(Action.REPAIRED, message, Signal.GRAD_NONFINITE, Cause.TRANSIENT)]
        elif self.ranks.rank == 0 and sum(num_good) > 0 and outcome is None:
            message = f"{what}; no single micro-batch is to blame, only their sum"
            events.append(reading.event(Action.SKIPPED, message, Signal.GRAD_NONFINITE))
        self.journal.share(events)

    def find_sick_parameter(self, reading: StepReading, runner: Runner, suspicious: bool) -> str | None:
        """If every micro-batch of a rank was bad, the weights may be to blame: then going on is useless."""
        mine = find_nonfinite(runner.named_parameters()) if suspicious else {}
        if not self.examiner.due:  # nobody looks any more whether others do without it; once it was so
            mine = {name: kind for name, kind in mine.items() if name not in self.examiner.spared}
        found = self.ranks.gather(mine)
        bad = {name: kind for report in found for name, kind in report.items()}
        if not bad:
            return None
        name, kind = next(iter(bad.items()))
        message = f"parameter {name} holds {'NaN' if kind == 'nan' else 'inf'} at step {reading.step}"
        if len(bad) > 1:
            message += f", and so do {len(bad) - 1} others"
        values = {"num_bad_parameters": len(bad), "bad_parameters": dict(list(bad.items())[:12])}
        culprit, cause = Culprit(phase="parameter", parameter=name), Cause.PARAM_NONFINITE
        remedies: tuple[dict[str, Any], ...] = ()
        named = [(key, parameter) for key, parameter in runner.named_parameters() if key == name]
        update = None if runner.optimizer is None else examine_update(runner.optimizer, named)
        if update is not None:
            message += f": {update.message}"
            culprit, cause = replace(culprit, phase="optimizer"), update.cause
            remedies = tuple(asdict(tried) for tried in try_update_remedies(runner.optimizer, update, named[0][1]))
        self.journal.write_once(
            Event(
                reading.step, Signal.PARAM_NONFINITE, Action.HALTED, message, None, 0, values, culprit, cause, remedies
            )
        )  # fmt: skip
        return f"Training was halted: {message}. No batch can mend that: go back to an earlier checkpoint."

    # ---- the way out ----

    def skip(self, reading: StepReading, runner: Runner, signal: Signal | None, message: str) -> StepOutcome:
        """Leaves parameters, optimizer, schedule, buffers and random state as they were before the group."""
        runner.clear()
        runner.buffers.restore()
        runner.sync_buffers(True)
        before = reading.group.micro_batches[0].rng
        self.untouched = before if not self.escalation.bad_in_a_row else self.untouched
        # As if the step had never been. But a bad number may be one that the loss has drawn itself (a noise level, say):
        # from the same state it would draw it for ever, so half-way to the halt the random state goes on.
        (self.drawn if self.drawn is not None and self.escalation.is_half_way else before).restore()
        self.drawn = None
        size = len(reading.group.micro_batches)
        self.counter.skipped_steps += 1
        self.count(reading, size * self.ranks.size)
        outcome = StepOutcome(stepped=False, redone=[], num_dropped=size)
        if signal is not None:
            outcome = self.climb(outcome, reading, signal, message)
        if outcome.halt is not None and self.untouched is not None:
            self.untouched.restore()
        return outcome

    def climb(self, outcome: StepOutcome, reading: StepReading, signal: Signal, message: str) -> StepOutcome:
        """Counts a bad step; too many in a row and the run has to end."""
        if not self.escalation.bad():
            return outcome
        why = f"{self.escalation.bad_in_a_row} bad steps in a row (the last: {message})"
        values = {"bad_steps_in_a_row": self.escalation.bad_in_a_row}
        self.journal.write_once(Event(reading.step, signal, Action.HALTED, f"halted after {why}", values=values))
        outcome.halt = (
            f"Training was halted at step {reading.step} after {why}. The weights are those of the last good step. See "
            "what the events have in common, or raise max_bad_steps."
        )
        return outcome

    def halt(self, outcome: StepOutcome, reading: StepReading, message: str) -> StepOutcome:
        """Ends the run because the policy says so."""
        outcome.halt = f"Training was halted at step {reading.step}: {message}. The policy on_nonfinite is 'halt'."
        return outcome

    def count(self, reading: StepReading, num_dropped: int) -> None:
        """Counts the micro-batches of all ranks."""
        self.counter.count_microbatches(len(reading.group.micro_batches) * self.ranks.size, num_dropped)
