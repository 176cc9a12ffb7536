"""The guard: what happens to one optimizer step.

    for micro_batch in group:
        guard.hold(...)                      payload, rows and random state, by reference; nothing is read
        loss = forward and backward          the loop's own
    outcome = guard.settle(group, runner, step)
        norm   = runner.measure()            on the device, before clipping, the same on every rank
        read   = losses of the group + norm  the ONE host read
        decide                               finite first, then thresholds, then statistics
        contain                              (norm not finite, so on every rank at once; see containment.py)
            redo: probe each micro-batch alone, agree on what is dropped, run the good ones as if the others never came
            skip: gradients None, buffers and random state as before the group
    clip by outcome.norm, optimizer.step, scheduler.step      only if outcome.stepped

On a healthy step this is one stacked read in place of the trainer's own; everything else runs only when something broke.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ArgumentError, NonFiniteError
from ..autopsy.examiner import Examiner
from ..event import Culprit, Event
from ..finite import local, read_host
from ..journal import EventSink, Journal, tell_bad_terms, tell_watched
from ..monitors.monitor_set import MonitorSet, build_monitors
from ..ranks import Ranks
from ..rerun.loss_terms import ON_NONFINITE, Term, cut_term, select_finite
from ..rerun.micro_batch import AccumulationGroup, MicroBatch
from ..rerun.runner import LoopRunner, Runner, same_on_all_ranks
from ..rerun.skip import ScalerState
from ..rng import RngState
from ..robust_window import RobustWindow
from ..settings import Escalation, Policy, StepAction, decide
from ..vocabulary import Action, Signal
from .bad_gradients import take_census
from .containment import Containment
from .counters import Counter
from .deferred import Deferred, check_deferred
from .step_reading import BadMicroBatch, StepOutcome, StepReading


class Guard:
    """Watches a training loop and contains its bad steps.

    Args:
        model (`nn.Module`, *optional*):
            The model, for use in a hand-written loop through [`Guard.step`].
        optimizer (`torch.optim.Optimizer`, *optional*):
            Its optimizer, likewise.
        policy (`Policy`, *optional*):
            What to do; the defaults drop what is bad and keep the rest.
        scheduler (*optional*):
            Stepped after every optimizer step, held on a skipped one.
        scaler (`torch.amp.GradScaler`, *optional*):
            The loss scaler of a float16 loop.
        max_grad_norm (`float`, *optional*):
            Clip gradients to this norm.
        ranks (`Ranks`, *optional*):
            The processes that decide together; defaults to the initialised process group.
        on_event (`Callable`, *optional*):
            Called with every event as a dictionary of the public schema, e.g. a `report.run_files.JsonlWriter`.
        read_every_n_steps (`int`, *optional*, defaults to `1`):
            With a fused optimizer, bad steps can be skipped on the device and read back only every so often. There is
            no redo then: the whole step is skipped, and a scheduler is not held.
        folder (`str` or `Path`, *optional*):
            Where bundles of autopsies go; without it none is written.

    Example:

    ```python
    guard = Guard(model, optimizer, max_grad_norm=1.0)
    for group in groups:  # lists of batches
        guard.step(lambda batch: model(**batch).loss, group)
    ```
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        policy: Policy | None = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        max_grad_norm: float | None = None,
        ranks: Ranks | None = None,
        on_event: EventSink | None = None,
        read_every_n_steps: int = 1,
        folder: str | Path | None = None,
    ):
        self.policy = policy or Policy()
        check_deferred(read_every_n_steps, self.policy, optimizer, scaler)
        self.runner = None if model is None or optimizer is None else LoopRunner(model, optimizer, scaler)
        device = self.runner.parameters[0].device if self.runner and self.runner.parameters else "cpu"
        self.ranks = ranks or Ranks(device)
        self.escalation = Escalation(self.policy.max_bad_steps)
        self.norms = RobustWindow()
        self.counter = Counter()
        self.journal = Journal(self.ranks, on_event)
        self.examiner = Examiner(self.policy, self.journal, None if folder is None else Path(folder))
        self.containment = Containment(
            self.policy, self.ranks, self.journal, self.counter, self.escalation, self.examiner
        )
        self.deferred = Deferred(
            self.policy, self.ranks, self.journal, self.counter, self.escalation, self.norms, read_every_n_steps
        )
        self.monitor_set = MonitorSet(self.journal)
        if model is not None and self.runner is not None:
            self.monitor_set.begin(build_monitors(self.policy, model, optimizer, self.journal))
        self.group = AccumulationGroup()
        self.zero_before = False
        self.steps_done = 0
        self.last_norm: float | None = None
        self.scheduler = scheduler
        self.max_grad_norm = max_grad_norm

    @property
    def replaying(self) -> bool:
        """Whether a held micro-batch is being run again."""
        return self.containment.replaying

    # ---- the hand-written loop ----

    def step(self, loss_fn: Callable[[Any], Tensor], batches: Iterable[Any]) -> StepOutcome:
        """Runs one optimizer step over `batches` and contains it if it goes bad.

        Args:
            loss_fn (`Callable`):
                Returns the mean loss of a batch, with its graph. It may be called again for the same batch.
            batches (`Iterable`):
                The micro-batches of the step; each weighs the same.

        Returns:
            `StepOutcome`: what became of it.

        Raises:
            NonFiniteError: if the policy says so; the weights are those of the last good step.
        """
        runner = self.runner
        if runner is None:
            raise ArgumentError(
                "Guard.step needs a model and an optimizer: build the guard as Guard(model, optimizer)."
            )
        batches = list(batches)
        if not batches:
            raise ArgumentError("Guard.step must be given at least one batch, got none.")
        runner.loss_fn = loss_fn
        runner.clear()  # of what an error inside the last loss may have left
        runner.buffers.keep()
        self.monitor_set.begin_step(self.steps_done)
        self.group = AccumulationGroup(share=1 / len(batches))
        for index, batch in enumerate(batches):
            micro = self.hold(batch, runner.device_type)
            with runner.unsynced() if index < len(batches) - 1 else nullcontext():
                micro.loss = runner.run(micro, self.group.share)
        self.monitor_set.end_backward()
        on_device = self.deferred.period > 1 and self.policy.mode != "off"
        outcome = self._step_on_device(runner) if on_device else self._settle_and_step(runner)
        reason = self.monitor_set.after_update()
        outcome.halt = outcome.halt or reason
        runner.clear()
        self.steps_done += 1
        if outcome.halt is not None and self.policy.on_halt == "raise":
            raise NonFiniteError(outcome.halt)
        return outcome

    def _settle_and_step(self, runner: LoopRunner) -> StepOutcome:
        before = None if runner.scaler is None else ScalerState(runner.scaler)
        off = self.policy.mode == "off"
        outcome = StepOutcome(norm=runner.measure()) if off else self.settle(self.group, runner, self.steps_done)
        if not outcome.stepped:
            if before is not None:
                before.restore()
            return outcome
        self._clip(runner, outcome)
        self.monitor_set.before_update()
        if runner.scaler is None:
            runner.optimizer.step()
        else:
            runner.scaler.step(runner.optimizer)
            runner.scaler.update()
        if self.scheduler is not None and not outcome.scaler_skips:
            self.scheduler.step()
        return outcome

    def _step_on_device(self, runner: LoopRunner) -> StepOutcome:
        outcome = StepOutcome(norm=runner.measure())
        assert outcome.norm is not None
        self._clip(runner, outcome)
        self.monitor_set.before_update()
        outcome.halt = self.deferred.step(self.group, runner, outcome.norm, self.steps_done)
        if self.scheduler is not None:
            self.scheduler.step()
        return outcome

    def _clip(self, runner: Runner, outcome: StepOutcome) -> None:
        bounds = [bound for bound in (self.max_grad_norm, outcome.clip_to) if bound is not None]
        if bounds and outcome.norm is not None:
            torch.nn.utils.clip_grads_with_norm_(runner.parameters, min(bounds), outcome.norm)

    def hold(self, payload: Any, device_type: str = "cpu") -> MicroBatch:
        """Holds a micro-batch of the current group by reference, with the random state right before its forward."""
        micro = MicroBatch(len(self.group.micro_batches), payload, RngState.capture(device_type))
        self.group.micro_batches.append(micro)
        return micro

    def watch(self, name: str, tensor: Tensor, bound: float | None = None) -> Tensor:
        """Watches a tensor inside the loss, e.g. a prediction or a frozen encoder's output.

        Args:
            name (`str`):
                What to call it in the event.
            tensor (`Tensor`):
                Any float tensor; one fused reduction, read at the end of the step with everything else.
            bound (`float`, *optional*):
                Largest magnitude that is still healthy.

        Returns:
            `Tensor`: the same tensor, so that it can be watched in passing.
        """
        if not self.replaying and self.policy.mode != "off":
            self.group.watch(name, tensor, bound)
        return tensor

    def term(self, name: str, value: Tensor, weight: float | Tensor = 1.0, on_nonfinite: str = "keep") -> Tensor:
        """Names a term of the loss, so that it is logged, and blamed if it or its gradient is not finite.

        Its value is read at the end of the step with everything else: it is in `values.terms` of the event of a bad step,
        its name in `culprit.term`, its mean in the metric `nanguard/term/<name>`. A gradient that went bad inside a term
        with a finite value is traced to it by running the micro-batch again without it. In evaluation, that is, without
        gradients, and with the mode `"off"` it only weighs.

        Args:
            name (`str`):
                What to call it.
            value (`Tensor`):
                The term, a scalar. Terms of the same name in one loss add up.
            weight (`float` or `Tensor`, *optional*, defaults to `1.0`):
                What it is multiplied by; the log has it without.
            on_nonfinite (`str`, *optional*, defaults to `"keep"`):
                `"keep"`: a bad term makes a bad micro-batch. `"drop"`: the loss goes on without it, as an event. On the
                device, if a zero gradient into it comes out as zero; else the step is redone without it. Where a step
                cannot be redone (see the README) or the model is sharded, the micro-batch or step is lost in that case.

        Returns:
            `Tensor`: the weighted term, to be added to the loss.

        Raises:
            ArgumentError: if it is not a scalar tensor.

        Example:

        ```python
        def loss_fn(batch):
            ce, kd = losses(batch)
            return guard.term("ce", ce, 0.9) + guard.term("kd", kd, 0.1, on_nonfinite="drop")
        ```
        """
        if on_nonfinite not in ON_NONFINITE:
            raise ArgumentError(
                f"on_nonfinite of a term must be one of {', '.join(ON_NONFINITE)}, got {on_nonfinite!r}."
            )
        if not isinstance(value, Tensor):
            raise ArgumentError(f"term {name!r} must be a tensor, got {value!r}. Leave out a term that is not there.")
        if value.numel() != 1:
            raise ArgumentError(f"term {name!r} must be a scalar, got shape {tuple(value.shape)}. Reduce it first.")
        if self.policy.mode != "off" and torch.is_grad_enabled():
            if self.replaying and name in self.containment.cut:  # nor is its weight used: that may be what is bad
                runner = self.containment.runner
                return cut_term(value, runner.parameters if runner is not None and self.ranks.size > 1 else [])
            value = self._take_term(name, value, drops=on_nonfinite == "drop" and self.policy.acts)
        return value if isinstance(weight, float) and weight == 1.0 else weight * value

    def _take_term(self, name: str, value: Tensor, drops: bool) -> Tensor:
        if not self.replaying:
            self.group.add_term(Term(name, value.detach().reshape(()), drops, value.requires_grad))
        return select_finite(value) if drops and not self.containment.examining else value

    # ---- one step ----

    def settle(
        self, group: AccumulationGroup, runner: Runner, step: int, norm: Tensor | None = None, zero_is_news: bool = True
    ) -> StepOutcome:
        """Decides a step and carries the decision out, up to but not including clip and optimizer.

        Args:
            group (`AccumulationGroup`):
                The micro-batches, with their losses.
            runner (`Runner`):
                Runs them again if need be.
            step (`int`):
                Number of the step, for events.
            norm (`Tensor`, *optional*):
                The norm, if the loop has measured (and clipped) already.
            zero_is_news (`bool`, *optional*, defaults to `True`):
                Whether an exact zero loss with zero gradients deserves an event; in RL equal rewards make it normal.
        """
        norm_dev = runner.measure() if norm is None else same_on_all_ranks(norm)
        *values, norm_host = read_host([*group.losses, *group.notes, local(norm_dev)])
        losses, watched = values[: len(group.losses)], group.take_notes(values[len(group.losses) :])
        self.last_norm = norm_host
        decision = decide(losses, norm_host, self.policy, self.norms)
        if not math.isfinite(norm_host) and group.has_bad_term:  # dropped on the device, yet its gradient leaked
            decision = replace(decision, signal=Signal.LOSS_NONFINITE)
        reading = StepReading(
            step, group, losses, norm_host, norm_dev, decision, self.ranks.rank, norm is not None,
            learning_rate=runner.learning_rate,
        )  # fmt: skip
        tell_watched(self.journal, group, watched, step)
        if math.isfinite(norm_host):
            tell_bad_terms(self.journal, group, losses, step)
        self._tell_findings(reading)
        outcome = self._carry_out(reading, runner, zero_is_news)
        if outcome.stepped:
            self.counter.count_terms(group.micro_batches)
        return outcome

    def _carry_out(self, reading: StepReading, runner: Runner, zero_is_news: bool) -> StepOutcome:
        """Does what was decided about a step."""
        decision, norm_host = reading.decision, reading.norm
        if (
            runner.scaler is not None
            and not math.isfinite(norm_host)
            and reading.bad_loss is None
            and not self.policy.acts
        ):
            return self.containment.leave_to_scaler(reading, runner)
        if decision.course is not StepAction.STEP and not math.isfinite(norm_host):
            return self.containment.contain(reading, runner)
        if math.isfinite(norm_host):
            self.counter.grad_norm_max = max(self.counter.grad_norm_max, norm_host)
        if decision.course in (StepAction.CLIP, StepAction.SKIP):
            return self._contain_spike(reading, runner)
        self.containment.count(reading, 0)
        if decision.signal is not None:
            return self._observe(reading, runner)
        self.escalation.healthy()
        self.norms.add(norm_host)
        self._tell_zero(reading, zero_is_news)
        return StepOutcome(norm=reading.norm_dev)

    def _observe(self, reading: StepReading, runner: Runner) -> StepOutcome:
        """Says what is wrong and lets the step go on: `observe` mode, a rank-local loss, a spike."""
        norm, threshold, signal = reading.norm, self.norms.threshold(), reading.decision.signal
        if signal is Signal.GRAD_SPIKE:
            message = f"gradient norm {norm:.4g} at step {reading.step} is out of line (threshold {threshold:.4g})"
            values = {"grad_norm": norm, "threshold": threshold}
            culprit = Culprit(phase="backward")
            self.journal.write_once(
                Event(reading.step, signal, Action.OBSERVED, message, values=values, culprit=culprit)
            )
        elif math.isfinite(norm):
            message = f"{reading.tell()}, its gradients are finite"
            blamed = self._examine_loss(reading, runner)
            self.journal.write(reading.event(Action.OBSERVED, message, blamed=blamed))
        else:
            census = take_census(runner.named_gradients())
            self.counter.count_gradients(census.bad)
            reading = StepReading(**{**vars(reading), "census": census})
            with runner.undisturbed():
                blamed, _ = self.containment.explain(reading, runner)
            self.journal.write(reading.event(Action.OBSERVED, reading.tell(), blamed=blamed))
        if math.isfinite(norm):
            self.escalation.healthy()
            self.norms.add(norm if threshold is None else min(norm, threshold))
        shown = reading.finite_losses
        keep = self.policy.acts and len(shown) < len(reading.losses)
        return StepOutcome(norm=reading.norm_dev, redone=shown if keep else None)

    def _examine_loss(self, reading: StepReading, runner: Runner) -> BadMicroBatch | None:
        """Examines a bad loss whose gradients are finite. That is news of this rank only, so among several ranks nothing
        is run again: a forward of DDP may wait for the others."""
        place = reading.bad_loss
        if place is None or self.ranks.size > 1 or runner.why_no_autopsy(reading.group) is not None:
            return None
        self.containment.replaying = self.containment.examining = True
        try:
            with runner.undisturbed():
                micro = reading.group.micro_batches[place[0]]
                verdict = self.examiner.examine(runner, micro, reading.group.share, reading.step)
                return replace(BadMicroBatch.of_run(micro, place[1], reading.census, reading.step), verdict=verdict)
        finally:
            self.containment.replaying = self.containment.examining = False

    def _contain_spike(self, reading: StepReading, runner: Runner) -> StepOutcome:
        """A finite norm that is too large, by the fixed threshold or by the statistics. The same on every rank."""
        fixed = self.policy.skip_grad_norm
        threshold = fixed if fixed is not None and reading.norm > fixed else self.norms.threshold()
        clips = reading.decision.course is StepAction.CLIP
        message = f"gradient norm {reading.norm:.4g} at step {reading.step} is above {threshold:.4g}"
        values = {"grad_norm": reading.norm, "threshold": threshold}
        action = Action.CLIPPED if clips else Action.SKIPPED
        culprit = Culprit(phase="backward")
        event = Event(reading.step, Signal.GRAD_SPIKE, action, message, values=values, culprit=culprit)
        self.journal.write_once(event)
        if reading.bad_loss is not None:  # known to this rank only, and lost otherwise
            told = f"{reading.tell()}, its gradients are finite"
            self.journal.write(reading.event(Action.OBSERVED, told, Signal.LOSS_NONFINITE))
        if not clips:
            return self.containment.skip(reading, runner, event.signal, message)
        self.containment.count(reading, 0)
        self.escalation.healthy()
        self.norms.add(reading.norm)
        shown = reading.finite_losses
        redone = shown if len(shown) < len(reading.losses) else None
        return StepOutcome(norm=reading.norm_dev, redone=redone, clip_to=threshold)

    # ---- what is told ----

    def _tell_zero(self, reading: StepReading, is_news: bool) -> None:
        zero = is_news and reading.norm == 0.0 and bool(reading.losses) and not any(reading.losses)
        if zero and not self.zero_before:
            message = f"loss and gradients are exactly zero at step {reading.step}: this batch teaches nothing"
            values = {"loss": 0.0, "grad_norm": 0.0}
            event = Event(reading.step, Signal.LOSS_ZERO, Action.OBSERVED, message, rank=reading.rank, values=values)
            self.journal.write(event)
        self.zero_before = zero

    def _tell_findings(self, reading: StepReading) -> None:
        for micro in reading.group.micro_batches:
            for finding in micro.findings:
                if finding.verdict in ("drop", "halt") and not math.isfinite(reading.norm):
                    continue  # told by whoever carries it out; a finite norm means that nobody could
                harmless = math.isfinite(reading.norm) and finding.signal not in self.journal.told
                if finding.verdict == "suspect" and not harmless:
                    continue  # told by whoever carries it out; if the loss left it out, once is enough
                actions = {"repair": Action.REPAIRED, "removed": Action.DROPPED}
                action = actions.get(finding.verdict, Action.OBSERVED)
                blamed = BadMicroBatch.of_finding(micro, finding, reading.step)
                self.journal.write(blamed.event(action, reading))

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Returns what survives a checkpoint: counts, statistics and the place on the ladder."""
        return {
            "schema": 1,
            "counter": self.counter.state_dict(),
            "norms": self.norms.state_dict(),
            "bad_in_a_row": self.escalation.bad_in_a_row,
            "monitors": self.monitor_set.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what [`Guard.state_dict`] returned."""
        self.counter.load_state_dict(state["counter"])
        self.norms.load_state_dict(state["norms"])
        self.escalation.bad_in_a_row = int(state["bad_in_a_row"])
        self.monitor_set.load_state_dict(state.get("monitors", {}))  # a checkpoint of an older version has none
