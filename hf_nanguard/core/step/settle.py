"""One step decided and carried out: the one host read, the decision, and what follows for steps with a finite norm.

A step whose norm is not finite goes to `nonfinite_step.py`.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import NonFiniteError
from ..event import Culprit, Event, Failure
from ..finite import local, read_host
from ..monitors.loss_watch import LossWatch
from ..monitors.spike_detector import SpikeDetector
from ..rerun.micro_batch import AccumulationGroup, BatchAction, Finding
from ..rerun.runner import Runner, same_on_all_ranks
from ..spikes.spike_examination import SpikeReport
from ..spikes.spike_examiner import SpikeExaminer
from ..vocabulary import Action, Signal
from .bad_gradients import take_census
from .decision import StepAction, decide
from .nonfinite_step import Containment
from .overflowed_norm import OverflowedNorm
from .step_reading import BadMicroBatch, StepOutcome, StepReading
from .watched_terms import emit_bad_terms, emit_watched

NONFINITE = (Signal.LOSS_NONFINITE, Signal.GRAD_NONFINITE)


@dataclass(eq=False, repr=False)
class Settlement:
    """Reads a step, decides it and carries the decision out."""

    containment: Containment
    norms: SpikeDetector
    loss_watch: LossWatch
    spikes: SpikeExaminer
    norm_dev: Tensor | None = None  # of the step that is being settled, once it is measured
    reading: StepReading | None = None  # likewise, once it is read

    def __post_init__(self) -> None:
        known = self.containment
        self.policy, self.journal, self.boundary = known.policy, known.journal, known.boundary
        self.counter, self.escalation, self.redo = known.counter, known.escalation, known.redo
        self.ranks = self.journal.ranks
        self.begin_run()

    def begin_run(self) -> None:
        """Forgets what was reported of another run."""
        self.last_norm: float | None = None
        self.last_loss: float | None = None
        self.has_reported_zero = False
        self.overflowed_norm = OverflowedNorm(self.journal)

    def settle(
        self, group: AccumulationGroup, runner: Runner, step: int, norm: Tensor | None, zero_is_news: bool
    ) -> StepOutcome:
        """Decides a step and carries the decision out, see [`Guard.settle`]."""
        given = (group, runner, step, norm, zero_is_news)
        try:
            return self.boundary.call("settle", self._settle, *given, otherwise=self._settle_plainly)
        finally:
            self.norm_dev = self.reading = None  # they hold the inputs of the group

    def _settle_plainly(
        self, group: AccumulationGroup, runner: Runner, step: int, norm: Tensor | None, zero_is_news: bool
    ) -> StepOutcome:
        """Decides a step by its norm alone after an error of the guard: one that is known to be bad is skipped."""
        ranks, norm_dev = self.journal.ranks, self.norm_dev
        if norm_dev is None:
            norm_dev = runner.measure() if norm is None else same_on_all_ranks(norm)
        [norm_host] = read_host([local(norm_dev)])
        decision = decide([], norm_host, self.policy, self.norms)
        reading = self.reading or StepReading(step, group, [], norm_host, norm_dev, decision)
        if reading.decision.signal not in NONFINITE:
            return StepOutcome(norm=norm_dev)
        why = "the guard failed before it was decided"
        if runner.lockstep and ranks.size > 1:
            raise NonFiniteError(f"The gradient norm is {norm_host} at step {step}, and {why} on rank {ranks.rank}.")
        if not math.isfinite(norm_host):
            ranks.fail()  # the others are about to contain the step
        acts = reading.decision.action is not StepAction.STEP
        return self.containment.skip_blindly(reading, runner, why) if acts else StepOutcome(norm=norm_dev)

    def _settle(
        self, group: AccumulationGroup, runner: Runner, step: int, norm: Tensor | None, zero_is_news: bool
    ) -> StepOutcome:
        norm_dev = runner.measure() if norm is None else same_on_all_ranks(norm)
        self.norm_dev = norm_dev
        *values, norm_host = read_host([*group.losses, *group.notes, local(norm_dev)])
        losses, watched = values[: len(group.losses)], group.take_notes(values[len(group.losses) :])
        if math.isinf(norm_host) and norm is None:
            norm_host = self.overflowed_norm.measure_again(runner, step, norm_host)
            norm_dev = torch.full_like(norm_dev, norm_host, dtype=torch.float32)
        self.last_norm = norm_host
        self.last_loss = runner.mean_loss(losses)
        decision = decide(losses, norm_host, self.policy, self.norms, self.ranks.size == 1)
        if not math.isfinite(norm_host) and group.has_bad_term:  # dropped on the device, yet its gradient is not finite
            decision = replace(decision, signal=Signal.LOSS_NONFINITE)
        reading = StepReading(
            step, group, losses, norm_host, norm_dev, decision, norm is not None,
            learning_rate=runner.learning_rate,
        )  # fmt: skip
        self.reading = reading
        emit_watched(self.journal, group, watched, step)
        if math.isfinite(norm_host):
            emit_bad_terms(self.journal, group, losses, step)
        self._emit_findings(reading)
        return self._carry_out(reading, runner, zero_is_news)

    def _carry_out(self, reading: StepReading, runner: Runner, zero_is_news: bool) -> StepOutcome:
        decision, finite = reading.decision, math.isfinite(reading.norm)
        if runner.scaler is not None and not finite and reading.bad_loss is None and not self.policy.acts:
            return self.containment.leave_to_scaler(reading, runner.scaler)
        if decision.action is not StepAction.STEP and decision.signal in NONFINITE:
            return self.containment.contain(reading, runner)
        if finite:
            self.counter.count_norm(reading.norm)
        alone = (
            self.ranks.size == 1
        )  # another rank may have another setting; weights that it ruins are found on all of them
        if self.policy.acts and alone and (bad := runner.bad_setting) is not None:
            return self._skip_setting(reading, runner, *bad)
        report = self._examine_spike(reading, runner) if finite else SpikeReport(None)
        outcome = self._act(reading, runner, report, zero_is_news)
        if report.has_news:  # no spike of this step is reported, or not yet
            self.journal.write_once(report.make_event(reading.step))
        return outcome

    def _act(self, reading: StepReading, runner: Runner, report: SpikeReport, zero_is_news: bool) -> StepOutcome:
        decision, finite = reading.decision, math.isfinite(reading.norm)
        if finite and decision.action is not StepAction.SKIP and reading.group.failure is None:
            self.loss_watch.observe(reading.step, runner.mean_loss(reading.losses), reading.norm, report.explain)
            if self.loss_watch.holds_divergence and (diverged := self.loss_watch.take_divergence()) is not None:
                return replace(self.containment.skip(reading, runner, None, diverged.reason), failure=diverged)
        if decision.action in (StepAction.CLIP, StepAction.SKIP):
            return self._contain_spike(reading, runner, report)
        self.containment.count(reading, 0, reading.group.micro_batches)
        if decision.signal is not None:
            return self._observe(reading, runner, report)
        self.escalation.reset()
        self.norms.add(reading.step, reading.norm)
        self._emit_zero(reading, zero_is_news)
        return StepOutcome(norm=reading.norm_dev)

    def _skip_setting(self, reading: StepReading, runner: Runner, name: str, value: float) -> StepOutcome:
        """Skips an update with a setting that would make all weights non-finite. The schedule goes on, which may have made it;
        a rewind would come to the same place again, so if it stays so the run halts."""
        shown = "learning rate" if name == "lr" else name
        message = (
            f"the {shown} of the optimizer is {value} at step {reading.step}, so the update would make the weights non-finite; "
            "look at the schedule, or at what else sets it"
        )
        event = Event(
            reading.step, Signal.OPTIMIZER_NONFINITE, Action.SKIPPED, message,
            values={name: value}, culprit=Culprit(phase="optimizer"),
        )  # fmt: skip
        self.journal.write_once(event)
        outcome = self.containment.skip(reading, runner, event.signal, message)
        halt = None if outcome.failure is None else outcome.failure.reason
        return replace(outcome, failure=None, halt=halt, moves_schedule=True)

    def _examine_spike(self, reading: StepReading, runner: Runner) -> SpikeReport:
        """Examines a step that is out of line, before its event is written."""
        losses = [] if self.loss_watch.is_signed else reading.losses
        is_spike = self.norms.is_spike(reading.norm)
        if losses and self.ranks.size == 1:  # only this rank knows them
            is_spike = is_spike or self.loss_watch.is_spike(runner.mean_loss(losses))
        with reading.group.kept_as_recorded():
            return SpikeReport(self.spikes.examine(reading.group, runner, reading.step, losses, reading.norm, is_spike))

    def _observe(self, reading: StepReading, runner: Runner, report: SpikeReport) -> StepOutcome:
        """Reports what is wrong and lets the step continue: mode `observe`, a non-finite loss of this rank, a spike."""
        norm = reading.norm
        spike = self.norms.add(reading.step, norm)
        if reading.decision.signal is Signal.GRAD_SPIKE:
            if spike is not None:  # else its episode is reported already
                self.journal.write_once(report.explain(self._describe_spike(reading, Action.OBSERVED, spike.threshold)))
        elif math.isfinite(norm):
            self._emit_bad_loss(reading, runner)
        else:
            census = take_census(runner.named_gradients())
            self.counter.count_gradients(census.bad)
            reading = replace(reading, census=census)
            with runner.undisturbed():
                blamed, _ = self.redo.explain(reading, runner)
            self.journal.write(reading.event(Action.OBSERVED, reading.describe(), blamed=blamed))
        if math.isfinite(norm):
            self.escalation.reset()
        shown = reading.finite_losses
        keep = self.policy.acts and len(shown) < len(reading.losses)
        return StepOutcome(norm=reading.norm_dev, redone=shown if keep else None)

    def _contain_spike(self, reading: StepReading, runner: Runner, report: SpikeReport) -> StepOutcome:
        """Clips or skips a finite norm that is above the fixed threshold or that of the statistics, on every rank alike."""
        fixed = self.policy.skip_grad_norm
        threshold = fixed if fixed is not None and reading.norm > fixed else self.norms.threshold()
        clips = reading.decision.action is StepAction.CLIP
        event = report.explain(self._describe_spike(reading, Action.CLIPPED if clips else Action.SKIPPED, threshold))
        rewinds = not clips and self.policy.on_spike == "rewind" and threshold != fixed
        if not rewinds:
            self.journal.write_once(event)
        if reading.bad_loss is not None:  # known to this rank only, and lost otherwise
            self._emit_bad_loss(reading)
        if not clips:
            outcome = self.containment.skip(reading, runner, Signal.GRAD_SPIKE, event.message)
            spike = Failure(event.message, event, fallback=Action.SKIPPED)
            return replace(outcome, failure=spike) if rewinds else outcome
        self.containment.count(reading, 0, reading.group.micro_batches)
        self.escalation.reset()
        self.norms.add(reading.step, reading.norm)
        shown = reading.finite_losses
        redone = shown if len(shown) < len(reading.losses) else None
        return StepOutcome(norm=reading.norm_dev, redone=redone, clip_to=threshold)

    # ---- events ----

    def _describe_spike(self, reading: StepReading, action: Action, threshold: float | None) -> Event:
        message = f"gradient norm {reading.norm:.4g} at step {reading.step} is above the threshold of {threshold:.4g}"
        values = {"grad_norm": reading.norm, "threshold": threshold}
        if threshold != self.policy.skip_grad_norm and (usual := self.norms.usual) is not None:
            message += f"; the usual norm is {usual:.4g}"
            values["usual"] = usual
        culprit = Culprit(phase="backward")
        return Event(reading.step, Signal.GRAD_SPIKE, action, message, values=values, culprit=culprit)

    def _emit_bad_loss(self, reading: StepReading, runner: Runner | None = None) -> None:
        blamed = None if runner is None else self.boundary.call("redo", self.redo.examine_loss, reading, runner)
        message = f"{reading.describe()}; its gradients are finite"
        self.journal.write(reading.event(Action.OBSERVED, message, Signal.LOSS_NONFINITE, blamed=blamed))

    def _emit_zero(self, reading: StepReading, is_news: bool) -> None:
        """Reports, once a run, a step without loss and gradient: margin losses have many. `no_learning_signal` counts them."""
        is_zero = is_news and reading.norm == 0.0 and bool(reading.losses) and not any(reading.losses)
        if is_zero and not self.has_reported_zero:
            message = f"loss and gradients are exactly zero at step {reading.step}; nothing is learned from this batch"
            values = {"loss": 0.0, "grad_norm": 0.0}
            event = Event(reading.step, Signal.LOSS_ZERO, Action.OBSERVED, message, values=values)
            self.journal.write(event)
            self.has_reported_zero = True

    def _emit_findings(self, reading: StepReading) -> None:
        """Writes the findings whose events do not depend on what becomes of the step; `Containment` writes the others."""
        actions = {BatchAction.REPAIR: Action.REPAIRED, BatchAction.REMOVED: Action.DROPPED}
        for micro in reading.group.micro_batches:
            is_dropped = reading.drops(micro)
            for finding in micro.findings:
                if self._is_due(finding, math.isfinite(reading.norm) and not is_dropped):
                    bad = BadMicroBatch.of_finding(micro, finding, reading.step)
                    self.journal.write(bad.event(actions.get(finding.action, Action.OBSERVED), reading))

    def _is_due(self, finding: Finding, finite: bool) -> bool:
        if finding.action in (BatchAction.DROP, BatchAction.HALT):
            return finite  # the micro-batch could not be dropped
        if finding.action is BatchAction.SUSPECT:
            return finite and finding.signal not in self.journal.written  # the loss ignored it; once is enough
        return True
