"""Monitors attention, routers and the head of a transformers model every N steps, on a small sample.

Growing attention scores are reported as `entropy_collapse`, because they make the softmax one-hot. A growing log-sum-exp is
reported as `activation_headroom`: a shift of the logits does not change their softmax, but their dtype may overflow.
"""

import logging
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...core.event import Culprit, JsonValue
from ...core.monitors.base import Monitor
from ...core.monitors.softmax_collapse import RULES, CollapseDetector, Finding
from ...core.vocabulary import Signal
from .attention_probe import AttentionProbe, Measured

logger = logging.getLogger("hf_nanguard")

WORST = {
    "attention_score": max,
    "attention_entropy": min,
    "router_entropy": min,
    "router_load": max,
    "logsumexp": max,
}
MESSAGES = {
    "attention_entropy": "The attention of {module} has become one-hot: its relative entropy fell from {first:.3g} to {value:.3g}",
    "attention_score": "The attention scores of {module} grew from {first:.4g} to {value:.4g}; the softmax of such scores is one-hot",
    "router_balance": "Router {module} sends nearly all tokens to the same experts: its balance fell from {first:.3g} to {value:.3g}",
    "logsumexp": "The log-sum-exp of the logits of {module} grew from {first:.4g} to {value:.4g}",
}  # fmt: skip
ADVICE = {
    "attention_entropy": "Lower the learning rate, or normalise queries and keys",
    "attention_score": "Lower the learning rate, or normalise queries and keys",
    "router_balance": "Raise the weight of the load balancing loss (router_aux_loss_coef, output_router_logits=True)",
    "logsumexp": "Add a z-loss, or lower the learning rate of the head",
}
NOTHING_MEASURED = (
    "Attention, routers and head are not monitored: compiled models do not run hooks, and models outside of transformers do "
    "not have its attention interface."
)


@dataclass(eq=False)
class AttentionMonitor(Monitor):
    """Reports attention that becomes one-hot, routers that use few experts, and logits that grow without bound.

    A check costs about 60 small operations per layer (views included), one host read and, with several ranks, two reductions:
    by the first, which takes a read of its own, the ranks learn whether one of them has failed.

    | metric | meaning |
    |---|---|
    | `nanguard/attention_score_max` | largest score before the softmax, over layers |
    | `nanguard/attention_entropy_min` | lowest relative entropy of a layer: 1 is uniform, 0 one-hot |
    | `nanguard/router_entropy_min` | lowest relative entropy of a router's distribution for a token |
    | `nanguard/router_load_max` | largest share of tokens whose first choice is the same expert |
    | `nanguard/logsumexp_max` | largest magnitude of the log-sum-exp of the head's logits |
    """

    hooks_forward: ClassVar[bool] = True

    probe: AttentionProbe | None = field(default=None, init=False)
    detectors: dict[str, CollapseDetector] = field(
        default_factory=lambda: {kind: CollapseDetector(rule) for kind, rule in RULES.items()}, init=False
    )
    warned: set[str] = field(default_factory=set, init=False)

    def begin_step(self, step: int) -> None:
        self.close()
        if self.is_due(step):
            self.probe = AttentionProbe(self.model, self.ranks.device, self.journal.boundary, self.hooks)

    def end_backward(self, step: int) -> None:
        self.hooks.close()
        if self.probe is not None:
            self.probe.finish()

    def after_update(self, step: int) -> None:
        """Reads what was measured and reports what collapsed; never a reason to halt."""
        probe = self.probe
        self.close()
        if probe is None:
            return
        self.ranks.agree()
        self.reduce_max(probe.buffer)
        found = probe.read()
        if not any(found.values()):
            self.turn_off(step, NOTHING_MEASURED)
            return
        self._warn_of_gaps(probe, found)
        for noun, choose in WORST.items():
            values = {module: value for module, value in found[noun].items() if math.isfinite(value)}
            if values:
                self.record(f"{noun}_{choose.__name__}", choose(values.values()), values, noun)
        balance = {
            module: min(entropy, 1 - found["router_load"][module])
            for module, entropy in found["router_load_entropy"].items()
        }
        for kind, detector in self.detectors.items():
            finding = detector.observe(balance if kind == "router_balance" else found[kind])
            if finding is not None:
                self._emit_collapse(step, kind, finding, found)

    def fail_exchange(self, stage: str, step: int) -> None:
        if stage == "after_update" and self.is_due(step):
            self.ranks.fail()

    def close(self) -> None:
        super().close()
        self.probe = None

    def state_dict(self) -> dict[str, object]:
        return {kind: detector.state_dict() for kind, detector in self.detectors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for kind, detector in self.detectors.items():
            detector.load_state_dict(state[kind])

    def _emit_collapse(self, step: int, kind: str, finding: Finding, found: Measured) -> None:
        module, others = finding.module, finding.num_modules - 1
        message = MESSAGES[kind].format(module=module, value=finding.value, first=finding.first)
        more = f" ({others} more {'module' if others == 1 else 'modules'} likewise)" if others else ""
        values: dict[str, JsonValue] = {
            "kind": kind,
            "first": finding.first,
            "num_modules": finding.num_modules,
            kind: finding.value,
        }
        values |= {noun: measured[module] for noun, measured in found.items() if module in measured}
        signal = Signal.ACTIVATION_HEADROOM if kind == "logsumexp" else Signal.ENTROPY_COLLAPSE
        self.emit(step, signal, f"{message}{more} at step {step}. {ADVICE[kind]}.", values, Culprit("forward", module))

    def _warn_of_gaps(self, probe: AttentionProbe, found: Measured) -> None:
        """Logs once what cannot be measured in this model."""
        gaps = []
        if probe.hidden:
            names = ", ".join(sorted(probe.hidden))
            gaps.append(
                f"attention with attn_implementation={names!r} is not monitored because its mask is not accessible. Use 'sdpa' or 'eager'."
            )
        elif not found["attention_score"]:
            gaps.append(
                "attention is not monitored: no layer uses the attention interface of transformers, or layers are compiled."
            )
        if probe.sharded_head:
            gaps.append(
                "the log-sum-exp of the head is not monitored: its weight is sharded and its forward is not called."
            )
        for gap in gaps:
            if gap not in self.warned and self.ranks.rank == 0:
                logger.warning("hf_nanguard: %s", gap)
            self.warned.add(gap)
