"""The guard: what happens to one optimizer step.

    guard.begin_step(step)                                rewind_to_snapshot.py: a snapshot, if one is due
    group = guard.begin_group(weight)
    for batch in batches:
        micro = MicroBatch(batch, rows, random state)     by reference; nothing is read
        loss = forward and backward                       the loop's own; guard.term and guard.watch add to the group
    outcome = guard.settle(group, runner, step)           settle.py
        norm   = runner.measure()                         on the device, before clipping, the same on every rank
        read   = losses, terms, watched tensors, norm     the ONE host read
        decide                                            finite first, then thresholds, then statistics
        contain                                           nonfinite_step.py: norm not finite, so on every rank at once
            redo: run each micro-batch alone, agree on what is dropped, run the good ones      redo.py
            skip: gradients None, buffers and random state as before the group
    clip by outcome.norm, optimizer.step, scheduler.step  only if outcome.stepped
    recovery.resolve(failure, step)                       if the run cannot continue from here: rewind or halt

On a healthy step this is one stacked read in place of the trainer's own; everything else runs only when something is wrong.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from ...boundary import Boundary, GuardFailure
from ...errors import ArgumentError, NonFiniteError
from ...plain_text import show
from ..autopsy.examiner import Examiner
from ..event import Failure, JsonObject
from ..journal import EventSink, Journal
from ..monitors.base import Monitor
from ..monitors.loss_watch import LossWatch
from ..monitors.monitor_set import MonitorSet, build_monitors
from ..monitors.spike_detector import SpikeDetector
from ..ranks import Ranks
from ..rerun.loss_terms import ON_NONFINITE, Term, cut_term, select_finite
from ..rerun.micro_batch import AccumulationGroup, MicroBatch
from ..rerun.runner import LoopRunner, Runner
from ..rerun.snapshot import StatePart, estimate_bytes, list_parts
from ..rerun.traceless_skip import ScalerState
from ..rng import RngState
from ..settings import Policy
from ..spikes.spike_examiner import SpikeExaminer
from ..torch_private import unwrap_compiled
from .bad_start import find_bad_start
from .compiled_model import can_hook, extra_forwards
from .counters import Counter
from .decision import Escalation
from .nonfinite_step import Containment
from .redo import Redo
from .rewind_to_snapshot import Recovery
from .settle import Settlement
from .step_reading import StepOutcome

Batch = TypeVar("Batch")


class Statistics:
    """What a guard has learned of a run, as a part of a snapshot. What it has counted does not go back."""

    def __init__(self, guard: "Guard"):
        self.guard = guard

    def copy(self, reused: object) -> JsonObject:
        return copy.deepcopy(self.guard.state_dict())

    def restore(self, saved: JsonObject, step: int) -> None:
        self.guard.load_state_dict({**copy.deepcopy(saved), "counter": self.guard.state_dict()["counter"]})


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
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
        max_grad_norm: float | None = None,
        ranks: Ranks | None = None,
        on_event: EventSink | None = None,
        folder: str | Path | None = None,
    ):
        self.policy = policy or Policy()
        self.runner = (
            None if model is None or optimizer is None else LoopRunner(model, optimizer, scaler, max_grad_norm)
        )
        device = self.runner.parameters[0].device if self.runner and self.runner.parameters else "cpu"
        self.ranks = ranks or Ranks(device)
        self.escalation = Escalation(self.policy.max_bad_steps)
        self.norms = SpikeDetector()
        self.counter = Counter()
        self.boundary = Boundary(self._report_failure, self.ranks)
        self.journal = Journal(self.ranks, on_event, self.policy.bundle_text, self.boundary)
        self.steps_done = 0
        self.find_step: Callable[[], int] = lambda: self.steps_done
        self.loss_watch = LossWatch(self.journal, self.policy.acts and self.policy.on_spike == "rewind")
        self.examiner = Examiner(self.policy, self.journal, None if folder is None else Path(folder))
        self.redo = Redo(self.journal, self.counter, self.examiner)
        self.spikes = SpikeExaminer(self.policy, self.journal, self.redo.replay, lambda: self.recovery.list_losses())
        self.monitor_set = MonitorSet(self.journal)
        known = (self.policy, self.journal, self.counter, self.escalation, self.redo, self.monitor_set.find_accepted)
        self.settlement = Settlement(Containment(*known), self.norms, self.loss_watch, self.spikes)
        self.recovery = Recovery(self.policy, self.journal, self.escalation, lambda: self.is_suspect)
        self.group: AccumulationGroup = AccumulationGroup(None)
        self.has_begun = False  # whether the state before the first step of the run was checked
        if model is not None and self.runner is not None:
            self.boundary.call("monitors", self._build_monitors, model, optimizer)
        self.scheduler = scheduler
        self.max_grad_norm = max_grad_norm

    def number_steps(self, find_step: Callable[[], int]) -> None:
        """Asks somebody else for the number of the step under way; otherwise calls of [`Guard.step`] are counted."""
        self.find_step = find_step

    def expect_online_losses(self, lowest_norm: float) -> None:
        """Judges losses as those of RL: they change their sign, and gradient norms below the lowest count as that."""
        self.loss_watch.expect_sign_changes()
        self.norms.raise_floor(lowest_norm)

    def _build_monitors(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        if self.runner is not None:
            ignores_hooks = not can_hook(self.runner, self.ranks)
            monitors = build_monitors(
                self.policy, unwrap_compiled(model), optimizer, self.journal, compiled=ignores_hooks
            )
            self.begin_monitors(monitors, self.runner)

    def begin_monitors(self, monitors: tuple[Monitor, ...], runner: Runner) -> None:
        """Replaces the monitors. Those of forwards get one of their own if the model ignores hooks."""
        self.monitor_set.begin(monitors, extra_forwards(runner, self.redo, lambda: self.group))

    def _report_failure(self, failure: GuardFailure) -> None:
        """Reports an error of the guard; the group under way is not redone, because it may not be recorded as it ran."""
        self.group.fail(str(failure))
        self.journal.write_failure(self.find_step(), failure)

    @property
    def replaying(self) -> bool:
        """Whether a held micro-batch is being run again."""
        return self.redo.replaying

    @property
    def is_suspect(self) -> bool:
        """Whether the loss, of this rank, or the norm is in an episode of spikes or of divergence."""
        return self.norms.is_open or self.loss_watch.is_open

    @property
    def last_norm(self) -> float | None:
        """The gradient norm before clipping of the step that was settled last."""
        return self.settlement.last_norm

    # ---- the hand-written loop ----

    def step(self, loss_fn: Callable[[Batch], Tensor], batches: Iterable[Batch]) -> StepOutcome:
        """Runs one optimizer step over `batches` and contains it if it is bad.

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
        call, recover = self.boundary.call, self.recovery.resolve
        watch = partial(self.watch_state, runner, self.scheduler)
        failure = call("snapshot", self.begin_step, self.steps_done, runner, watch)
        if failure is not None and (reason := recover(failure, self.steps_done)) is not None:
            return self._end(StepOutcome(stepped=False, halt=reason))
        marks = self.policy.acts and self.ranks.size > 1  # alone, a non-finite loss is known without a mark
        group = self.begin_group(weight=1 / len(batches))
        runner.begin_group(loss_fn)
        call("buffers", runner.buffers.keep)
        self.monitor_set.begin_step(self.steps_done)
        try:
            for index, batch in enumerate(batches):
                rng = call("random state", RngState.capture, runner.device_type)
                micro = MicroBatch(index, batch, rng)
                with runner.unsynced() if index < len(batches) - 1 else nullcontext():
                    loss = runner.run(micro, group.weight, self.boundary if marks else None)
                if rng is not None:
                    group.micro_batches.append(replace(micro, loss=loss))
        except BaseException:  # of the loss
            self.monitor_set.close()
            raise
        if marks:
            call("loss mark", runner.mark_losses, group.losses)
        self.monitor_set.end_backward()
        outcome = self._settle_and_step(group, runner)
        failure = outcome.failure or self.monitor_set.after_update()
        runner.clear()
        self.steps_done += 1
        if failure is not None:
            before = self.recovery.num_rewinds
            reason = recover(failure, self.steps_done, lambda: self.redo.repeats(group, runner))
            rewound = self.recovery.num_rewinds > before
            outcome = replace(outcome, halt=outcome.halt or reason, rewound=rewound)
        return self._end(outcome)

    def _end(self, outcome: StepOutcome) -> StepOutcome:
        if outcome.halt is not None and self.policy.on_halt == "raise":
            raise NonFiniteError(outcome.halt)
        return outcome

    def begin_run(self, folder: Path | None = None) -> None:
        """Begins a run: budgets, counts and statistics start anew; a resume restores the latter two from its checkpoint.

        Args:
            folder (`Path`, *optional*):
                Where bundles of autopsies go from now on; without it none is written.
        """
        for part in (
            self.counter,
            self.norms,
            self.loss_watch,
            self.escalation,
            self.journal,
            self.settlement,
            self.spikes,
        ):
            part.begin_run()
        self.recovery.begin_run()
        self.examiner.begin_run(folder)
        self.has_begun = False

    def begin_step(
        self, step: int, runner: Runner, watch: Callable[[], None], is_boundary: bool = True
    ) -> Failure | None:
        """Checks the state before the first step of a run, and takes a snapshot if one is due. Every rank calls it.

        Args:
            step (`int`):
                Number of the step.
            runner (`Runner`):
                Of the model.
            watch (`Callable`):
                Calls [`Guard.watch_state`]; called once a run, if its state can be restored.
            is_boundary (`bool`, *optional*, defaults to `True`):
                Whether the loop can begin anew here.

        Returns:
            `Failure`: why the run cannot continue from this state; `None` if it can.
        """
        if self.policy.mode == "off":
            return None
        check = self.monitor_set.check_before_save
        if not self.has_begun:
            self.has_begun = True
            failure = self.monitor_set.check_start(step, self.policy.on_bad_start != "observe")
            for event in find_bad_start(runner.bare_model, runner.optimizer, step):
                self.journal.write_once(event)
            if failure is not None:
                return failure
            check = lambda step: None  # noqa: E731  # nothing has changed since
        recovery = self.recovery
        begins = not recovery.is_watching and not self.monitor_set.has_bad_start
        if not begins and not recovery.is_due(step, is_boundary):
            return None

        def take() -> Failure | None:
            if begins:
                watch()
            return recovery.begin_step(step, check, is_boundary)

        return self.boundary.together("snapshot", take, lambda why: recovery.lose(step))

    def watch_state(
        self, runner: Runner, scheduler: object, others: Sequence[StatePart] = (), num_more: int = 0
    ) -> None:
        """Begins to take snapshots of a run; `others` are the parts of its state that only its loop knows, which need `num_more`
        bytes. Every rank calls it."""
        if runner.optimizer is not None:
            parts = (*list_parts(runner, runner.optimizer, scheduler), Statistics(self), *others)
            num_bytes = estimate_bytes(runner, runner.optimizer) + num_more
            self.recovery.watch(parts, num_bytes, runner.optimizer, scheduler)

    def _settle_and_step(self, group: AccumulationGroup, runner: LoopRunner) -> StepOutcome:
        before = None if runner.scaler is None else ScalerState(runner.scaler)
        self.boundary.call("buffers", runner.buffers.note_writes)
        off = self.policy.mode == "off"
        outcome = StepOutcome(norm=runner.measure()) if off else self.settle(group, runner, self.steps_done)
        if not outcome.stepped or outcome.failure is not None:
            if before is not None:
                before.restore()
            if self.scheduler is not None and outcome.moves_schedule:
                self.scheduler.step()
            return outcome
        self._clip(runner, outcome)
        self.begin_update(outcome)
        runner.update()
        if self.scheduler is not None and not outcome.scaler_skips:
            self.scheduler.step()
        return outcome

    def begin_update(self, outcome: StepOutcome) -> None:
        """Runs right before the optimizer steps."""
        self.monitor_set.before_update()
        if not outcome.scaler_skips:
            self.recovery.count_update()

    def _clip(self, runner: Runner, outcome: StepOutcome) -> None:
        bounds = [bound for bound in (self.max_grad_norm, outcome.clip_to) if bound is not None]
        if bounds and outcome.norm is not None:
            runner.clip(min(bounds), outcome.norm)

    def begin_group(self, weight: object = None) -> AccumulationGroup:
        """Begins a new group. [`Guard.watch`] and [`Guard.term`] add to it until the next one begins.

        Args:
            weight (`object`, *optional*):
                How the loop weighs the loss of each micro-batch, as its runner needs it.
        """
        self.group = AccumulationGroup(weight)
        return self.group

    def watch(self, name: str, tensor: Tensor, bound: float | None = None) -> Tensor:
        """Watches a tensor inside the loss, e.g. a prediction or a frozen encoder's output.

        Args:
            name (`str`):
                What to call it in the event.
            tensor (`Tensor`):
                Any float tensor; one fused reduction, read at the end of the step with everything else.
            bound (`float`, *optional*):
                Largest magnitude that is not reported.

        Returns:
            `Tensor`: the same tensor, so that it can be watched in passing.
        """
        if not self.replaying and self.policy.mode != "off":
            self.boundary.call("watch", self.group.watch, name, tensor, bound)
        return tensor

    def term(self, name: str, value: Tensor, weight: float | Tensor = 1.0, on_nonfinite: str = "keep") -> Tensor:
        """Names a term of the loss, so that it is logged, and blamed if it or its gradient is not finite.

        Its value is read at the end of the step with everything else: it is in `values.terms` of the event of a bad step,
        its name in `culprit.term`, its mean in the metric `nanguard/term/<name>`. If the gradient of a
        term with a finite value is non-finite, that is found by running the micro-batch again without the term. In evaluation, that is, without
        gradients, and with the mode `"off"` it only weighs.

        Args:
            name (`str`):
                What to call it.
            value (`Tensor`):
                The term, a scalar. Terms of the same name in one loss add up.
            weight (`float` or `Tensor`, *optional*, defaults to `1.0`):
                What it is multiplied by; the log has it without.
            on_nonfinite (`str`, *optional*, defaults to `"keep"`):
                `"keep"`: a bad term makes a bad micro-batch. `"drop"`: the loss continues without it, and an event says so. On the
                device, if a zero gradient into it comes out as zero; else the step is redone without it. Where a step
                cannot be redone (see docs/limits.md) or the model is sharded, the micro-batch or step is lost in that case.

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
            if self.redo.leaves_out(name):  # its weight is not used either, because that may be what is bad
                return cut_term(value, self.redo.reduced_parameters)
            drops = on_nonfinite == "drop" and self.policy.acts
            value = self.boundary.call("terms", self._watch_term, name, value, drops, otherwise=lambda *given: given[1])
        return value if isinstance(weight, float) and weight == 1.0 else weight * value

    def _watch_term(self, name: str, value: Tensor, drops: bool) -> Tensor:
        """Adds a term to the group; returns what the loss continues with."""
        if not self.replaying:
            self.group.add_term(Term(name, value.detach().reshape(()), drops, value.requires_grad))
        return select_finite(value) if drops and not self.redo.examining else value

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
        outcome = self.settlement.settle(group, runner, step, norm, zero_is_news)
        is_as_it_came = outcome.stepped and outcome.redone is None
        self.recovery.note(step, group, self.settlement.last_loss if is_as_it_came else None)
        return outcome if outcome.halt is None else replace(outcome, halt=show(outcome.halt, self.policy.bundle_text))

    # ---- state ----

    def state_dict(self) -> JsonObject:
        """Returns what survives a checkpoint: counts, statistics, and the state of the monitors."""
        return {
            "schema": 1,
            "counter": self.counter.state_dict(),
            "norms": self.norms.state_dict(),
            "losses": self.loss_watch.state_dict(),
            "spikes": self.spikes.state_dict(),
            "monitors": self.monitor_set.state_dict(),
        }

    def load_state_dict(self, state: JsonObject) -> None:
        self.counter.load_state_dict(state["counter"])
        self.norms.load_state_dict(state["norms"])
        if "losses" in state:  # a checkpoint of an older version has none
            self.loss_watch.load_state_dict(state["losses"])
        if "spikes" in state:  # likewise
            self.spikes.load_state_dict(state["spikes"])
        self.monitor_set.load_state_dict(state.get("monitors", {}))  # a checkpoint of an older version has none
