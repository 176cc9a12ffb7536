"""An optimizer update that made weights non-finite although loss and gradient were finite: the cause, and what helps.

The step is over, so the evidence is what remains after it. An entry whose moment is not finite got its bad weight from that
moment. An entry whose moments are finite got it from the arithmetic of the update, which can be repeated: a denominator of
zero means that eps underflowed, a quotient beyond the limit of the dtype means that the learning rate is too high. Weights
that were bad before the step are left unexplained if the update is finite. State that is bad while the weights are still
finite will make the next update bad, or keep its entries from ever moving again.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...boundary import attempt
from ...plain_text import quote_error
from ..event import Remedy
from ..finite import dtype_name, find_nonfinite, find_rows, local
from ..state_tensors import is_plain
from ..vocabulary import Cause
from .copied_update import Settings, copy_entries, copy_settings, copy_state, step_copy

MAX_ENTRIES = 4096
FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
SECOND_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum")  # with amsgrad, Adam divides by the first
SAFE_EPS = {torch.float16: 1e-4}  # 1e-8 is less than half of the smallest float16


@dataclass(frozen=True)
class UpdateFinding:
    """What an optimizer update did to a parameter. Plain values only."""

    parameter: str
    cause: Cause  # `optimizer_state`, `adam_eps_underflow` or `lr_too_high`
    state: str | None  # the tensor of the optimizer's state that is to blame
    num_bad: int  # entries that it explains
    rows: tuple[int, ...]  # the first of their rows, in the part of the parameter on this rank
    learning_rate: float | None
    eps: float | None
    message: str  # one clause for the event message
    phase: str = "optimizer"


def examine_update(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]]) -> UpdateFinding | None:
    """Finds out how an update made weights non-finite; `None` if the optimizer, after the step, holds no evidence.

    The first parameter that is bad and can be explained is reported.
    """
    return _examine_first(optimizer, list(named), finite=False)


def examine_state(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]]) -> UpdateFinding | None:
    """Finds out what a bad optimizer state means for weights that are still finite; `None` if the state of all is finite.

    The first parameter that is finite and whose state is bad is reported, with cause `optimizer_state`.
    """
    return _examine_first(optimizer, list(named), finite=True)


@torch.no_grad()
def _examine_first(optimizer: Optimizer, named: list[tuple[str, Tensor]], finite: bool) -> UpdateFinding | None:
    bad = find_nonfinite(named)
    for name, parameter in named:
        settings = copy_settings(optimizer, parameter) if (name in bad) != finite else None
        if settings is not None and (evidence := _gather(optimizer, settings, parameter)):
            # An entry has one cause; where entries differ, the one that explains most of them is reported.
            (cause, state), entries = max(evidence.items(), key=lambda item: int(item[1].sum()))
            num_bad, rate, eps = int(entries.sum()), _number(settings, "lr"), _number(settings, "eps")
            if finite:
                message = _describe_state(_floats(optimizer, parameter), str(state), entries)
            else:
                message = _describe_update(cause, state, num_bad, rate, eps, dtype_name(parameter.dtype))
            return UpdateFinding(name, cause, state, num_bad, find_rows(entries), rate, eps, message)
    return None


def _describe_update(
    cause: Cause, state: str | None, num_bad: int, rate: float | None, eps: float | None, dtype: str
) -> str:
    """Returns how an update made weights non-finite."""
    size = "1 entry" if num_bad == 1 else f"{num_bad} entries"
    if cause is Cause.OPTIMIZER_STATE:
        kinds = "NaN or negative" if state in SECOND_MOMENTS else "NaN or inf"
        return f"the optimizer's {state} was already {kinds} in {size} before this update"
    if cause is Cause.ADAM_EPS_UNDERFLOW:
        return f"the update divided {size} by zero: {state} is 0, and eps {eps} is 0 in {dtype}"
    return f"the update of {size} at learning rate {rate} exceeds the range of {dtype}"


def _describe_state(state: dict[str, Tensor], key: str, entries: Tensor) -> str:
    """Returns what a bad state will do to weights that are still finite."""
    if not _only_inf(state, key):
        return "the weights are still finite; the next update that uses it will make them non-finite"
    first = next((state[name] for name in FIRST_MOMENTS if name in state), None)
    kept = dtype_name(state[key].dtype)
    why = ""
    if first is not None and first.shape == entries.shape and bool(torch.isfinite(first[entries]).all()):
        why = f"the square of a finite gradient exceeds the range of {kept}: "
    return f"{why}divided by infinity, these entries will never move again"


def _only_inf(state: dict[str, Tensor], key: str) -> bool:
    """Returns whether a second moment is bad only by infinities, which leave weights as they are."""
    return key in SECOND_MOMENTS and not bool((torch.isnan(state[key]) | (state[key] < 0)).any())


def _number(settings: Settings, key: str) -> float | None:
    value = settings.get(key)
    return float(value) if isinstance(value, (int, float, Tensor)) else None


def _floats(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Returns the float tensors that the optimizer keeps for a parameter, the part on this rank."""
    state = optimizer.state.get(parameter, {})
    return {
        key: local(value)
        for key, value in state.items()
        if isinstance(value, Tensor) and is_plain(local(value)) and value.ndim
    }


