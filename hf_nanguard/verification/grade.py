"""What a short run of somebody's configuration showed, and the verdict on it: best, acceptable or failed."""

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from ..core.event import strict

BEST, ACCEPTABLE, FAILED = "best", "acceptable", "failed"
UNKNOWN, SHOWN = "not measured", "measured"  # neither counts
BEST_RATE, ACCEPTABLE_RATE = 0.90, 0.85
HARDLY = 0.02  # a validation loss that rose by less, relatively, has hardly moved
ROUNDING = 1.01  # clipped gradients of bfloat16 do not hit the norm exactly


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: its name, its verdict and the figures in a sentence."""

    name: str
    verdict: str
    text: str


@dataclass
class Verification:
    """Everything that was measured.

    Args:
        num_steps (`int`), num_done (`int`):
            Optimizer steps that were asked for, and that were gone through.
        error (`str`, *optional*):
            What ended the run early, in one line.
        num_forwards (`int`), num_bad_forwards (`int`):
            Forwards whose logits (or log-probabilities, where a trainer makes no logits) were looked at, and how many of
            them held a NaN or +inf; -inf is a mask.
        num_bad_steps (`int`), num_nan_gradients (`int`), num_inf_gradients (`int`):
            Steps with bad gradients, and how many gradient tensors that were.
        norms (`list[float]`), norms_after (`list[float]`):
            Of the gradients of each step that was taken, before and after clipping.
        max_grad_norm (`float`):
            What is clipped to; 0 if nothing is.
        num_seen (`int`), num_used (`int`):
            Micro-batches that came, and that were learned from.
        bad_weights (`dict[str, str]`):
            Weight tensors with a NaN or inf at the end, by name.
        measure (`str`):
            What was measured on held-out data: `"loss"`, or `"reward"` of a trainer that samples.
        before (`float`, *optional*), after (`float`, *optional*):
            That measure at the start and at the end.
        memory (`int`, *optional*), memory_kind (`str`):
            The peak in bytes, and of what.
        memory_limit (`int`, *optional*):
            What the peak must not exceed, in bytes.
        events (`list[dict]`):
            What the guard told.
        output_dir (`str`):
            Where the run was put.
    """

    num_steps: int
    num_done: int = 0
    error: str | None = None
    num_forwards: int = 0
    num_bad_forwards: int = 0
    num_bad_steps: int = 0
    num_nan_gradients: int = 0
    num_inf_gradients: int = 0
    norms: list[float] = field(default_factory=list)
    norms_after: list[float] = field(default_factory=list)
    max_grad_norm: float = 0.0
    num_seen: int = 0
    num_used: int = 0
    bad_weights: dict[str, str] = field(default_factory=dict)
    measure: str = "loss"
    before: float | None = None
    after: float | None = None
    memory: int | None = None
    memory_kind: str = ""
    memory_limit: int | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    output_dir: str = ""

    @property
    def success_rate(self) -> float:
        """The share of micro-batches that were learned from."""
        return self.num_used / self.num_seen if self.num_seen else 0.0

    @property
    def checks(self) -> list[Check]:
        """All checks, in the order in which they are shown."""
        return [check(self) for check in CHECKS]

    @property
    def verdict(self) -> str:
        """The worst of all checks; what could not be measured, or is only shown, does not count."""
        found = {check.verdict for check in self.checks}
        return next(verdict for verdict in (FAILED, ACCEPTABLE, BEST) if verdict in found)

    @property
    def reasons(self) -> list[str]:
        """What keeps the verdict from being better."""
        return [f"{check.name}: {check.text}" for check in self.checks if check.verdict in (FAILED, ACCEPTABLE)]

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as strict JSON has it."""
        return strict(
            {
                "verdict": self.verdict,
                "reasons": self.reasons,
                "checks": [asdict(check) for check in self.checks],
                **asdict(self),
                "success_rate": self.success_rate,
            }
        )


def check_completion(found: Verification) -> Check:
    """Did it come to its end, with weights that can be used?"""
    text = f"{found.num_done} of {found.num_steps} steps"
    if found.bad_weights:
        text += (
            f", but {len(found.bad_weights)} weight tensors are not finite, the first {next(iter(found.bad_weights))}"
        )
    elif found.error is not None:
        text += f", then {found.error}"
    sound = found.error is None and not found.bad_weights and found.num_done >= found.num_steps
    return Check("completion", BEST if sound else FAILED, text)


