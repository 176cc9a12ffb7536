"""The guard: what happens to one optimizer step.

    for micro_batch in group:
        guard.hold(...)                      payload, rows and random state, by reference; nothing is read
        loss = forward and backward          the loop's own
    settlement = guard.settle(group, runner, step)
        norm   = runner.measure()            on the device, before clipping, the same on every rank
        read   = losses of the group + norm  the ONE host read
        decide                               finite first, then thresholds, then statistics
        redo                                 (norm not finite, so on every rank at once)
            probe each micro-batch alone, agree on what is dropped, run the good ones as if the others never came
        skip                                 gradients None, buffers and random state as before the group
    clip by settlement.norm, optimizer.step, scheduler.step      only if settlement.steps

On a healthy step this is one stacked read in place of the trainer's own; everything else runs only when something broke.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, NonFiniteError
from .agreement import Ranks
from .census import Census, describe, format_incident, judge, take_census
from .counter import Counter
from .event import Culprit, Event
from .finite import find_nonfinite, local, read_host
from .group import Finding, Group, MicroBatch
from .policy import Course, Decision, Ladder, Policy, decide
from .rng import RngState
from .runner import LoopRunner, Runner, same_on_all_ranks
from .signal import Action, Cause, Signal
from .skip import ScalerState, can_skip_on_device, step_unless
from .statistic import RobustWindow

logger = logging.getLogger(__name__)

EventSink = Callable[[dict[str, Any]], None]


@dataclass
class Settlement:
    """What became of a step.

    Args:
        steps (`bool`):
            Whether the optimizer may step.
        norm (`Tensor`, *optional*):
            The norm to clip by; `None` if the step is skipped.
        redone (`list[Tensor]`, *optional*):
            The losses that stand for the group if it was redone or skipped, `None` if it went through as it was.
        num_dropped (`int`):
            How many micro-batches of this rank were left out.
        clip_to (`float`, *optional*):
            A tighter bound for the norm than the loop's own.
        halt (`str`, *optional*):
            Why the run has to end, `None` if it goes on.
        scaler_skips (`bool`):
            The loss scaler is about to skip this step by itself, as it does while it finds its scale.
    """

    steps: bool = True
    norm: Tensor | None = None
    redone: list[Tensor] | None = None
    num_dropped: int = 0
    clip_to: float | None = None
    halt: str | None = None
    scaler_skips: bool = False


@dataclass
class _Bad:
    """A bad micro-batch of this rank, before it is known what is done about it."""

    micro: MicroBatch
    signal: Signal
    message: str
    values: dict[str, Any] = field(default_factory=dict)
    culprit: Culprit = field(default_factory=Culprit)
    cause: Cause | None = None


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
            Called with every event as a dictionary of the public schema, e.g. a `report.jsonl.EventWriter`.
        read_every_n_steps (`int`, *optional*, defaults to `1`):
            With a fused optimizer, bad steps can be skipped on the device and read back only every so often. There is
            no redo then: the whole step is skipped.

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
    ):
        self.policy = policy or Policy()
        self.ladder = Ladder(self.policy.max_bad_steps)
        self.norms = RobustWindow()
        self.counter = Counter()
        self.on_event = on_event
        self.told: set[Signal] = set()
        self.zero_before = False
        self.replaying = False
        self.group = Group()
        self.steps_done = 0
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.max_grad_norm = max_grad_norm
        self.read_every_n_steps = read_every_n_steps
        self.runner = None if model is None or optimizer is None else LoopRunner(model, optimizer, scaler)
        device = self.runner.parameters[0].device if self.runner and self.runner.parameters else "cpu"
        self.ranks = ranks or Ranks(device)
        if read_every_n_steps < 1:
            raise ArgumentError(f"read_every_n_steps must be at least 1, got {read_every_n_steps!r}.")
        if read_every_n_steps > 1 and (optimizer is None or scaler is not None or not can_skip_on_device(optimizer)):
            raise ArgumentError(
                f"read_every_n_steps was {read_every_n_steps!r}, but only a fused optimizer without a GradScaler can skip "
                "a step on the device. Build the optimizer with fused=True or leave read_every_n_steps at 1."
            )
        self._skipped_on_device: Tensor | None = None

    # ---- the hand-written loop ----

    def step(self, loss_fn: Callable[[Any], Tensor], batches: Iterable[Any]) -> Settlement:
        """Runs one optimizer step over `batches` and contains it if it goes bad.

        Args:
            loss_fn (`Callable`):
                Returns the mean loss of a batch, with its graph. It may be called again for the same batch.
            batches (`Iterable`):
                The micro-batches of the step; each weighs the same.

        Returns:
            `Settlement`: what became of it.

        Raises:
            NonFiniteError: if the policy says so; the weights are those of the last good step.
        """
        if self.runner is None or self.optimizer is None:
            raise ArgumentError("Guard.step needs the model and the optimizer: build the guard as Guard(model, optimizer).")
        runner, optimizer = self.runner, self.optimizer
        batches = list(batches)
        runner.loss_fn = loss_fn
        runner.buffers.keep()
        self.group = Group(share=1 / len(batches))
        for index, batch in enumerate(batches):
            micro = self.hold(batch, runner.device_type)
            with runner.unsynced() if index < len(batches) - 1 else torch.enable_grad():
                micro.loss = runner.run(micro, self.group.share)
        if self.policy.mode == "off":
            settlement = Settlement(norm=runner.measure())
        elif self.read_every_n_steps > 1:
            return self._step_on_device(runner, optimizer)
        else:
            settlement = self.settle(self.group, runner, self.steps_done)
        scaler_state = None if runner.scaler is None or settlement.steps else ScalerState(runner.scaler)
        if settlement.steps:
            self._clip(runner, settlement)
            if runner.scaler is None:
                optimizer.step()
            else:
                runner.scaler.step(optimizer)
                runner.scaler.update()
            if self.scheduler is not None and not settlement.scaler_skips:
                self.scheduler.step()
        elif scaler_state is not None:
            scaler_state.restore()
        runner.clear() if runner.scaler is None else optimizer.zero_grad()
        self.steps_done += 1
        if settlement.halt is not None:
            raise NonFiniteError(settlement.halt)
        return settlement

    def _clip(self, runner: Runner, settlement: Settlement) -> None:
        bounds = [bound for bound in (self.max_grad_norm, settlement.clip_to) if bound is not None]
        if bounds and settlement.norm is not None:
            torch.nn.utils.clip_grads_with_norm_(runner.parameters, min(bounds), settlement.norm)

    def _step_on_device(self, runner: LoopRunner, optimizer: torch.optim.Optimizer) -> Settlement:
        norm = runner.measure()
        bad = ~torch.isfinite(local(norm))
        self._clip(runner, Settlement(norm=norm))
        step_unless(optimizer, bad)
        if self.scheduler is not None:
            self.scheduler.step()
        runner.clear()
        self._skipped_on_device = bad.long() if self._skipped_on_device is None else self._skipped_on_device + bad
        self.steps_done += 1
        self.counter.count_microbatches(len(self.group.micro_batches) * self.ranks.size, 0)
        if self.steps_done % self.read_every_n_steps == 0:
            [skipped] = read_host([self._skipped_on_device])
            self._skipped_on_device = None
            if skipped:
                self.counter.skipped_steps += int(skipped)
                message = f"{int(skipped)} of the last {self.read_every_n_steps} steps had a non-finite gradient norm"
                self._emit(Event(self.steps_done - 1, Signal.GRAD_NONFINITE, Action.SKIPPED, message, rank=self.ranks.rank))
        return Settlement(norm=norm)

    def hold(
        self, payload: Any, device_type: str = "cpu", findings: tuple[Finding, ...] = (), rows: list[int] | None = None
    ) -> MicroBatch:
        """Holds a micro-batch of the current group by reference, with the random state right before its forward."""
        micro = MicroBatch(len(self.group.micro_batches), payload, RngState.capture(device_type), findings, rows)
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

    # ---- one step ----

    def settle(self, group: Group, runner: Runner, step: int, norm: Tensor | None = None, zero_is_news: bool = True) -> Settlement:
        """Decides a step and carries the decision out, up to but not including clip and optimizer.

        Args:
            group (`Group`):
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
        measured = norm is None
        norm_dev = runner.measure() if norm is None else same_on_all_ranks(norm)
        reading = [*group.losses, *(largest for _, largest, _ in group.watched), local(norm_dev)]
        *values, norm_host = read_host(reading)
        losses, watched = values[: len(group.losses)], values[len(group.losses) :]
        decision = decide(losses, norm_host, self.policy, self.norms)
        self._report_watched(group, watched, step)
        if decision.signal is None:
            self._note_healthy(group, losses, norm_host, step, zero_is_news)
            self._report_findings(group, step)
            return Settlement(norm=norm_dev)
        if decision.course is Course.STEP:
            return self._observe(group, runner, decision, losses, norm_host, norm_dev, step)
        if math.isfinite(norm_host):
            return self._contain_spike(group, runner, decision, norm_host, norm_dev, step)
        return self._contain(group, runner, decision, losses, norm_host, norm_dev, step, measured)

    def _note_healthy(self, group: Group, losses: list[float], norm: float, step: int, zero_is_news: bool) -> None:
        self.ladder.healthy()
        self.norms.add(norm)
        self.counter.grad_norm_max = max(self.counter.grad_norm_max, norm)
        self.counter.count_microbatches(len(group.micro_batches) * self.ranks.size, 0)
        zero = zero_is_news and norm == 0.0 and bool(losses) and not any(losses)
        if zero and not self.zero_before:
            message = f"loss and gradient are exactly zero at step {step}: this batch teaches nothing"
            self._emit(Event(step, Signal.LOSS_ZERO, Action.OBSERVED, message, rank=self.ranks.rank, values={"loss": 0.0, "grad_norm": 0.0}))
        self.zero_before = zero

    def _report_watched(self, group: Group, watched: list[float], step: int) -> None:
        for (name, _, bound), largest in zip(group.watched, watched, strict=True):
            if math.isfinite(largest) and (bound is None or largest <= bound):
                continue
            what = f"exceeds its bound of {bound}" if math.isfinite(largest) else "is not finite"
            message = f"{name} {what} at step {step} (largest magnitude {largest})"
            culprit = Culprit(phase="forward", term=name)
            self._emit(
                Event(step, Signal.PREDICTION_NONFINITE, Action.OBSERVED, message, rank=self.ranks.rank,
                      values={"largest": largest, "bound": bound}, culprit=culprit)
            )

    def _report_findings(self, group: Group, step: int) -> None:
        for micro in group.micro_batches:
            for finding in micro.findings:
                action = Action.REPAIRED if finding.verdict == "repair" else Action.OBSERVED
                bad = self._bad_from_finding(micro, finding, step)
                self._emit(self._event(bad, action, step))

    def _observe(
        self, group: Group, runner: Runner, decision: Decision, losses: list[float], norm: float, norm_dev: Tensor, step: int
    ) -> Settlement:
        """Says what is wrong and lets the step go on: `observe` mode, a rank-local loss, a spike."""
        assert decision.signal is not None
        values: dict[str, Any] = {"loss": losses[-1] if losses else None, "grad_norm": norm}
        micro = None
        if decision.signal is Signal.GRAD_SPIKE:
            message = f"gradient norm {norm:.4g} at step {step} is out of line (threshold {self.norms.threshold():.4g})"
            culprit = Culprit(phase="backward")
        elif math.isfinite(norm):
            micro = next(m for m, loss in zip(group.micro_batches, losses, strict=True) if not math.isfinite(loss))
            values["loss"] = losses[micro.index]
            message = f"loss is {losses[micro.index]} at step {step}, its gradients are finite"
            culprit = Culprit(phase="loss", rows=micro.rows)
        else:
            census = take_census(runner.named_gradients())
            self.counter.count_gradients(census.bad)
            values |= census.as_values()
            message = f"{describe(census)} at step {step}"
            culprit = Culprit(phase="backward", parameter=census.suspect)
        self._report_findings(group, step)
        self._emit(
            Event(step, decision.signal, Action.OBSERVED, message, micro.index if micro else None, self.ranks.rank, values, culprit)
        )
        self.counter.count_microbatches(len(group.micro_batches) * self.ranks.size, 0)
        self.norms.add(min(norm, self.norms.threshold() or norm))
        if math.isfinite(norm):
            self.ladder.healthy()
            self.counter.grad_norm_max = max(self.counter.grad_norm_max, norm)
        kept = [micro.loss for micro, loss in zip(group.micro_batches, losses, strict=True) if math.isfinite(loss) and micro.loss is not None]
        redone = kept if self.policy.acts and len(kept) < len(losses) else None
        return Settlement(norm=norm_dev, redone=redone, num_dropped=0)

    def _contain_spike(
        self, group: Group, runner: Runner, decision: Decision, norm: float, norm_dev: Tensor, step: int
    ) -> Settlement:
        """A finite norm that is too large, by the fixed threshold or by the statistics. The same on every rank."""
        assert decision.signal is not None
        threshold = self.policy.skip_grad_norm if self.policy.skip_grad_norm is not None and norm > self.policy.skip_grad_norm else self.norms.threshold()
        values = {"grad_norm": norm, "threshold": threshold}
        message = f"gradient norm {norm:.4g} at step {step} is above {threshold:.4g}"
        clipped = decision.course is Course.CLIP
        action = Action.CLIPPED if clipped else Action.SKIPPED
        if self.ranks.rank == 0:
            self._emit(Event(step, decision.signal, action, message, values=values, culprit=Culprit(phase="backward")))
        self.counter.grad_norm_max = max(self.counter.grad_norm_max, norm)
        if clipped:
            self.counter.count_microbatches(len(group.micro_batches) * self.ranks.size, 0)
            return Settlement(norm=norm_dev, clip_to=threshold)
        return self._skip(group, runner, step, decision.signal, message)

    # ---- containment: the norm is not finite, so every rank is here at once ----

    def _contain(
        self, group: Group, runner: Runner, decision: Decision, losses: list[float], norm: float, norm_dev: Tensor, step: int, measured: bool
    ) -> Settlement:
        names = [name for name, _ in runner.named_gradients()]
        facts = self.ranks.gather(
            {
                "bad": find_nonfinite(runner.named_gradients()),
                "losses_finite": all(map(math.isfinite, losses)),
                "must_go": sum(micro.must_go for micro in group.micro_batches),
                "halt": [f.message for m in group.micro_batches for f in m.findings if f.verdict == "halt"],
                "why_not": runner.why_not(group),
            }
        )
        census = judge(names, {name: kind for fact in facts for name, kind in fact["bad"].items()})
        told = any(fact["must_go"] for fact in facts)
        nobody = all(fact["losses_finite"] for fact in facts)
        if runner.scaler is not None and not told and nobody:
            return self._leave_to_scaler(group, runner, norm_dev, step)
        self.counter.count_gradients(census.bad)
        why_not = next((fact["why_not"] for fact in facts if fact["why_not"]), None)
        halts = [message for fact in facts for message in fact["halt"]]
        if halts:
            return self._halt_on_input(group, runner, step, halts[0])
        if measured and not told:
            logger.warning(format_incident(step, norm, census, self.counter.num_nan, self.counter.num_inf))
        overflow = measured and not census.bad
        if overflow or (why_not is not None and decision.course is Course.REDO):
            return self._skip_whole(group, runner, decision, losses, norm, census, step, overflow, why_not, nobody)
        if decision.course is Course.REDO or told:
            return self._redo(group, runner, losses, norm, census, step)
        if decision.course is Course.REPAIR and nobody:  # a non-finite loss leaves nothing in its gradients to keep
            return self._repair(group, runner, losses, norm, census, step)
        return self._skip_whole(group, runner, decision, losses, norm, census, step, overflow, None, nobody)

    def _leave_to_scaler(self, group: Group, runner: Runner, norm_dev: Tensor, step: int) -> Settlement:
        """A finite loss under a GradScaler: the scale was too large. The scaler skips by itself; that is its job."""
        self.counter.scaler_skips += 1
        self.counter.count_microbatches(len(group.micro_batches) * self.ranks.size, 0)
        scale = runner.scaler.get_scale()
        if scale <= 1.0 and self.ranks.rank == 0:
            message = f"gradients overflow at step {step} although the loss scale has fallen to {scale:g}: the fault is not the scale"
            self._emit(Event(step, Signal.GRAD_NONFINITE, Action.OBSERVED, message, values={"loss_scale": scale}))
        return Settlement(norm=norm_dev, scaler_skips=True)

    def _halt_on_input(self, group: Group, runner: Runner, step: int, message: str) -> Settlement:
        bads = [self._bad_from_finding(m, f, step) for m in group.micro_batches for f in m.findings if f.verdict == "halt"]
        self._share_events([self._event(bad, Action.HALTED, step) for bad in bads])
        settlement = self._skip(group, runner, step, None, message)
        settlement.halt = f"Training was halted at step {step}: {message}."
        return settlement

    def _skip_whole(
        self, group: Group, runner: Runner, decision: Decision, losses: list[float], norm: float, census: Census, step: int, overflow: bool, why_not: str | None, nobody: bool
    ) -> Settlement:
        """Skips the step as one, because the policy says so or because nobody in it is to blame."""
        assert decision.signal is not None
        halting = decision.course is Course.HALT
        signal, cause, phase = decision.signal, None, "backward"
        if overflow:
            signal, cause = Signal.GRAD_NONFINITE, Cause.NORM_OVERFLOW
            message = f"the gradient norm is {norm} at step {step} though every gradient is finite"
        else:
            message = f"{self._describe_loss(losses) or describe(census)} at step {step}"
            phase = "backward" if census.suspect else "loss"
        if why_not is not None:
            message += f"; the whole group was skipped because {why_not}"
        first = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
        rows = group.micro_batches[first].rows if first is not None and first < len(group.micro_batches) else None
        bad_loss = losses[first] if first is not None else (losses[-1] if losses else None)
        event = Event(
            step, signal, Action.HALTED if halting else Action.SKIPPED, message, first, self.ranks.rank,
            {"loss": bad_loss, "grad_norm": norm, **census.as_values()},
            Culprit(phase=phase, parameter=census.suspect, rows=rows), cause,
        )  # fmt: skip
        mine = first is not None or (nobody and self.ranks.rank == 0)
        self._share_events([event] if mine else [])
        settlement = self._skip(group, runner, step, signal, message)
        if halting:
            settlement.halt = f"Training was halted at step {step}: {message}. nanguard_on_nonfinite is 'halt'."
        return settlement

    def _repair(self, group: Group, runner: Runner, losses: list[float], norm: float, census: Census, step: int) -> Settlement:
        """Zeroes the bad entries of the gradients and lets the rest step, unless nothing is left."""
        for _, gradient in runner.named_gradients():
            part = local(gradient)
            part.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        norm_dev = runner.norm()
        [repaired] = read_host([local(norm_dev)])
        works = math.isfinite(repaired) and repaired > 0.0
        message = f"{self._describe_loss(losses) or describe(census)} at step {step}"
        if not works:
            message += "; nothing was left after zeroing the bad entries"
        event = Event(
            step, Signal.GRAD_NONFINITE, Action.REPAIRED if works else Action.SKIPPED, message, None, self.ranks.rank,
            {"loss": losses[-1] if losses else None, "grad_norm": norm, "grad_norm_repaired": repaired, **census.as_values()},
            Culprit(phase="backward", parameter=census.suspect),
        )  # fmt: skip
        self._share_events([event] if self.ranks.rank == 0 else [])
        if not works:
            return self._skip(group, runner, step, Signal.GRAD_NONFINITE, message)
        self.counter.count_microbatches(len(group.micro_batches) * self.ranks.size, 0)
        kept = [m.loss for m, loss in zip(group.micro_batches, losses, strict=True) if math.isfinite(loss) and m.loss is not None]
        settlement = Settlement(norm=norm_dev, redone=kept if len(kept) < len(losses) else None)
        return self._climb(settlement, group, runner, step, Signal.GRAD_NONFINITE, message)

    def _redo(self, group: Group, runner: Runner, losses: list[float], norm: float, census: Census, step: int) -> Settlement:
        """Finds the bad micro-batches, agrees on what is dropped and runs the good ones as if the others never came."""
        self.replaying = True
        try:
            bads = self._find_bad(group, runner, step)
            reports = self.ranks.gather([bad.micro.index for bad in bads])
            if runner.lockstep:
                gone = {index for report in reports for index in report}
            else:
                gone = {bad.micro.index for bad in bads}
            good = [micro for micro in group.micro_batches if micro.index not in gone]
            size = len(group.micro_batches)
            num_good = [len(good) if runner.lockstep else size - len(report) for report in reports]
            num_dropped = size * self.ranks.size - sum(num_good)
            finite, norm_dev, again = False, None, []
            if sum(num_good):
                again = runner.rerun(group, good, runner.regroup(good, num_good))
                norm_dev = runner.measure()
                *new_losses, new_norm = read_host([*again, local(norm_dev)])
                finite = math.isfinite(new_norm)
                again = [kept for kept, value in zip(again, new_losses, strict=True) if math.isfinite(value)]
        finally:
            self.replaying = False
        action = Action.DROPPED if finite else Action.SKIPPED
        lost = f"; that micro-batch was dropped on all {self.ranks.size} ranks, as sharded gradients cannot be told apart" if runner.lockstep and self.ranks.size > 1 else ""
        events = [self._event(bad, action, step, lost) for bad in bads]
        if not any(reports):
            events = self._nobody_to_blame(losses, norm, census, step, finite)
        elif not finite and sum(num_good):
            events += self._nobody_to_blame([], norm, census, step, False)
        self._share_events(events)
        signal = bads[0].signal if bads else Signal.GRAD_NONFINITE
        message = bads[0].message if bads else f"{describe(census)} at step {step}"
        sick = self._check_parameters(group, runner, bads, step)
        if not finite or norm_dev is None:
            settlement = self._skip(group, runner, step, signal, message)
        else:
            self.counter.count_microbatches(size * self.ranks.size, num_dropped)
            self.counter.grad_norm_max = max(self.counter.grad_norm_max, new_norm)
            settlement = Settlement(norm=norm_dev, redone=again, num_dropped=size - len(good))
            settlement = self._climb(settlement, group, runner, step, signal, message) if num_dropped else settlement
        if sick is not None:
            settlement.halt = sick
        return settlement

    def _find_bad(self, group: Group, runner: Runner, step: int) -> list[_Bad]:
        """Runs every micro-batch alone and returns those whose gradients are not finite, and those known to be bad."""
        bads = []
        for micro in group.micro_batches:
            known = [finding for finding in micro.findings if finding.verdict == "drop"]
            if known and not runner.lockstep:
                bads.append(self._bad_from_finding(micro, known[0], step))
                continue
            if known:
                runner.probe(micro, group.share)
                bads.append(self._bad_from_finding(micro, known[0], step))
                continue
            loss_dev = runner.probe(micro, group.share)
            gradients = runner.named_gradients()
            census = take_census(gradients)
            [loss] = read_host([loss_dev])
            if not census.bad:
                continue
            signal = Signal.GRAD_NONFINITE if math.isfinite(loss) else Signal.LOSS_NONFINITE
            where = "loss" if signal is Signal.LOSS_NONFINITE else "backward"
            told = self._describe_loss([loss]) or describe(census)
            bads.append(
                _Bad(
                    micro, signal, f"{told} in micro-batch {micro.index} of step {step}",
                    {"loss": loss, **census.as_values()},
                    Culprit(phase=where, parameter=census.suspect, rows=micro.rows),
                )
            )  # fmt: skip
        return bads

    def _check_parameters(self, group: Group, runner: Runner, bads: list[_Bad], step: int) -> str | None:
        """If every micro-batch of the step was bad on some rank, the weights may be to blame: then going on is useless."""
        mine = len(bads) == len(group.micro_batches) and not any(bad.micro.must_go for bad in bads)
        bad = find_nonfinite(runner.named_parameters()) if mine else {}
        found = {name: kind for report in self.ranks.gather(bad) for name, kind in report.items()}
        if not found:
            return None
        name = next(iter(found))
        message = f"parameter {name} holds {'NaN' if found[name] == 'nan' else 'inf'} at step {step} ({len(found)} parameters are bad)"
        event = Event(
            step, Signal.PARAM_NONFINITE, Action.HALTED, message, None, self.ranks.rank,
            {"bad_parameters": dict(list(found.items())[:12])}, Culprit(phase="parameter", parameter=name), Cause.PARAM_NONFINITE,
        )  # fmt: skip
        self._share_events([event] if self.ranks.rank == 0 else [])
        return f"Training was halted at step {step}: {message}. No batch can fix that: go back to an earlier checkpoint."

    def _nobody_to_blame(self, losses: list[float], norm: float, census: Census, step: int, finite: bool) -> list[Event]:
        if self.ranks.rank != 0:
            return []
        if finite:
            message = f"{describe(census)} at step {step}, but not when the step was run again: suspect hardware or non-determinism"
            cause, action = Cause.TRANSIENT, Action.REPAIRED
        else:
            message = f"{describe(census)} at step {step}; no single micro-batch is to blame, only their sum"
            cause, action = None, Action.SKIPPED
        values = {"loss": losses[-1] if losses else None, "grad_norm": norm, **census.as_values()}
        culprit = Culprit(phase="backward", parameter=census.suspect)
        return [Event(step, Signal.GRAD_NONFINITE, action, message, None, self.ranks.rank, values, culprit, cause)]

    def _skip(self, group: Group, runner: Runner, step: int, signal: Signal | None, message: str) -> Settlement:
        """Leaves parameters, optimizer, schedule, buffers and random state as they were before the group."""
        runner.clear()
        runner.buffers.restore()
        if group.micro_batches:
            group.micro_batches[0].rng.restore()
        self.counter.skipped_steps += 1
        size = len(group.micro_batches)
        self.counter.count_microbatches(size * self.ranks.size, size * self.ranks.size)
        settlement = Settlement(steps=False, redone=[], num_dropped=size)
        return self._climb(settlement, group, runner, step, signal, message) if signal is not None else settlement

    def _climb(
        self, settlement: Settlement, group: Group, runner: Runner, step: int, signal: Signal, message: str
    ) -> Settlement:
        """Counts a bad step; too many in a row and the run has to end."""
        if not self.ladder.bad():
            return settlement
        why = f"{self.ladder.bad_in_a_row} bad steps in a row (the last: {message})"
        if self.ranks.rank == 0:
            self._emit(Event(step, signal, Action.HALTED, f"halted after {why}", values={"bad_steps_in_a_row": self.ladder.bad_in_a_row}))
        settlement.halt = (
            f"Training was halted at step {step} after {why}. The weights are those of the last good step. Look at the "
            "events for what the bad steps have in common, or raise nanguard_max_bad_steps."
        )
        return settlement

    # ---- events ----

    def _describe_loss(self, losses: list[float]) -> str | None:
        bad = next((loss for loss in losses if not math.isfinite(loss)), None)
        return None if bad is None else f"loss is {bad}"

    def _bad_from_finding(self, micro: MicroBatch, finding: Finding, step: int) -> _Bad:
        rows = None if micro.rows is None else [micro.rows[s] for s in finding.samples if s < len(micro.rows)]
        culprit = Culprit(
            phase=finding.phase,
            samples=list(finding.samples) or None,
            rows=rows if finding.samples else micro.rows,
            tokens=[list(token) for token in finding.tokens] or None,
        )
        where = f" (dataset rows {', '.join(map(str, culprit.rows[:8]))})" if culprit.rows else ""
        message = f"{finding.message}{where} in micro-batch {micro.index} of step {step}"
        return _Bad(micro, finding.signal, message, {}, culprit, finding.cause)

    def _event(self, bad: _Bad, action: Action, step: int, note: str = "") -> Event:
        return Event(
            step, bad.signal, action, bad.message + note, bad.micro.index, self.ranks.rank, bad.values, bad.culprit, bad.cause
        )

    def _share_events(self, events: list[Event]) -> None:
        """Writes this rank's events and, on rank 0, those of all others: every decision, whichever rank caused it."""
        shared = self.ranks.gather([event.as_dict() for event in events])
        for rank, dicts in enumerate(shared):
            if rank == self.ranks.rank or self.ranks.rank == 0:
                for event in dicts:
                    self._write(event)

    def _emit(self, event: Event) -> None:
        self._write(event.as_dict())

    def emit(self, event: Event) -> None:
        """Writes an event that the loop itself has seen."""
        self._emit(event)

    def _write(self, event: dict[str, Any]) -> None:
        signal = Signal(event["signal"])
        if self.on_event is not None:
            self.on_event(event)
        first = signal not in self.told or event["action"] == Action.HALTED
        self.told.add(signal)
        logger.log(logging.WARNING if first else logging.INFO, "[%s] %s: %s", signal, event["action"], event["message"])

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Returns what survives a checkpoint: counts, statistics and the place on the ladder."""
        return {
            "schema": 1,
            "counter": self.counter.state_dict(),
            "norms": self.norms.state_dict(),
            "bad_in_a_row": self.ladder.bad_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what [`Guard.state_dict`] returned."""
        self.counter.load_state_dict(state["counter"])
        self.norms.load_state_dict(state["norms"])
        self.ladder.bad_in_a_row = int(state["bad_in_a_row"])