@torch.no_grad()
def _gather(optimizer: Optimizer, settings: Settings, parameter: Tensor) -> dict[tuple[Cause, str | None], Tensor]:
    """Returns the entries that each possible cause explains."""
    weights = local(parameter)
    bad = ~torch.isfinite(weights)
    finite = not bool(bad.any())
    state = _floats(optimizer, parameter)
    found: dict[tuple[Cause, str | None], Tensor] = {}
    from_state = torch.zeros_like(bad)
    for key, value in state.items():
        unusable = ~torch.isfinite(value)
        if key in SECOND_MOMENTS:  # dividing by an infinity moves nothing, but a negative one has no root
            unusable = torch.isnan(value) | (value < 0) | (unusable & finite)
        if value.shape == bad.shape and not finite:
            unusable = unusable & bad
            from_state |= unusable
        if unusable.any():
            found[Cause.OPTIMIZER_STATE, key] = unusable
    if finite:
        return found
    step, divisor, second = _redo(settings, optimizer.state.get(parameter, {}), state, weights, parameter.grad)
    unexplained = bad & ~from_state
    if divisor is not None and (divided := unexplained & (divisor == 0)).any():
        found[Cause.ADAM_EPS_UNDERFLOW, second] = divided
        unexplained = unexplained & ~divided
    if step is not None:
        info = torch.finfo(weights.dtype)
        # A weight at the very limit is pushed over it by half the distance to its neighbour.
        reached = torch.where(torch.isnan(weights), info.max, info.max * info.eps / 2)
        if (beyond := unexplained & ~(step.abs() <= reached)).any():
            found[Cause.LR_TOO_HIGH, None] = beyond
    return found


def _redo(
    settings: Settings, raw: Settings, state: dict[str, Tensor], weights: Tensor, gradient: Tensor | None
) -> tuple[Tensor | None, Tensor | None, str | None]:
    """Returns the change of the weights (in float64), what it was divided by in the optimizer's own arithmetic, and the
    moment that makes up the divisor; each `None` where the optimizer keeps no such thing."""
    alike = {key: value for key, value in state.items() if value.shape == weights.shape}
    first = next((alike[key] for key in FIRST_MOMENTS if key in alike), None)
    if first is None and gradient is not None and local(gradient).shape == weights.shape:
        first = local(gradient) if bool(torch.isfinite(local(gradient)).all()) else None  # else not that of this update
    second = next((key for key in SECOND_MOMENTS if key in alike), None)
    rate = _number(settings, "lr") or 0.0
    if second is None:
        return (None if first is None else first.double() * rate), None, None
    root = alike[second].float().sqrt() if settings.get("fused") else alike[second].sqrt()
    if "betas" in settings and "step" in raw:
        count, (beta1, beta2) = float(raw["step"]), settings["betas"]
        rate /= 1 - float(beta1) ** count or 1.0
        root = root / math.sqrt(1 - float(beta2) ** count or 1.0)
    divisor = root.add(_number(settings, "eps") or 0.0)
    return (None if first is None else first.double() / divisor.double() * rate), divisor, second


@dataclass(frozen=True)
class _Trial:
    """Settings for one update of a copy; `wide`: weights and state in float32, `reset`: state as 0."""

    name: str
    note: str
    settings: Settings = field(default_factory=dict)
    wide: bool = False
    reset: bool = False


