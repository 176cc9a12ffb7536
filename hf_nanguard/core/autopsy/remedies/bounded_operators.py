"""Bounds the arguments of operators for the duration of a replay.

A mode above autograd changes an argument before the operator gets it, also while checkpointed parts are recomputed.
`BOUNDS` maps a cause to the remedy: which operators, and how.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...torch_private import OVERRIDABLE_MODULES
from ...vocabulary import Cause

LOG_RATIO_BOUND = 20.0
# Changes an argument of an operator, given the argument, all positional and all keyword arguments.
Change = Callable[[object, tuple, dict], object]
# Operator to the position of the argument and its change.
Rules = dict[str, tuple[int, Change]]


@contextmanager
def bounded(rules: Rules) -> Iterator[None]:
    """Applies rules to all operators that are called inside.

    Functions of torch that are written in Python, including `backward` and its recomputations, would be passed to the mode
    as a whole and then run without it; so the check that does this is switched off.
    """
    with ExitStack() as checks:
        for module in OVERRIDABLE_MODULES:
            for name in [name for name in vars(module) if name.startswith("has_torch_function")]:
                checks.enter_context(patch.object(module, name, lambda *tensors: False))
        checks.enter_context(Bounded(rules))
        yield


class Bounded(TorchFunctionMode):
    """Changes an argument of some operators before they see it.

    In the names of operators, `special_` and the underscore of the in-place form are left out.
    """

    def __init__(self, rules: Rules):
        super().__init__()
        self.rules = rules

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        full = getattr(func, "__name__", "")
        name = full if full.startswith("__") else full.removeprefix("special_").rstrip("_")
        if name not in self.rules:
            return func(*args, **kwargs)
        place, change = self.rules[name]
        if place >= len(args):
            key = ("input", "other")[place]
            return func(*args, **{**kwargs, key: change(kwargs[key], args, kwargs)})
        if place == 0 and full.endswith("_") and full != name:
            target = args[0]
            fresh = change(target.clone(), args, kwargs)  # autograd may need the old value of the target
            return target.copy_(func(fresh, *args[1:], **kwargs))
        return func(*args[:place], change(args[place], args, kwargs), *args[place + 1 :], **kwargs)


def _floats(change: Callable[[Tensor, torch.finfo], Tensor]) -> Change:
    """Returns a change of float tensors that depends on their dtype only."""
    return lambda x, args, kwargs: (
        change(x, torch.finfo(x.dtype)) if isinstance(x, Tensor) and x.is_floating_point() else x
    )


def _root_base(x: object, args: tuple, kwargs: dict) -> object:
    """Bounds the base of a power with a fractional exponent, which is a root; the base of a square may be negative."""
    exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
    return _above_zero(x, args, kwargs) if isinstance(exponent, float) and not exponent.is_integer() else x


def _nonzero(x: object, args: tuple, kwargs: dict) -> object:
    """Replaces the zeros of a divisor with eps, or with 1 in a count."""
    if not isinstance(x, Tensor):
        return x or torch.finfo(torch.float32).eps
    return torch.where(x == 0, torch.finfo(x.dtype).eps if x.is_floating_point() else 1, x)


def _some_unmasked(x: object, args: tuple, kwargs: dict) -> object:
    """Replaces every row of only -inf with equal scores."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if dim is None or not isinstance(x, Tensor):
        return x
    return x.masked_fill((x == -math.inf).all(dim, keepdim=True), 0.0)


# Nine tenths of the largest exponent leave room for sums and products of the result.
_capped = _floats(lambda x, info: x.clamp(max=0.9 * math.log(info.max)))
_capped_2 = _floats(lambda x, info: x.clamp(max=0.9 * math.log2(info.max)))
_capped_both = _floats(lambda x, info: x.clamp(-0.9 * math.log(info.max), 0.9 * math.log(info.max)))
_ratio = _floats(lambda x, info: x.clamp(max=min(LOG_RATIO_BOUND, 0.9 * math.log(info.max))))
_above_zero = _floats(lambda x, info: x.clamp(min=info.eps**2))
_normal = _floats(lambda x, info: x.clamp(min=info.tiny))

RATIO: Rules = dict.fromkeys(("exp", "expm1", "exp2"), (0, _ratio))
EXP: Rules = {
    "exp": (0, _capped), "expm1": (0, _capped), "exp2": (0, _capped_2), "sinh": (0, _capped_both), "cosh": (0, _capped_both),
}  # fmt: skip
ROOT: Rules = {"sqrt": (0, _above_zero), "rsqrt": (0, _above_zero), "pow": (0, _root_base)}
LOG: Rules = {
    **dict.fromkeys(("log", "log2", "log10"), (0, _normal)),
    "log1p": (0, _floats(lambda x, info: x.clamp(min=info.eps - 1))),
    "logit": (0, _floats(lambda x, info: x.clamp(info.eps, 1 - info.eps))),
}
DIVISION: Rules = {
    **dict.fromkeys(("div", "divide", "true_divide"), (1, _nonzero)),
    **dict.fromkeys(("reciprocal", "__rdiv__", "__rtruediv__"), (0, _nonzero)),
    "rsqrt": (0, _above_zero),
}
SOFTMAX: Rules = dict.fromkeys(("softmax", "log_softmax", "logsumexp"), (0, _some_unmasked))

BOUNDS: dict[Cause, tuple[str, str, Rules]] = {
    Cause.RATIO_OVERFLOW: ("bounded_log_ratio", "log-ratio at most 20 before exp", RATIO),
    Cause.KL_OVERFLOW: ("bounded_log_ratio", "log-ratio at most 20 before exp", RATIO),
    Cause.EXP_OVERFLOW: ("bounded_exp", "argument of exp at most 0.9 of the largest its dtype allows", EXP),
    Cause.SQRT_AT_ZERO: ("eps_in_sqrt", "argument of sqrt at least the square of its dtype's eps", ROOT),
    Cause.NORM_AT_ZERO: ("eps_in_sqrt", "argument of sqrt at least the square of its dtype's eps", ROOT),
    Cause.LOG_OF_ZERO: ("log_of_clamped", "argument of log at least its dtype's smallest normal number", LOG),
    Cause.DIV_BY_ZERO: ("guarded_division", "zeros of a divisor as its dtype's eps, or as 1 in a count", DIVISION),
    Cause.MASKED_ROW_SOFTMAX: ("unmask_empty_rows", "fully masked rows of a softmax as uniform rows", SOFTMAX),
    Cause.WHERE_UNSELECTED_BRANCH: (
        "where_on_input", "arguments of exp, log, sqrt and division bounded", {**EXP, **ROOT, **LOG, **DIVISION}
    ),
}  # fmt: skip
