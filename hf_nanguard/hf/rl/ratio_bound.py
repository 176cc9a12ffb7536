"""Bounds the log-ratio and the KL of TRL's policy losses before `exp`, around TRL's own code.

`exp(logp - old)` and the K3 KL `exp(ref - logp) - (ref - logp) - 1` overflow at 88. PPO's clipping hides the inf in the
loss, and its backward turns it into NaN (0 * inf). Selecting by the mask does not help, because the position may be
unmasked.

**Where.** From the moment TRL's `_compute_loss` has its policy's log-probs until it returns, a `TorchFunctionMode`
intercepts the calls made by that function itself: `exp` gets a bounded argument, a difference `ref - x` is bounded. The
model's forward and every backward run outside of it. `get_gamma_weights` (vespo) has its own bound, and its `exp(log_phi)`
may legitimately be below e^-20, so it is not intercepted. At level "sequence" the argument of `exp` is the mean, so the mean
is bounded, not the tokens.

**Value and gradient** of x, the log-ratio or the gap `ref - logp`, with the bound b = 20:

| x | value | gradient | why |
|---|---|---|---|
| in [-b, b] | x | 1 | bit-identical: our nodes copy, and lie between the same nodes in the same order |
| above b | b | 0 | stock's is 0 where PPO, `delta` or sapo clips, else a spike of e^x, inf * 0 from 88 on |
| below -b | -b | 1 | times what follows: e^-b for the ratio (stock: e^x, both nothing), e^-b - 1 for the KL, as in stock |
| NaN | NaN | 1 | a NaN of the policy is found by the guard's redo; a bound must not hide it |

So a token that has become e^20 times as likely and was bad, or e^20 times less likely than under the reference, gets no
gradient through that term until it is back in range; at e^19.9 its gradient is that of stock TRL. cispo and vespo multiply a detached weight with
`logp` itself; that gradient stays. Both terms of the KL are bounded together: a bounded `exp` with a free linear
term has the gradient +1 where the true one is 1 - e^x, and would push the policy away from the reference. The lower side
keeps its +1, which is the pull on the tokens that have left the reference the furthest. With `use_bias_correction_kl` the KL
is multiplied by the ratio, and the two gradients, (1 - e^x) and (e^x - x - 1) times the ratio, nearly cancel. With one of the
factors above its bound what is left of them would be a spike of e^20, with the wrong sign in the KL, so the product
gets no gradient there.

Passing TRL a bounded `old` or `ref` instead does not work: with a detached one the position gets the spike e^20, with an
attached one g - g, which loses to rounding what other terms add there; and at level "sequence" the mean would have to be
computed again.

**Masked positions** that are not finite in the log-probs, the entropies, `old` or `ref` become 0 before TRL multiplies
by the mask; everything else is unchanged. A gradient of 0 that reaches a model through NaN activations may still be NaN.

**Cost** in operations on [batch, length], backward included: none on policy and without a KL (TRL passes no `old`, and
every log-ratio is exactly 0), 14 with `old`, 12 more with a KL, 4 more with its bias correction. No host read is added: see
`ratio_overflow.py`, which counts what was bounded.

**Not covered:** losses that are not TRL's `_compute_loss` (your own override of it; SDPO, AsyncGRPO), and the ratio of
vLLM's correction, whose bound is TRL's `vllm_importance_sampling_clip_max`. `use_liger_kernel` no longer replaces the loss.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...boundary import Boundary, HostCall
from ..compat.online_trainer import OLD, OLD_SUM, REFERENCE, Completions, is_policy_loss
from ..compat.trainer import completion_mask
from ..data.dataset_rows import ROWS
from .ratio_overflow import RatioOverflow

EXPONENTIALS = (torch.exp, Tensor.exp)
DIFFERENCES = (torch.sub, Tensor.sub)
PRODUCTS = (torch.mul, Tensor.mul)
WATCHED = EXPONENTIALS + DIFFERENCES + PRODUCTS


class _Changed(torch.autograd.Function):
    """`change(x)` with the gradient of x itself, which becomes 0 where `cut(x)` is true, if there is a `cut`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor], cut: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        ctx.cut = cut
        if cut is not None:
            ctx.save_for_backward(x)
        return change(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient if ctx.cut is None else gradient.masked_fill(ctx.cut(*ctx.saved_tensors), 0.0), None, None


def _bound(x: Tensor, bound: float) -> Tensor:
    """Returns x within +/-bound; no gradient above, all of it below."""
    return _Changed.apply(x, lambda x: x.clamp(-bound, bound), lambda x: x > bound)


def _select(x: Tensor | None, inactive: Tensor) -> Tensor | None:
    """Returns x, if it is there, with 0 for inactive entries that are not finite; the mask makes their gradient 0."""
    change = lambda x: torch.where(inactive, x.nan_to_num(0.0, 0.0, 0.0), x)  # noqa: E731
    return None if x is None else _Changed.apply(x, change, None)


@dataclass(eq=False, repr=False)
class _Bounding(TorchFunctionMode):
    """Bounds the arguments of `exp` in TRL's loss; entered once its log-probs are known.

    `reference` are the log-probs of the reference, as passed to TRL; `inactive` is true at masked positions. Without
    `overflow` nothing is counted.
    """

    bound: float
    reference: Tensor | None
    inactive: Tensor
    overflow: RatioOverflow | None
    boundary: Boundary
    rows: Tensor | None
    log_ratio: Tensor | None = None  # as TRL computed it, and its bounded exponential
    ratio: Tensor | None = None
    gap: Tensor | None = None  # likewise
    bounded_gap: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in WATCHED and len(args) > 0 and is_policy_loss(sys._getframe(1)):
            return self.boundary.around("ratio bound", self.apply, func, *args, **kwargs)
        return func(*args, **kwargs)

    def apply(self, call: HostCall, *args: Any, **kwargs: Any) -> object:
        """Returns the result of a call that TRL's loss makes, bounded if it is one of those that can overflow."""
        func = call.method
        if func in EXPONENTIALS and args[0] is not self.bounded_gap:
            return self.exponentiate(call, *args, **kwargs)
        result = call(*args, **kwargs)
        if func in DIFFERENCES and args[0] is self.reference:
            return self.bound_gap(result)
        if func in PRODUCTS and self.gap is not None and args[-1] is self.ratio:
            # the KL times the ratio gets no gradient where one of them was above its bound
            cut = (self.gap > self.bound) | (self.log_ratio > self.bound)  # type: ignore[operator]
            return _Changed.apply(result, lambda x: x.view_as(x), lambda _: cut)
        return result

    def exponentiate(self, func: Callable[..., Tensor], log_ratio: Tensor, *args: object, **kwargs: object) -> Tensor:
        self.count("ratio", log_ratio)
        self.log_ratio = log_ratio.detach()
        self.ratio = ratio = func(_bound(log_ratio, self.bound), *args, **kwargs)
        return ratio

    def bound_gap(self, gap: Tensor) -> Tensor:
        """Returns the bounded gap to the reference; TRL computes it twice, for the two terms of its KL."""
        if self.gap is None:
            self.count("kl", gap)
            self.gap = gap.detach()
        self.bounded_gap = bounded = _bound(gap, self.bound)
        return bounded

    @torch.no_grad()
    def count(self, name: str, x: Tensor) -> None:
        """Finds the active entries beyond the bound, on the device."""
        if self.overflow is None:
            return
        beyond = x.abs() > self.bound
        if x.shape == self.inactive.shape:  # one value a token, not one a sequence
            beyond = beyond > self.inactive
        self.overflow.add(name, x.detach(), beyond, self.rows)


class RatioBound:
    """Keeps the log-ratios and KL gaps of TRL's policy losses within +/-`bound`; see the module for what that means.

    Example:

    ```python
    with ratio_bound.around_loss(inputs) as inputs:  # inside it, log-probs go through `on_log_probs`
        loss = super()._compute_loss(model, inputs)
    ```
    """

    def __init__(self, bound: float, overflow: RatioOverflow, boundary: Boundary):
        self.bound = bound
        self.boundary = boundary
        self.overflow = overflow
        self._pending: tuple[Completions, RatioOverflow | None, ExitStack] | None = None  # a loss without log-probs yet

    @contextmanager
    def around_loss(self, inputs: Completions, counted: bool = True) -> Iterator[Completions]:
        """Bounds inside the block, once [`~RatioBound.on_log_probs`] has been given the policy's log-probs.

        Yields a shallow copy of the inputs to pass to the host's `_compute_loss`; the inputs and their tensors are not
        changed. With `counted=False`, for a second run of the same batch, what is bounded is not counted.
        """
        outer, given = self._pending, copy(inputs)
        if counted:
            self.overflow.begin_loss()
        with ExitStack() as stack:
            self._pending = given, self.overflow if counted else None, stack
            try:
                yield given
            finally:
                self._pending = outer

    def on_log_probs(self, result: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Takes the result of the host's `_get_per_token_logps_and_entropies` and returns what the loss should get.

        Outside of [`~RatioBound.around_loss`], e.g. when completions are scored, it is returned unchanged.
        """
        if self._pending is None:
            return result
        (inputs, overflow, stack), self._pending = self._pending, None  # only the first log-probs are the policy's
        if not any(inputs.get(name) is not None for name in (OLD, OLD_SUM, REFERENCE)):
            return result  # on policy and without a KL: every ratio is 1
        inactive = completion_mask(inputs) == 0
        for name in (OLD, REFERENCE):  # TRL reads them after the log-probs
            if inputs.get(name) is not None:
                inputs[name] = _select(inputs[name], inactive)
        log_probs, entropies, *others = result
        selected = _select(log_probs, inactive), _select(entropies, inactive), *others
        bounding = _Bounding(
            self.bound, inputs.get(REFERENCE), inactive, overflow, self.boundary, inputs.get(ROWS)
        )  # fmt: skip
        stack.enter_context(bounding)
        return selected
