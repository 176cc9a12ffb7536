"""Measurements of a short run of a configuration, and their verdict: best, acceptable or failed."""

import math
from dataclasses import asdict, dataclass, field
from statistics import fmean

from ..core.event import strict
from ..report.run_files import count_events, format_counts

BEST, ACCEPTABLE, FAILED = "best", "acceptable", "failed"
UNKNOWN, SHOWN = "not measured", "measured"  # these do not count
BEST_RATE, ACCEPTABLE_RATE = 0.90, 0.85
TOLERANCE = 0.02  # a held-out loss that rose by less, relatively, is acceptable
ROUNDING = 1.01  # clipped bfloat16 gradients do not have exactly the norm


@dataclass(frozen=True)
class Check:
    """One check: its name, its verdict and its figures in a sentence."""

    name: str
    verdict: str
    text: str


@dataclass
class Verification:
    """Everything that was measured."""

    num_steps: int  # optimizer steps that were requested
    num_done: int = 0  # and that were completed
    error: str | None = None  # that ended the run early, in one line
    # Forwards whose logits (log-probabilities, if a trainer computes no logits) were checked, and those with NaN or +inf.
    num_forwards: int = 0
    num_bad_forwards: int = 0
    num_bad_steps: int = 0  # with non-finite gradients
    num_nan_gradients: int = 0  # tensors
    num_inf_gradients: int = 0
    norms: list[float] = field(default_factory=list)  # of the gradients of each step that was taken, before clipping
    norms_after: list[float] = field(default_factory=list)  # after clipping
    max_grad_norm: float = 0.0  # 0 for no clipping
    num_seen: int = 0  # micro-batches
    num_used: int = 0  # micro-batches trained on
    bad_weights: dict[str, str] = field(default_factory=dict)  # tensors with NaN or inf at the end, by name
    measure: str = "loss"  # what is measured on held-out data: "loss", or "reward" for an online trainer
    before: float | None = None  # that measure at the start
    after: float | None = None  # and at the end
    memory: int | None = None  # peak in bytes
    memory_kind: str = ""
    memory_limit: int | None = None  # in bytes
    events: list[dict] = field(default_factory=list)  # of the guard
    output_dir: str = ""

    @property
    def success_rate(self) -> float:
        """The share of micro-batches that were trained on."""
        return self.num_used / self.num_seen if self.num_seen else 0.0

    @property
    def checks(self) -> list[Check]:
        """All checks, in the order in which they are printed."""
        return [check(self) for check in CHECKS]

    @property
    def verdict(self) -> str:
        """The worst verdict of all checks; checks that were not or only measured do not count."""
        found = {check.verdict for check in self.checks}
        return next(verdict for verdict in (FAILED, ACCEPTABLE, BEST) if verdict in found)

    @property
    def reasons(self) -> list[str]:
        """The checks that were not best."""
        return [f"{check.name}: {check.text}" for check in self.checks if check.verdict in (FAILED, ACCEPTABLE)]

    def as_dict(self) -> dict[str, object]:
        """Returns everything in types of strict JSON."""
        checks = [asdict(check) for check in self.checks]
        graded = {"verdict": self.verdict, "reasons": self.reasons, "checks": checks}
        return strict({**graded, **asdict(self), "success_rate": self.success_rate})


def check_completion(found: Verification) -> Check:
    """The run must finish with finite weights."""
    text = f"{found.num_done} of {found.num_steps} steps"
    if found.bad_weights:
        text += f", but {len(found.bad_weights)} weight tensors are not finite, first {next(iter(found.bad_weights))}"
    elif found.error is not None:
        text += f", then {found.error}"
    sound = found.error is None and not found.bad_weights and found.num_done >= found.num_steps
    return Check("completion", BEST if sound else FAILED, text)


def check_logits(found: Verification) -> Check:
    """NaN or +inf in the logits is acceptable because the guard handles it."""
    if not found.num_forwards:
        return Check("logits", UNKNOWN, "the model's output has neither logits nor log-probabilities")
    text = f"NaN or inf in {found.num_bad_forwards} of {found.num_forwards} forwards"
    return Check("logits", ACCEPTABLE if found.num_bad_forwards else BEST, text)


def check_gradients(found: Verification) -> Check:
    """NaN or inf in the gradients is acceptable because the guard handles it."""
    text = (
        f"NaN in {found.num_nan_gradients} tensors, inf in {found.num_inf_gradients}, at {found.num_bad_steps} of "
        f"{found.num_done} steps"
    )
    return Check("gradients", ACCEPTABLE if found.num_bad_steps else BEST, text)


def check_norms(found: Verification) -> Check:
    """Gradient norms before clipping, for information."""
    if not found.norms:
        return Check("gradient norms", UNKNOWN, "no step was taken")
    text = f"min {min(found.norms):.4g}, mean {fmean(found.norms):.4g}, max {max(found.norms):.4g} before clipping"
    return Check("gradient norms", SHOWN, text)


def check_clipping(found: Verification) -> Check:
    """Every norm above the bound must be clipped to it."""
    bound = found.max_grad_norm
    if not bound:
        return Check("clipping", UNKNOWN, "off (max_grad_norm is 0)")
    above = [after for norm, after in zip(found.norms, found.norms_after, strict=True) if norm > bound]
    if not above:
        return Check("clipping", UNKNOWN, f"not needed: no norm was above max_grad_norm {bound:g}")
    num_held = sum(after <= bound * ROUNDING for after in above)
    text = f"{num_held} of {len(above)} norms above max_grad_norm {bound:g} were clipped to it"
    return Check("clipping", BEST if num_held == len(above) else FAILED, text)


def check_success(found: Verification) -> Check:
    """Most micro-batches must be trained on."""
    rate = found.success_rate
    verdict = BEST if rate > BEST_RATE else ACCEPTABLE if rate > ACCEPTABLE_RATE else FAILED
    return Check("success rate", verdict, f"{rate:.1%}: {found.num_used} of {found.num_seen} micro-batches were used")


def check_learning(found: Verification) -> Check:
    """A held-out loss must fall. A reward of a few samples is too noisy to fail a run."""
    name, before, after = f"held-out {found.measure}", found.before, found.after
    if before is None or after is None:
        return Check(name, UNKNOWN, "no held-out data, or the run ended before the second evaluation")
    text = f"{before:.4g} at the start, {after:.4g} at the end"
    if not (math.isfinite(before) and math.isfinite(after)):
        return Check(name, FAILED, text)
    if found.measure == "reward":
        return Check(name, BEST if after >= before else ACCEPTABLE, text)
    verdict = BEST if after < before else ACCEPTABLE if after <= before + TOLERANCE * abs(before) else FAILED
    return Check(name, verdict, text)


def check_memory(found: Verification) -> Check:
    """The memory peak must be within the limit, if there is one."""
    if found.memory is None:
        return Check("memory peak", UNKNOWN, "this system does not report it")
    text = f"{found.memory / 2**20:,.0f} MiB of {found.memory_kind}"
    if found.memory_limit is None:
        return Check("memory peak", SHOWN, text)
    text += f", the limit is {found.memory_limit / 2**20:,.0f} MiB"
    return Check("memory peak", BEST if found.memory <= found.memory_limit else FAILED, text)


def check_events(found: Verification) -> Check:
    """Events of the guard, for information; the other checks cover what they mean."""
    return Check("events", SHOWN, format_counts(count_events(found.events)))


CHECKS = (
    check_completion, check_logits, check_gradients, check_norms, check_clipping, check_success, check_learning,
    check_memory, check_events,
)  # fmt: skip
