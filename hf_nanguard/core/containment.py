"""What is done about a step whose gradient norm is not finite.

The norm is the same on every rank, so every rank is here at once and may talk to the others. In order: the loss scaler's
own overflows are left to it; what the policy wants to skip, repair or halt is; otherwise each micro-batch is run alone
to find the bad ones, and the good ones are run as if the others had never come.
"""

import logging
import math
from dataclasses import asdict, replace
from typing import Any

from .agreement import Ranks
from .autopsy.examiner import Examiner
from .autopsy.update import examine_update, try_update_remedies
from .autopsy.verdict import Verdict
from .census import Census, describe, format_incident, judge
from .counter import Counter
from .event import Culprit, Event
from .finite import find_nonfinite, local, read_host
from .group import MicroBatch
from .incident import BadMicroBatch, Incident, Settlement
from .journal import Journal
from .policy import Course, Ladder, Policy
from .rng import RngState
from .runner import Runner
from .signal import Action, Cause, Signal

logger = logging.getLogger("hf_nanguard")


class Containment:
    """Carries out what was decided about bad steps.

    Args:
        policy (`Policy`), ranks (`Ranks`), journal (`Journal`), counter (`Counter`), ladder (`Ladder`), examiner
        (`Examiner`):
            Those of the guard.
    """

    def __init__(
        self, policy: Policy, ranks: Ranks, journal: Journal, counter: Counter, ladder: Ladder, examiner: Examiner
    ):
        self.policy = policy
        self.ranks = ranks
        self.journal = journal
        self.counter = counter
        self.ladder = ladder
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

    def contain(self, incident: Incident, runner: Runner) -> Settlement:
        """Contains a step whose norm is not finite."""
        self.drawn = RngState.capture(runner.device_type)
        group = incident.group
        gradients = runner.named_gradients()
        facts = self.ranks.gather(
            {
                "bad": find_nonfinite(gradients),
                "loss_is_finite": incident.bad_loss is None and not group.has_bad_term,
                "must_go": any(micro.must_go for micro in group.micro_batches) or incident.suspected,
                "halts": any(f.verdict == "halt" for micro in group.micro_batches for f in micro.findings),
                "why_not": runner.why_not(group),
            }
        )
        told = any(fact["must_go"] for fact in facts)
        finite = all(fact["loss_is_finite"] for fact in facts)
        if runner.scaler is not None and finite and not told:
            return self.leave_to_scaler(incident, runner)
        census = judge([name for name, _ in gradients], {k: v for fact in facts for k, v in fact["bad"].items()})
        incident = replace(incident, census=census)
        self.counter.count_gradients(census.bad)
        if any(fact["halts"] for fact in facts):
            return self.halt_on_input(incident, runner)
        if not incident.clipped and not told:
            self.show(incident)
        mine = incident.bad_loss is not None or group.has_bad_term or (finite and self.ranks.rank == 0)
        if not incident.clipped and not census.bad:
            return self.skip_norm_overflow(incident, runner)
        why_not = next((fact["why_not"] for fact in facts if fact["why_not"]), None)
        course = Course.REDO if told else incident.decision.course
        if course is Course.REDO and why_not is None:
            return self.redo(incident, runner)
        if course is Course.REPAIR and finite:  # a non-finite loss leaves nothing in its gradients to keep
            return self.repair(incident, runner)
        return self.skip_whole(incident, runner, mine, course, why_not)

    def show(self, incident: Incident) -> None:
        """Logs which gradients are bad, on one rank, and again only when others are."""
        census, counter = incident.census, self.counter
        if self.ranks.rank == 0 and census.bad != self.shown:
            logger.warning(format_incident(incident.step, incident.norm, census, counter.num_nan, counter.num_inf))
        self.shown = census.bad

    # ---- the whole step ----

    def leave_to_scaler(self, incident: Incident, runner: Runner) -> Settlement:
        """Lets a GradScaler skip the step by itself: with finite losses, its scale was too large. That is its job."""
        self.counter.scaler_skips += 1
        self.count(incident, 0)
        scale = runner.scaler.get_scale()
        if scale <= 1.0:
            message = (
                f"gradients overflow at step {incident.step} although the loss scale has fallen to {scale:g}: the fault "
                "is not the scale"
            )
            values = {"loss_scale": scale}
            self.journal.write_once(
                Event(incident.step, Signal.GRAD_NONFINITE, Action.OBSERVED, message, values=values)
            )
        return Settlement(norm=incident.norm_dev, scaler_skips=True)

    def skip_norm_overflow(self, incident: Incident, runner: Runner) -> Settlement:
        """Skips a step whose gradients are all finite though their norm is not: nobody is to blame."""
        message = f"the gradient norm is {incident.norm} at step {incident.step} though every gradient is finite"
        halts = incident.decision.course is Course.HALT
        action = Action.HALTED if halts else Action.SKIPPED
        event = incident.event(action, message, Signal.GRAD_NONFINITE, Cause.NORM_OVERFLOW)
        self.journal.write_once(event)
        settlement = self.skip(incident, runner, event.signal, message)
        return self.halt(settlement, incident, message) if halts else settlement

    def skip_whole(
        self, incident: Incident, runner: Runner, mine: bool, course: Course, why_not: str | None
    ) -> Settlement:
        """Skips the step as one, because the policy says so or because it cannot be redone."""
        halts = course is Course.HALT
        message = incident.tell()
        if course is Course.REDO and why_not is not None:
            message += f"; the whole group was skipped because {why_not}"
        blamed, told_here = self.explain(incident, runner)
        event = incident.event(Action.HALTED if halts else Action.SKIPPED, message, blamed=blamed)
        known = [
            BadMicroBatch.of_finding(micro, finding, incident.step).event(Action.SKIPPED, incident)
            for micro in incident.group.micro_batches
            for finding in micro.findings
            if finding.verdict == "drop" or (finding.verdict == "suspect" and incident.suspected)
        ]
        self.journal.share(known or ([event] if (mine if told_here is None else told_here) else []))
        settlement = self.skip(incident, runner, event.signal, message)
        return self.halt(settlement, incident, message) if halts else settlement

    def halt_on_input(self, incident: Incident, runner: Runner) -> Settlement:
        """Ends the run because of a batch that the policy does not accept."""
        blamed = [
            BadMicroBatch.of_finding(micro, finding, incident.step)
            for micro in incident.group.micro_batches
            for finding in micro.findings
            if finding.verdict == "halt"
        ]
        messages = [message for report in self.ranks.gather([bad.message for bad in blamed]) for message in report]
        self.journal.share([bad.event(Action.HALTED, incident) for bad in blamed])
        settlement = self.skip(incident, runner, None, messages[0])
        settlement.halt = (
            f"Training was halted at step {incident.step}: {messages[0]}. The policy on_bad_input is 'halt'."
        )
        return settlement

    def repair(self, incident: Incident, runner: Runner) -> Settlement:
        """Zeroes the bad entries of the gradients and lets the rest step, unless nothing is left."""
        with runner.undisturbed():
            blamed, told_here = self.explain(incident, runner)
        for _, gradient in runner.named_gradients():
            local(gradient).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        norm_dev = runner.norm()
        [norm] = read_host([local(norm_dev)])
        works = math.isfinite(norm) and norm > 0.0
        message = incident.tell() + ("" if works else "; nothing was left after zeroing the bad entries")
        action = Action.REPAIRED if works else Action.SKIPPED
        event = incident.event(action, message, Signal.GRAD_NONFINITE, blamed=blamed, grad_norm_repaired=norm)
        self.journal.share([event] if (self.ranks.rank == 0 if told_here is None else told_here) else [])
        if not works:
            return self.skip(incident, runner, event.signal, message)
        self.count(incident, 0)
        return self.climb(Settlement(norm=norm_dev, fresh=True), incident, event.signal, message)

    # ---- micro-batch by micro-batch ----

    def redo(self, incident: Incident, runner: Runner) -> Settlement:
        """Finds the bad micro-batches, agrees on what is dropped and runs the good ones as if the others never came."""
        self.replaying, self.runner = True, runner
        runner.meet()
        try:
            found = self.find_bad(incident, runner)
            spared = [bad for bad in found if self.spare(bad)]
            blamed = [bad for bad in found if not bad.micro.cut]
            reports = self.ranks.gather([bad.micro.index for bad in blamed])
            gone = (
                {index for report in reports for index in report} if runner.lockstep else set(reports[self.ranks.rank])
            )
            for micro in incident.group.micro_batches:
                micro.is_dropped = micro.index in gone
            blamed = self.examine(incident, runner, blamed, reports)
            spared = self.examine(incident, runner, spared, reports)
            if runner.lockstep:
                blamed = self.narrow_blame(blamed, reports)
            good = [micro for micro in incident.group.micro_batches if micro.index not in gone]
            size = len(incident.group.micro_batches)
            num_good = [len(good) if runner.lockstep else size - len(report) for report in reports]
            settlement = self.run_good(incident, runner, good, num_good) if sum(num_good) else None
        finally:
            self.replaying = False
        self.tell_redo(incident, runner, blamed, reports, num_good, settlement, spared)
        signal = blamed[0].signal if blamed else Signal.GRAD_NONFINITE
        message = blamed[0].message if blamed else incident.tell()
        suspicious = not good and not any(micro.must_go for micro in incident.group.micro_batches)
        if suspicious and blamed:  # a row of an embedding that only some samples need is no reason to end the run
            suspicious = not all(bad.verdict is not None and bad.verdict.spares_others for bad in blamed)
        sick = self.find_sick_parameter(incident, runner, suspicious)
        if settlement is None:
            settlement = self.skip(incident, runner, signal, message)
        else:
            num_dropped = size * self.ranks.size - sum(num_good)
            self.count(incident, num_dropped)
            settlement = self.climb(settlement, incident, signal, message) if num_dropped else settlement
        settlement.halt = sick or settlement.halt
        return settlement

    def find_bad(self, incident: Incident, runner: Runner) -> list[BadMicroBatch]:
        """Runs every micro-batch alone and returns those whose gradients are not finite, and those known to be bad."""
        blamed = []
        for micro in incident.group.micro_batches:
            known = next((finding for finding in micro.findings if finding.verdict == "drop"), None)
            if known is None or runner.lockstep:
                loss_dev = runner.probe(micro, incident.group.share)
                census = self.take_census(runner)
                [loss] = read_host([loss_dev])
            if known is not None:
                blamed.append(BadMicroBatch.of_finding(micro, known, incident.step))
            elif census.bad and micro.suspicion is not None:
                blamed.append(BadMicroBatch.of_finding(micro, micro.suspicion, incident.step))
            elif census.bad:
                cure = self.find_cure(incident, runner, micro)
                blamed.append(BadMicroBatch.of_run(micro, loss, census, incident.step, cure))
        return blamed

    def find_cure(self, incident: Incident, runner: Runner, micro: MicroBatch) -> frozenset[str]:
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
                runner.probe(micro, incident.group.share)
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
        self, incident: Incident, runner: Runner, blamed: list[BadMicroBatch], reports: list[list[int]]
    ) -> list[BadMicroBatch]:
        """Adds an autopsy to every bad micro-batch that does not explain itself. Sharded models need every rank in every
        pass, so there all ranks look at the first one and at where it broke, no more."""
        group = incident.group
        verdicts: dict[int, Verdict | None] = {}
        self.examining = True
        try:
            for index in sorted({i for report in reports for i in report})[:1] if runner.lockstep else ():
                micro = group.micro_batches[index]
                verdicts[index] = self.examiner.examine(runner, micro, group.share, incident.step)
            for bad in blamed if not runner.lockstep else ():
                if not bad.micro.must_go:
                    verdicts[bad.micro.index] = self.examiner.examine(runner, bad.micro, group.share, incident.step)
        except KeyboardInterrupt:
            for bad in blamed:
                self.journal.write(bad.event(Action.SKIPPED, incident))
            raise
        finally:
            self.examining = False
        return [replace(bad, verdict=verdicts.get(bad.micro.index)) for bad in blamed]

    def explain(self, incident: Incident, runner: Runner) -> tuple[BadMicroBatch | None, bool | None]:
        """Examines the first bad micro-batch of a group that is not redone. Every rank calls it.

        Returns:
            `tuple[BadMicroBatch | None, bool | None]`: the micro-batch, and whether this rank is the one to tell it; `None`
            if no rank has more to tell than the step as a whole.
        """
        why_not = self.ranks.gather(runner.why_no_autopsy(incident.group))
        if any(why_not) or not any(self.ranks.gather(self.examiner.due)):
            return None, None
        self.replaying, self.runner = True, runner
        runner.meet()
        try:
            blamed = self.find_bad(incident, runner)
            reports = self.ranks.gather([bad.micro.index for bad in blamed])
            if not any(reports) and not runner.knows_loss:
                self.examiner.tell_out_of_sight(incident.step)
            blamed = self.examine(incident, runner, blamed[:1], reports)
            if runner.lockstep:
                blamed = self.narrow_blame(blamed, reports)
        finally:
            self.replaying = False
        found = next((bad for bad in blamed if bad.verdict is not None), None)
        facts = self.ranks.gather({"found": found is not None, "bad_loss": incident.bad_loss is not None})
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
        self, incident: Incident, runner: Runner, good: list[MicroBatch], num_good: list[int]
    ) -> Settlement | None:
        """Runs the good micro-batches; `None` if even their gradients are not finite."""
        losses = runner.rerun(incident.group, good, runner.regroup(good, num_good))
        norm_dev = runner.measure()
        *values, norm = read_host([*losses, local(norm_dev)])
        if not math.isfinite(norm):
            return None
        self.counter.grad_norm_max = max(self.counter.grad_norm_max, norm)
        shown = [loss for loss, value in zip(losses, values, strict=True) if math.isfinite(value)]
        num_dropped = len(incident.group.micro_batches) - len(good)
        return Settlement(norm=norm_dev, redone=shown, fresh=True, num_dropped=num_dropped)

    def tell_redo(
        self,
        incident: Incident,
        runner: Runner,
        blamed: list[BadMicroBatch],
        reports: list[list[int]],
        num_good: list[int],
        settlement: Settlement | None,
        spared: list[BadMicroBatch],
    ) -> None:
        """Writes an event for every bad micro-batch or term, and one if nobody in particular is to blame."""
        action = Action.SKIPPED if settlement is None else Action.DROPPED
        note = ""
        if runner.lockstep and self.ranks.size > 1:
            note = "; dropped on every rank, as parameters are sharded"
        events = [bad.event(action, incident, note) for bad in blamed]
        for bad in spared:
            events.append(bad.event(action, incident, f"; only the term was dropped: {', '.join(sorted(bad.cure))}"))
        num_spared = sum(self.ranks.gather(len(spared)))
        what = f"{describe(incident.census)} at step {incident.step}"
        if self.ranks.rank == 0 and not any(reports) and not num_spared and settlement is not None:
            message = f"{what}, but not when the step was run again: suspect hardware or non-determinism"
            events = [incident.event(Action.REPAIRED, message, Signal.GRAD_NONFINITE, Cause.TRANSIENT)]
        elif self.ranks.rank == 0 and sum(num_good) > 0 and settlement is None:
            message = f"{what}; no single micro-batch is to blame, only their sum"
            events.append(incident.event(Action.SKIPPED, message, Signal.GRAD_NONFINITE))
        self.journal.share(events)

    def find_sick_parameter(self, incident: Incident, runner: Runner, suspicious: bool) -> str | None:
        """If every micro-batch of a rank was bad, the weights may be to blame: then going on is useless."""
        mine = find_nonfinite(runner.named_parameters()) if suspicious else {}
        if not self.examiner.due:  # nobody looks any more whether others do without it; once it was so
            mine = {name: kind for name, kind in mine.items() if name not in self.examiner.spared}
        found = self.ranks.gather(mine)
        bad = {name: kind for report in found for name, kind in report.items()}
        if not bad:
            return None
        name, kind = next(iter(bad.items()))
        message = f"parameter {name} holds {'NaN' if kind == 'nan' else 'inf'} at step {incident.step}"
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
                incident.step, Signal.PARAM_NONFINITE, Action.HALTED, message, None, 0, values, culprit, cause, remedies
            )
        )  # fmt: skip
        return f"Training was halted: {message}. No batch can mend that: go back to an earlier checkpoint."

    # ---- the way out ----

    def skip(self, incident: Incident, runner: Runner, signal: Signal | None, message: str) -> Settlement:
        """Leaves parameters, optimizer, schedule, buffers and random state as they were before the group."""
        runner.clear()
        runner.buffers.restore()
        runner.sync_buffers(True)
        before = incident.group.micro_batches[0].rng
        self.untouched = before if not self.ladder.bad_in_a_row else self.untouched
        # As if the step had never been. But a bad number may be one that the loss has drawn itself (a noise level, say):
        # from the same state it would draw it for ever, so half-way to the halt the random state goes on.
        (self.drawn if self.drawn is not None and self.ladder.is_half_way else before).restore()
        self.drawn = None
        size = len(incident.group.micro_batches)
        self.counter.skipped_steps += 1
        self.count(incident, size * self.ranks.size)
        settlement = Settlement(steps=False, redone=[], num_dropped=size)
        if signal is not None:
            settlement = self.climb(settlement, incident, signal, message)
        if settlement.halt is not None and self.untouched is not None:
            self.untouched.restore()
        return settlement

    def climb(self, settlement: Settlement, incident: Incident, signal: Signal, message: str) -> Settlement:
        """Counts a bad step; too many in a row and the run has to end."""
        if not self.ladder.bad():
            return settlement
        why = f"{self.ladder.bad_in_a_row} bad steps in a row (the last: {message})"
        values = {"bad_steps_in_a_row": self.ladder.bad_in_a_row}
        self.journal.write_once(Event(incident.step, signal, Action.HALTED, f"halted after {why}", values=values))
        settlement.halt = (
            f"Training was halted at step {incident.step} after {why}. The weights are those of the last good step. See "
            "what the events have in common, or raise max_bad_steps."
        )
        return settlement

    def halt(self, settlement: Settlement, incident: Incident, message: str) -> Settlement:
        """Ends the run because the policy says so."""
        settlement.halt = f"Training was halted at step {incident.step}: {message}. The policy on_nonfinite is 'halt'."
        return settlement

    def count(self, incident: Incident, num_dropped: int) -> None:
        """Counts the micro-batches of all ranks."""
        self.counter.count_microbatches(len(incident.group.micro_batches) * self.ranks.size, num_dropped)
