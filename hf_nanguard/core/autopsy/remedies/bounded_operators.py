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
MASKED_SCORE = -1e4  # below the scores of a model, and sums of it are finite; a loss over it is large in float16
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
            for name in [name for name in dir(module) if name.startswith("has_torch_function")]:
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


def _one_twice(x: object, args: tuple, kwargs: dict) -> object:
    """Gives a lone value twice to a standard deviation or variance, which is then 0, as with `correction=0`."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    if dim is None or isinstance(dim, bool) or x.ndim == 0:  # the second argument may be `unbiased`
        return x if x.numel() != 1 else torch.cat([x.reshape((1,) * max(x.ndim, 1))] * 2)
    dims = [dim] if isinstance(dim, int) else list(dim)
    alone = bool(dims) and math.prod(x.shape[each] for each in dims) == 1
    return torch.cat([x, x], dims[0]) if alone else x


def _finite_scores(x: object, args: tuple, kwargs: dict) -> object:
    """Replaces every row of only -inf with equal scores, and other -inf with a score whose probability is 0 too."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if dim is None or not isinstance(x, Tensor):
        return x
    masked = x == -math.inf
    return x.masked_fill(masked, MASKED_SCORE).masked_fill(masked.all(dim, keepdim=True), 0.0)


def _finite_classes(x: object, args: tuple, kwargs: dict) -> object:
    """As `_finite_scores`, over the dimension of the classes."""
    return _finite_scores(x, (x, min(1, x.ndim - 1)), {}) if isinstance(x, Tensor) else x


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
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), (0, _one_twice)),
    "rsqrt": (0, _above_zero),
}
CTC: Rules = {"ctc_loss": (6, lambda x, args, kwargs: True)}  # as torch's operator gets it, always by position
SOFTMAX: Rules = {
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp"), (0, _finite_scores)),
    "cross_entropy_loss": (0, _finite_classes),
}

BOUNDS: dict[Cause, tuple[str, str, Rules]] = {
    Cause.RATIO_OVERFLOW: ("bounded_log_ratio", "log-ratio at most 20 before exp", RATIO),
    Cause.KL_OVERFLOW: ("bounded_log_ratio", "log-ratio at most 20 before exp", RATIO),
    Cause.EXP_OVERFLOW: ("bounded_exp", "argument of exp at most 0.9 of the largest its dtype allows", EXP),
    Cause.SQRT_AT_ZERO: ("eps_in_sqrt", "argument of sqrt at least the square of its dtype's eps", ROOT),
    Cause.NORM_AT_ZERO: ("eps_in_sqrt", "argument of sqrt at least the square of its dtype's eps", ROOT),
    Cause.LOG_OF_ZERO: ("log_of_clamped", "argument of log at least its dtype's smallest normal number", LOG),
    Cause.DIV_BY_ZERO: ("guarded_division", "zeros of a divisor as eps, or as 1 in a count; std and var of one value as 0", DIVISION),
    Cause.MASKED_ROW_SOFTMAX: ("unmask_empty_rows", "fully masked rows of a softmax as uniform rows, other -inf as -1e4", SOFTMAX),
    Cause.CTC_TARGET_TOO_LONG: ("ctc_zero_infinity", "ctc_loss with zero_infinity=True, which leaves such samples out", CTC),
    Cause.WHERE_UNSELECTED_BRANCH: (
        "where_on_input", "arguments of exp, log, sqrt and division bounded", {**EXP, **ROOT, **LOG, **DIVISION}
    ),
}  # fmt: skip