def check_logits(found: Verification) -> Check:
    """NaN or +inf in the logits; what the guard has dealt with is acceptable."""
    if not found.num_forwards:
        return Check("logits", UNKNOWN, "the model's output holds neither logits nor log-probabilities")
    text = f"NaN or inf in {found.num_bad_forwards} of {found.num_forwards} forwards"
    return Check("logits", ACCEPTABLE if found.num_bad_forwards else BEST, text)


def check_gradients(found: Verification) -> Check:
    """NaN or inf in the gradients, likewise."""
    text = (
        f"NaN in {found.num_nan_gradients} tensors, inf in {found.num_inf_gradients}, at {found.num_bad_steps} of "
        f"{found.num_done} steps"
    )
    return Check("gradients", ACCEPTABLE if found.num_bad_steps else BEST, text)


def check_norms(found: Verification) -> Check:
    """What the norms were."""
    if not found.norms:
        return Check("gradient norms", UNKNOWN, "no step was taken")
    text = f"min {min(found.norms):.4g}, mean {fmean(found.norms):.4g}, max {max(found.norms):.4g} before clipping"
    return Check("gradient norms", SHOWN, text)


def check_clipping(found: Verification) -> Check:
    """Every norm above the bound must have come down to it."""
    bound = found.max_grad_norm
    if not bound:
        return Check("clipping", UNKNOWN, "off (max_grad_norm is 0)")
    above = [after for norm, after in zip(found.norms, found.norms_after, strict=True) if norm > bound]
    if not above:
        return Check("clipping", UNKNOWN, f"had nothing to do: no norm was above max_grad_norm {bound:g}")
    num_held = sum(after <= bound * ROUNDING for after in above)
    text = f"{num_held} of {len(above)} norms above max_grad_norm {bound:g} came down to it"
    return Check("clipping", BEST if num_held == len(above) else FAILED, text)


def check_success(found: Verification) -> Check:
    """The share of micro-batches that were learned from."""
    rate = found.success_rate
    verdict = BEST if rate > BEST_RATE else ACCEPTABLE if rate > ACCEPTABLE_RATE else FAILED
    return Check("success rate", verdict, f"{rate:.1%}: {found.num_used} of {found.num_seen} micro-batches were used")


def check_learning(found: Verification) -> Check:
    """A held-out loss must fall. A reward of a few samples is too noisy for more than a remark."""
    name, before, after = f"held-out {found.measure}", found.before, found.after
    if before is None or after is None:
        return Check(name, UNKNOWN, "there was no held-out data, or the run ended before it was measured again")
    text = f"{before:.4g} at the start, {after:.4g} at the end"
    if not (math.isfinite(before) and math.isfinite(after)):
        return Check(name, FAILED, text)
    if found.measure == "reward":
        return Check(name, BEST if after >= before else ACCEPTABLE, text)
    verdict = BEST if after < before else ACCEPTABLE if after <= before + HARDLY * abs(before) else FAILED
    return Check(name, verdict, text)


def check_memory(found: Verification) -> Check:
    """How much memory it took, and whether that is within the limit, if there is one."""
    if found.memory is None:
        return Check("memory peak", UNKNOWN, "this system does not tell")
    text = f"{found.memory / 2**20:,.0f} MiB of {found.memory_kind}"
    if found.memory_limit is None:
        return Check("memory peak", SHOWN, text)
    text += f", the limit is {found.memory_limit / 2**20:,.0f} MiB"
    return Check("memory peak", BEST if found.memory <= found.memory_limit else FAILED, text)


def check_events(found: Verification) -> Check:
    """What the guard told; what matters of it is in the other checks."""
    counts = Counter(f"{event['signal']} {event['action']}" for event in found.events)
    return Check("events", SHOWN, ", ".join(f"{number} {kind}" for kind, number in counts.items()) or "none")


CHECKS = (
    check_completion, check_logits, check_gradients, check_norms, check_clipping, check_success, check_learning,
    check_memory, check_events,
)  # fmt: skip
