"""What happens to a step whose losses or gradients are not finite.

The norm is the same on every rank, so every rank is here at once and may communicate. In order: overflows of the loss scaler
are left to it; if the policy says so, the step is skipped or repaired, or the run halts; otherwise the step is redone without its bad micro-batches.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TypedDict

import torch

from ..event import Culprit, Event, Failure, JsonValue, Remedy
from ..finite import find_nonfinite, local, read_host
from ..journal import Journal, log_block
from ..optimizer.bad_update import examine_update, try_update_remedies
from ..rerun.micro_batch import BatchAction, MicroBatch
from ..rerun.runner import Runner
from ..rng import RngState
from ..settings import Policy
from ..vocabulary import Action, Cause, Signal
from .bad_gradients import KINDS, describe, format_bad_gradients, judge
from .counters import Counter
from .decision import Escalation, StepAction
from .redo import Redo, RedoResult
from .step_reading import StepOutcome, StepReading

LOGGED = 4  # bad parameters; the autopsy says more


class RankFacts(TypedDict):
    """What one rank knows about a step whose norm is not finite."""

    bad: dict[str, str]
    loss_is_finite: bool
    must_be_dropped: bool
    halts: bool
    why_not: str | None


@dataclass(eq=False, repr=False)
class Containment:
    """Carries out what was decided about bad steps."""

    policy: Policy
    journal: Journal
    counter: Counter
    escalation: Escalation
    redo: Redo
    find_accepted: Callable[[], Collection[str]] = tuple  # the parameters that contained inf before the first update
    logged: dict[str, str] = field(default_factory=dict, init=False)  # the bad gradients that were logged last
    before_streak: RngState | None = field(default=None, init=False)  # before the first of the bad steps in a row

    def __post_init__(self) -> None:
        self.boundary, self.ranks = self.journal.boundary, self.journal.ranks

    def contain(self, reading: StepReading, runner: Runner) -> StepOutcome:
        """Contains a step whose norm, or on a single rank a loss, is not finite; if that fails on a rank, all skip it."""
        return self.boundary.together(
            "containment", lambda: self._contain(reading, runner), lambda why: self.skip_blindly(reading, runner, why)
        )

    def _contain(self, reading: StepReading, runner: Runner) -> StepOutcome:
        group = reading.group
        gradients = runner.named_gradients()
        rng_after = RngState.capture(runner.device_type)
        mine: RankFacts = {
            "bad": find_nonfinite(gradients),
            "loss_is_finite": reading.bad_loss is None and not group.has_bad_term,
            "must_be_dropped": any(micro.must_be_dropped for micro in group.micro_batches) or reading.suspected,
            "halts": any(micro.findings_to(BatchAction.HALT) for micro in group.micro_batches),
            "why_not": runner.why_not(group),
        }
        facts = self.ranks.gather(mine)
        known = any(fact["must_be_dropped"] for fact in facts)
        finite = all(fact["loss_is_finite"] for fact in facts)
        if runner.scaler is not None and finite and not known:
            return self.leave_to_scaler(reading, runner.scaler)
        bad = {k: v for fact in facts for k, v in fact["bad"].items()}
        if not finite and self.ranks.size > 1 and len(bad) == 1:  # the mark of the loss itself
            bad = {}
        census = judge([name for name, _ in gradients], bad)
        reading = replace(reading, census=census, rng_after=rng_after)
        self.counter.count_gradients(census.bad)
        if any(fact["halts"] for fact in facts):
            return self.halt_on_input(reading, runner)
        outcome = self._contain_known(reading, runner, facts, finite, known)
        if not reading.clipped and not known and bad:  # after the autopsy, which says more
            self.log_gradients(reading)
        return outcome

    def _contain_known(
        self, reading: StepReading, runner: Runner, facts: list[RankFacts], finite: bool, known: bool
    ) -> StepOutcome:
        group = reading.group
        reports = reading.bad_loss is not None or group.has_bad_term or (finite and self.ranks.rank == 0)
        why_not = next((fact["why_not"] for fact in facts if fact["why_not"]), None)
        action = StepAction.REDO if known else reading.decision.action
        if action is StepAction.REDO and why_not is None:
            result = self.boundary.together("redo", lambda: self.redo.run(reading, runner), lambda why: why)
            if isinstance(result, RedoResult):
                return self.drop_bad(reading, runner, result)
            why_not = result
        if action is StepAction.REPAIR and finite:  # a non-finite loss leaves nothing usable in its gradients
            return self.repair(reading, runner)
        return self.skip_whole(reading, runner, reports, action, why_not)

    def log_gradients(self, reading: StepReading) -> None:
        """Logs which gradients are bad, on rank 0, if some are good and the bad ones are not those logged last."""
        census, counter = reading.census, self.counter
        if self.ranks.rank == 0 and census.good and census.bad != self.logged:
            nums = counter.num_nan, counter.num_inf
            log_block(format_bad_gradients(reading.step, reading.norm, census, *nums, max_shown=LOGGED))
        self.logged = census.bad

    # ---- the whole step ----

    def leave_to_scaler(self, reading: StepReading, scaler: torch.amp.GradScaler) -> StepOutcome:
        """Lets a GradScaler skip the step: finite losses mean that its scale was too large, which it corrects itself."""
        self.counter.count_scaler_skip()
        self.count(reading, 0, reading.group.micro_batches)
        scale = scaler.get_scale()
        if scale <= 1.0:
            message = (
                f"gradients overflow at step {reading.step} although the loss scale has fallen to {scale:g}; the scale is "
                "not the cause"
            )
            values = {"loss_scale": scale}
            self.journal.write_once(Event(reading.step, Signal.GRAD_NONFINITE, Action.OBSERVED, message, values=values))
        return StepOutcome(norm=reading.norm_dev, scaler_skips=True)

    def skip_whole(
        self, reading: StepReading, runner: Runner, mine: bool, action: StepAction, why_not: str | None
    ) -> StepOutcome:
        """Skips the whole step, because the policy says so or because it cannot be redone."""
        halts = action is StepAction.HALT
        message = reading.describe()
        if action is StepAction.REDO and why_not is not None:
            message += f"; the whole group was skipped because {why_not}"
        blamed, reported_here = self.redo.explain(reading, runner)
        event = reading.event(_skip_action(halts), message, blamed=blamed)
        suspects = [BatchAction.SUSPECT] if reading.suspected else []
        known = [bad.event(Action.SKIPPED, reading) for bad in reading.list_findings(BatchAction.DROP, *suspects)]
        reports = mine if reported_here is None else reported_here
        self.journal.write_shared(known or ([event] if reports else []))
        return self.skip(reading, runner, event.signal, message, halts)

    def skip_blindly(self, reading: StepReading, runner: Runner, why: str) -> StepOutcome:
        """Skips a step that is known to be bad after an error of the guard, on every rank."""
        halts = reading.decision.action is StepAction.HALT
        message = f"{reading.describe()}; the whole group was skipped because {why}"
        event = reading.event(_skip_action(halts), message)
        self.journal.write_once(event)
        return self.skip(reading, runner, event.signal, message, halts)

    def halt_on_input(self, reading: StepReading, runner: Runner) -> StepOutcome:
        """Ends the run because of a batch that the policy does not accept."""
        blamed = reading.list_findings(BatchAction.HALT)
        messages = [message for report in self.ranks.gather([bad.message for bad in blamed]) for message in report]
        self.journal.write_shared([bad.event(Action.HALTED, reading) for bad in blamed])
        reason = f"Training was halted at step {reading.step}: {messages[0]}. The policy on_bad_input is 'halt'."
        return replace(self.skip(reading, runner, None, messages[0]), halt=reason)

    def repair(self, reading: StepReading, runner: Runner) -> StepOutcome:
        """Zeroes the bad entries of the gradients and lets the rest step, unless nothing is left."""
        with runner.undisturbed():
            blamed, reported_here = self.redo.explain(reading, runner)
        for _, gradient in runner.named_gradients():
            local(gradient).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        norm_dev = runner.norm()
        [norm] = read_host([local(norm_dev)])
        works = math.isfinite(norm) and norm > 0.0
        message = reading.describe() + ("" if works else "; nothing was left after zeroing the bad entries")
        action = Action.REPAIRED if works else Action.SKIPPED
        event = reading.event(action, message, Signal.GRAD_NONFINITE, blamed=blamed, grad_norm_repaired=norm)
        reports = self.ranks.rank == 0 if reported_here is None else reported_here
        self.journal.write_shared([event] if reports else [])
        if not works:
            return self.skip(reading, runner, event.signal, message)
        self.count(reading, 0, reading.group.micro_batches)
        return self.escalate(StepOutcome(norm=norm_dev, fresh=True), reading, event.signal, message)

    # ---- without the bad micro-batches ----

    def drop_bad(self, reading: StepReading, runner: Runner, result: RedoResult) -> StepOutcome:
        """Goes on with a step that was redone without its bad micro-batches; skips it if nothing is left."""
        blamed, outcome = result.blamed, result.outcome
        self.emit_redo(reading, runner, result)
        signal = blamed[0].signal if blamed else Signal.GRAD_NONFINITE
        message = blamed[0].message if blamed else reading.describe()
        group = reading.group
        suspicious = not result.good and not any(micro.must_be_dropped for micro in group.micro_batches)
        if suspicious and blamed:  # a row of an embedding that only some samples need is no reason to end the run
            suspicious = not all(bad.verdict is not None and bad.verdict.spares_others for bad in blamed)
        if suspicious:
            runner.buffers.restore()  # the passes of the bad micro-batches may have written weights
        bad_weights = self.find_bad_parameter(reading, runner, suspicious)
        if outcome is None:
            outcome = self.skip(reading, runner, signal, message)
        else:
            num_dropped = len(group.micro_batches) * self.ranks.size - sum(result.num_good)
            self.count(reading, num_dropped, result.good)
            outcome = self.escalate(outcome, reading, signal, message) if num_dropped else outcome
        return outcome if bad_weights is None else replace(outcome, failure=bad_weights)

    def emit_redo(self, reading: StepReading, runner: Runner, result: RedoResult) -> None:
        """Writes an event for every bad micro-batch or term, or one about the step if no micro-batch is to blame."""
        action = Action.SKIPPED if result.outcome is None else Action.DROPPED
        note = ""
        if runner.lockstep and self.ranks.size > 1:
            note = "; dropped on every rank because parameters are sharded"
        events = [bad.event(action, reading, note) for bad in result.blamed]
        for bad in result.spared:
            events.append(
                bad.event(action, reading, f"; only the term was dropped: {', '.join(sorted(bad.removable_terms))}")
            )
        num_spared = sum(self.ranks.gather(len(result.spared)))
        what = f"{describe(reading.census)} at step {reading.step}"
        if self.ranks.rank == 0 and not any(result.reports) and not num_spared and result.outcome is not None:
            message = f"{what}, but not when the step was run again: suspect hardware or non-determinism"
            events = [reading.event(Action.REPAIRED, message, Signal.GRAD_NONFINITE, Cause.TRANSIENT)]
        elif self.ranks.rank == 0 and sum(result.num_good) > 0 and result.outcome is None:
            message = f"{what}; no single micro-batch is to blame, only their sum"
            events.append(reading.event(Action.SKIPPED, message, Signal.GRAD_NONFINITE))
        self.journal.write_shared(events)

    def find_bad_parameter(self, reading: StepReading, runner: Runner, suspicious: bool) -> Failure | None:
        """Returns that every micro-batch of a rank was bad because the weights are; every rank calls it."""
        mine = find_nonfinite(runner.named_parameters()) if suspicious else {}
        if mine:
            accepted = self.find_accepted()
            mine = {name: kind for name, kind in mine.items() if kind == "nan" or name not in accepted}
        examiner = self.redo.examiner
        if not examiner.due:  # no autopsy will show any more which samples do not use a parameter
            mine = {name: kind for name, kind in mine.items() if name not in examiner.spared}
        found = self.ranks.gather(mine)
        bad = {name: kind for report in found for name, kind in report.items()}
        if not bad:
            return None
        name, kind = next(iter(bad.items()))
        message = f"parameter {name} contains {KINDS[kind]} at step {reading.step}"
        if len(bad) > 1:
            message += f", as do {len(bad) - 1} other parameters"
        values: dict[str, JsonValue] = {"num_bad_parameters": len(bad), "bad_parameters": dict(list(bad.items())[:12])}
        culprit, cause = Culprit(phase="parameter", parameter=name), Cause.PARAM_NONFINITE
        remedies: tuple[Remedy, ...] = ()
        named = [(key, parameter) for key, parameter in runner.named_parameters() if key == name]
        optimizer = runner.optimizer
        if optimizer is not None and (update := examine_update(optimizer, named)) is not None:
            message += f": {update.message}"
            culprit, cause = replace(culprit, phase="optimizer"), update.cause
            remedies = try_update_remedies(optimizer, update, named[0][1])
        signal, action = Signal.PARAM_NONFINITE, Action.OBSERVED
        event = Event(
            reading.step, signal, action, message, values=values, culprit=culprit, cause=cause, remedies=remedies
        )
        reason = f"Training was halted: {message}. Dropping batches cannot fix this. Resume from an earlier checkpoint."
        return Failure(reason, event)

    # ---- how a bad step ends ----

    def skip(
        self, reading: StepReading, runner: Runner, signal: Signal | None, message: str, halts: bool = False
    ) -> StepOutcome:
        """Leaves parameters, optimizer, schedule, buffers and random state as they were before the group.

        The step counts as a bad one with this signal, unless it is `None`; `halts` says whether the policy ends the run because
        of it.
        """
        group = reading.group
        runner.undo(group)
        if not self.escalation.bad_in_a_row:
            self.before_streak = group.micro_batches[0].rng if group.micro_batches else None
        # A bad number may be one that the loss has drawn itself (a noise level, say). From the same random state it would
        # be drawn in every step, so from half of the allowed bad steps on the random state moves on.
        if reading.rng_after is not None and self.escalation.is_half_way:
            reading.rng_after.restore()
        size = len(group.micro_batches)
        self.counter.count_skip()
        self.count(reading, size * self.ranks.size, [])
        outcome = StepOutcome(stepped=False, redone=[], num_dropped=size)
        if signal is not None:
            outcome = self.escalate(outcome, reading, signal, message)
        if outcome.failure is not None and self.before_streak is not None:
            self.before_streak.restore()
        if halts:
            reason = f"Training was halted at step {reading.step}: {message}. The policy on_nonfinite is 'halt'."
            outcome = replace(outcome, halt=reason)
        return outcome

    def escalate(self, outcome: StepOutcome, reading: StepReading, signal: Signal, message: str) -> StepOutcome:
        """Counts a bad step; after too many in a row the run cannot continue from where it is."""
        if not self.escalation.count_bad(reading.step):
            return outcome
        num_bad = self.escalation.bad_in_a_row
        why = f"{num_bad} bad steps in a row; last: {message}"
        event = Event(reading.step, signal, Action.OBSERVED, why, values={"bad_steps_in_a_row": num_bad})
        common = self.journal.summary.describe_common(self.escalation.first_bad_step or 0)
        reason = (
            f"Training was halted after {why}. {common} The weights are those of the last good step. To allow more, raise "
            "nanguard_max_bad_steps."
        )
        return replace(outcome, failure=Failure(reason, event))

    def count(self, reading: StepReading, num_dropped: int, trained: list[MicroBatch]) -> None:
        """Counts the micro-batches of all ranks, and the terms of those of this rank that were trained on."""
        self.counter.count_microbatches(len(reading.group.micro_batches) * self.ranks.size, num_dropped)
        self.counter.count_terms(trained)


def _skip_action(halts: bool) -> Action:
    return Action.HALTED if halts else Action.SKIPPED