def try_update_remedies(optimizer: Optimizer, finding: UpdateFinding, parameter: Tensor) -> tuple[Remedy, ...]:
    """Repeats the update of the bad entries on a copy, by the same optimizer with other settings.

    The weights before the update are gone, so the copy starts at zero, with moments and gradient that lead to what the
    optimizer holds now. Nothing is tried if the copy stays finite with unchanged settings. Optimizer and parameter are only
    read. `finding` is what [`examine_update`] found about the parameter.
    """
    settings = copy_settings(optimizer, parameter)
    if settings is None:
        return ()
    trials = _find_trials(settings, finding.cause, parameter.dtype)
    state = _floats(optimizer, parameter)
    if finding.state in state and _only_inf(state, finding.state) and finding.cause is Cause.OPTIMIZER_STATE:
        trials.append(_Trial("float32_state", "weights and state in float32", wide=True))
        return _leave(trials, "the update is zero")
    explained = _gather(optimizer, settings, parameter).get((finding.cause, finding.state))
    bad = ~torch.isfinite(local(parameter))
    entries = (bad if explained is None or explained.shape != bad.shape else explained).reshape(-1).nonzero().flatten()

    def update(trial: _Trial) -> float:
        return _update_copy(optimizer, settings, parameter, entries[:MAX_ENTRIES], trial)

    # An optimizer whose constructor or state is not known here may raise anything.
    if not math.isfinite(attempt(lambda: update(_Trial("unchanged", "")), lambda error: 0.0)):
        return tuple(_try(update, trial) for trial in trials)
    return _leave(trials, "the update stays finite on a copy")


def _leave(trials: list[_Trial], why: str) -> tuple[Remedy, ...]:
    return tuple(Remedy(t.name, tried=False, note=f"{t.note}; not tried because {why}") for t in trials)


def _find_trials(settings: Settings, cause: Cause, dtype: torch.dtype) -> list[_Trial]:
    if cause is Cause.OPTIMIZER_STATE:
        return [_Trial("reset_state", "state of these entries as 0", reset=True)]
    trials = []
    safe, eps, rate = SAFE_EPS.get(dtype, 1e-8), _number(settings, "eps"), _number(settings, "lr")
    if eps is not None and eps < safe:
        trials.append(_Trial("larger_eps", f"eps {safe:g}", {"eps": safe}))
    if cause is Cause.LR_TOO_HIGH and rate is not None:
        trials.append(_Trial("smaller_lr", f"learning rate {rate / 10:g}", {"lr": rate / 10}))
    if dtype in (torch.float16, torch.bfloat16):
        if not settings.get("fused", True):
            trials.append(_Trial("fused", "fused kernels compute in float32", {"fused": True, "foreach": False}))
        trials.append(_Trial("float32_state", "weights and state in float32", wide=True))
    return trials


def _try(update: Callable[[_Trial], float], trial: _Trial) -> Remedy:

    def make() -> Remedy:
        largest = update(trial)
        return Remedy(trial.name, True, math.isfinite(largest), f"{trial.note}; largest update {largest:.3g}")

    # There may be no such kernel for this dtype or device.
    return attempt(make, lambda error: Remedy(trial.name, True, False, f"{trial.note}; {quote_error(error, 200)}"))


def _update_copy(optimizer: Optimizer, settings: Settings, parameter: Tensor, entries: Tensor, trial: _Trial) -> float:
    """Returns the largest change that the update of some entries makes."""
    settings = settings | trial.settings
    dtype = torch.float32 if trial.wide else parameter.dtype
    change = torch.zeros_like if trial.reset else Tensor.float if trial.wide else Tensor.clone
    state = copy_state(optimizer, parameter, entries, settings, change)
    weights = torch.zeros(len(entries), dtype=dtype, device=entries.device)
    gradient = _undo_step(state, settings)
    if gradient is None and parameter.grad is not None and not trial.reset:
        gradient = copy_entries(parameter.grad, entries).to(dtype)
    gradient = torch.zeros_like(weights) if gradient is None else gradient
    return float(step_copy(optimizer, weights, gradient, state, settings).abs().max())


def _undo_step(state: Settings, settings: Settings) -> Tensor | None:
    """Puts moments back by one step in place and returns the gradient that leads to them again, `None` without moments.

    That gradient is gone. For Adam it is estimated by the mean of all gradients: exact after one step, and close later."""
    buffer, first, second = state.get("momentum_buffer"), state.get("exp_avg"), state.get("exp_avg_sq")
    if buffer is not None:
        return buffer * ((1 - settings.get("momentum", 0.0)) / (1 - settings.get("dampening", 0.0)))
    if first is None or second is None or "step" not in state or "betas" not in settings:
        return None if first is None else first.clone()
    beta1, beta2 = map(float, settings["betas"])
    gradient = first.float() / (1 - beta1 ** float(state["step"]) or 1.0)
    before = (second.float() - (1 - beta2) * gradient.square()) / (beta2 or 1.0)
    state["exp_avg"] = ((first.float() - (1 - beta1) * gradient) / (beta1 or 1.0)).to(first.dtype)
    state["exp_avg_sq"] = torch.where(second >= 0, before.clamp(min=0), second.float()).to(second.dtype)
    state["step"] = state["step"] - 1
    return gradient.to(first.dtype)
