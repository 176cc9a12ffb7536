"""Monitors the outputs of modules and forecasts when their dtype will overflow.

`module_outputs.py` says what is measured. All of it stays on the device until the backward is over; then it is combined,
reduced over ranks in one message, and read once. An -inf counts as bad in the output of a block. Elsewhere it is taken for a
mask, unless a module that ran later is bad too.
"""

import logging
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import ClassVar

from ...plain_text import quote_error
from ..event import Culprit, Event, JsonObject, JsonValue
from ..vocabulary import Action, Signal
from .base import Monitor
from .module_choice import find_blocks, matches, pick_modules, split_patterns
from .module_outputs import NEAR_BITS, Activation, Head, OutputProbe, read_table, tabulate
from .overflow_forecast import Forecast, Headroom

logger = logging.getLogger("hf_nanguard")


@dataclass(eq=False)
class ActivationMonitor(Monitor):
    """Measures the outputs of modules every N steps and reports those that are non-finite or about to overflow.

    It makes one host read per check, in `end_backward`, so that a step that is skipped afterwards is checked as well. While a
    module may be in danger it checks more often than every `every_n_steps` steps, on all ranks alike.
    """

    hooks_forward: ClassVar[bool] = True

    _: KW_ONLY
    patterns: str | Sequence[str] | None = None  # which modules, as `pick_modules` takes them
    head: Head | None = None  # a head that the loss may use without calling it
    compiled: bool = False  # nothing but compiled graphs runs, which ignore hooks: the monitor says so and turns off
    headroom: Headroom = field(default_factory=Headroom, init=False)
    seen: dict[str, Activation] = field(default_factory=dict, init=False)
    bits: dict[str, float] = field(default_factory=dict, init=False)
    next_check: int | None = field(default=None, init=False)
    num_empty: int = field(default=0, init=False)  # checks in a row in which no module ran
    is_bad: bool = field(default=False, init=False)
    failed: set[str] = field(default_factory=set, init=False)  # modules whose outputs cannot be measured
    probe: OutputProbe | None = field(default=None, init=False)
    has_told_head: bool = field(default=False, init=False)  # that it cannot be measured

    def __post_init__(self) -> None:
        self.modules = pick_modules(self.model, self.patterns)
        self.unseen = split_patterns(self.patterns)  # patterns none of whose modules has run yet
        self.blocks = set(find_blocks(self.model))

    def is_due(self, step: int) -> bool:
        """Returns whether this step is checked; the same on every rank."""
        is_early = self.next_check is not None and step >= self.next_check
        return super().is_due(step) or (is_early and not self.is_off and self.every_n_steps > 0)

    def begin_step(self, step: int) -> None:
        """Adds hooks to the modules if a check is due."""
        self.close()
        if not self.is_due(step):
            return
        if not self.modules and next(self.model.children(), None) is None:
            self.is_off = True  # a single module: the loss shows its output
        elif self.compiled:
            self._turn_off(step, "the model runs under torch.compile, which ignores hooks on its modules")
        elif not self.modules:
            self._turn_off(step, "the model has no blocks, embeddings, projections or heads that are modules")
        else:
            near = {name for name, bits in self.bits.items() if bits < NEAR_BITS + 1}
            modules = {name: module for name, module in self.modules.items() if name not in self.failed}
            self.probe = OutputProbe(self.model, modules, near, self.journal.boundary, self.hooks, self.head)

    def end_backward(self, step: int) -> None:
        """Removes the hooks, reads what they measured, and reports what is bad or about to be."""
        probe = self.probe
        if probe is None:
            return
        self.close()
        if not probe.measure_head() and not self.has_told_head:
            self.has_told_head = True
            logger.info("hf_nanguard: the head is not monitored: its weight is sharded and its forward is not called.")
        self._emit_failures(step, probe.failures)
        measures = probe.measures
        device = measures[0].lowest.device if measures and self.ranks.size == 1 else self.ranks.device
        table = tabulate(measures, self.modules, device)
        self.reduce_max(table)
        self.seen = read_table(table, self.modules)
        self.num_empty = 0 if self.seen else self.num_empty + 1
        if self.seen:
            self._emit_unseen(step)
        if self.num_empty > 1:  # once may be a step whose batches were all dropped
            named = f" ({', '.join(self.unseen)})" if self.unseen else ""
            self._turn_off(step, f"none of the monitored modules{named} ran in a training forward")
        self._emit_nonfinite(step, list(probe.order))
        self._emit_headroom(step)
        self._record_metrics()

    def fail_exchange(self, stage: str, step: int) -> None:
        """Makes the other ranks read, in the message they exchange now, that this rank has failed."""
        if stage == "end_backward" and self.is_due(step):
            self.reduce_max(tabulate([], self.modules, self.ranks.device, has_failed=True))

    def close(self) -> None:
        """Removes the hooks and discards what they measured."""
        super().close()
        self.probe = None

    def state_dict(self) -> JsonObject:
        """Returns the samples of the forecast and the next additional check, as JSON values."""
        return {"headroom": self.headroom.state_dict(), "next_check": self.next_check}

    def load_state_dict(self, state: JsonObject) -> None:
        """Restores what [`ActivationMonitor.state_dict`] returned; modules that are not monitored are left out."""
        self.headroom.load_state_dict({n: trend for n, trend in state["headroom"].items() if n in self.modules})
        self.next_check = state["next_check"]

    def _record_metrics(self) -> None:
        self.metrics()  # only the newest check counts
        finite = {name: seen for name, seen in self.seen.items() if seen.is_finite}
        curves = {
            "headroom_bits": self.bits,
            "activation_max": {name: seen.largest for name, seen in finite.items()},
            "activation_rms": {name: min(seen.rms, seen.largest) for name, seen in finite.items()},
            "activation_zeros": {name: seen.zeros for name, seen in finite.items()},
            "activation_near_limit": {
                name: share for name, seen in finite.items() if (share := _share_near_limit(seen)) is not None
            },
        }
        for noun, curve in curves.items():
            if curve:
                self.record(noun, (min if noun == "headroom_bits" else max)(curve.values()), curve)

    def _turn_off(self, step: int, reason: str) -> None:
        self.turn_off(step, f"Activations are not monitored: {reason}.")

    def _emit_unseen(self, step: int) -> None:
        """Reports, at the first check in which modules ran, the patterns none of whose modules did."""
        unseen, self.unseen = self.unseen, []
        for pattern in unseen:
            if not any(matches(name, pattern) for name in self.seen):
                exists = any(matches(name, pattern) for name in self.modules)
                why = "its modules did not run: the loss may use their weights without calling them"
                self.emit(
                    step,
                    Signal.GUARD_FAILED,
                    f"The module pattern {pattern!r} is not monitored because {why if exists else 'it matches no module'}.",
                )

    def _emit_failures(self, step: int, failures: dict[str, Exception]) -> None:
        """Reports modules that cannot be measured, on the rank where that is so, and leaves them out from here on."""
        for name, error in failures.items():
            message = f"The output of {name} is not monitored because it could not be measured ({quote_error(error)})."
            self.journal.write(Event(step, Signal.GUARD_FAILED, Action.OBSERVED, message))
        self.failed |= failures.keys()

    def _emit_nonfinite(self, step: int, order: list[str]) -> None:
        """Reports the first module, in the order of the forward, whose output became non-finite."""
        ran = [name for name in order if name in self.seen]
        ran += [name for name in self.seen if name not in ran]  # these ran on other ranks only
        bad: list[str] = []
        for name in reversed(ran):
            seen = self.seen[name]
            if not seen.is_finite and (bad or name in self.blocks or not seen.is_masked):
                bad.insert(0, name)
        if bad and not self.is_bad:
            name, first = bad[0], self.seen[bad[0]]
            kind = "NaN" if first.has_nan else "inf"
            values: dict[str, JsonValue] = {"kind": kind.lower(), "num_modules": len(bad), "dtype": first.dtype}
            if name in self.bits:
                values["last_bits"] = self.bits[name]
            message = f"The output of {name} contains {kind} at step {step}."
            cause = None if first.has_nan else first.overflow_cause
            self.emit(step, Signal.ACTIVATION_NONFINITE, message, values, Culprit("forward", name), cause)
        self.is_bad = bool(bad)

    def _emit_headroom(self, step: int) -> None:
        """Adds samples to the forecast and reports a module whose dtype is about to overflow."""
        self.bits = {
            name: self.headroom.add(step, name, seen.largest, seen.limit)
            for name, seen in self.seen.items()
            if seen.is_finite and seen.largest > 0 and not seen.is_masked
        }
        forecast = self.headroom.find_danger(list(self.bits))
        self.next_check = self.headroom.next_check(self.every_n_steps, list(self.bits))
        if forecast is None:
            return
        seen = self.seen[forecast.module]
        message = _format_forecast(forecast, seen.dtype)
        values = {**asdict(forecast), "dtype": seen.dtype}
        culprit = Culprit("forward", values.pop("module"))
        self.emit(step, Signal.ACTIVATION_HEADROOM, message, values, culprit, seen.overflow_cause)


def _share_near_limit(seen: Activation) -> float | None:
    return 0.0 if seen.largest < seen.limit * 2.0**-NEAR_BITS else seen.near_limit


def _format_forecast(forecast: Forecast, dtype: str) -> str:
    if forecast.overflow_step is None:
        return f"{forecast.module} has {forecast.bits:.1f} bits left before {dtype} overflows."
    return (
        f"{forecast.module} loses {-forecast.bits_per_100_steps:.2g} bits per 100 steps and has {forecast.bits:.1f} left: "
        f"{dtype} will overflow near step {forecast.overflow_step:,}."
    )
