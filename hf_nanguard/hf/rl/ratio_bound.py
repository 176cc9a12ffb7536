"""Bounds the log-ratio and the KL of TRL's policy losses before `exp`, around TRL's own code.

`exp(logp - old)` and the K3 KL `exp(ref - logp) - (ref - logp) - 1` overflow at 88. PPO's clipping hides the inf in the
loss and its backward makes NaN of it (0 * inf). Selecting by the mask does not help: the position may be an unmasked one.

**Seam.** From the moment TRL's `_compute_loss` has its policy's log-probs until it returns, a `TorchFunctionMode` watches
the calls made by that very function: `exp` gets a bounded argument, a difference `ref - x` is bounded itself. The model's
forward and every backward run outside of it. `get_gamma_weights` (vespo) bounds by itself, and its `exp(log_phi)` may
rightly be below e^-20, so it is left alone. At level "sequence" the argument of `exp` is the mean, so that is what is
bounded; tokens are not.

**Value and gradient** of x, the log-ratio or the gap `ref - logp`, with the bound b = 20:

| x | value | gradient | why |
|---|---|---|---|
| in [-b, b] | x | 1 | bit-identical: our nodes copy, and lie between the same nodes in the same order |
| above b | b | 0 | stock's is 0 where PPO, `delta` or sapo clips, else a spike of e^x, inf * 0 from 88 on |
| below -b | -b | 1 | times what follows: e^-b for the ratio (stock: e^x, both nothing), e^-b - 1 for the KL, as in stock |
| NaN | NaN | 1 | a sick policy is for the guard's redo to find, not for a bound to hide |

So a token that has become e^20 times as likely and was bad, or e^20 times less likely than the reference says, teaches
nothing through that term until it is back; at e^19.9 it teaches as in stock. cispo and vespo multiply a detached weight with
`logp` itself; that gradient stays. Both terms of the KL are bounded together: a bounded `exp` with a free linear
term has the gradient +1 where the true one is 1 - e^x, and would push the policy away from the reference. The lower side
keeps its +1, which is the pull on the tokens that have left the reference the furthest. With `use_bias_correction_kl` the KL
is multiplied by the ratio, and the two gradients, (1 - e^x) and (e^x - x - 1) times the ratio, nearly cancel. With one of the
factors above its bound what is left of them would be a spike of e^20, for the KL of the wrong sign, so the product
gets no gradient there.

Handing TRL a bounded `old` or `ref` instead does not do: with a detached one the position gets the spike e^20, with an
attached one g - g, which loses to rounding what other terms add there; and at level "sequence" the mean would have to be
restated.

**Masked positions** that are not finite in the log-probs, the entropies, `old` or `ref` become 0 before TRL multiplies
by the mask; all else passes as it is. A gradient of 0 that reaches a model through NaN activations may still be NaN.

**Cost** in operations on [batch, length], backward included: none on policy and without a KL (TRL passes no `old`, and
every log-ratio is exactly 0), 14 with `old`, 12 more with a KL, 4 more with its bias correction. Counts stay on the device
until the step reads its losses, so no host read is added. Until the first value is bounded, a step also holds its log-ratios
and one boolean each, so that the event can name the token.

**Not covered:** losses that are not TRL's `_compute_loss` (your own override of it; SDPO, AsyncGRPO), and the ratio of
vLLM's correction, whose bound is TRL's `vllm_importance_sampling_clip_max`. `use_liger_kernel` no longer replaces the loss.
"""

import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...core.finite import read_host
from ...core.rerun.micro_batch import AccumulationGroup
from ...errors import ArgumentError
from ..compat.online_trainer import OLD, OLD_SUM, REFERENCE, is_policy_loss
from ..compat.trainer import completion_mask
from ..data.dataset_rows import ROWS

MAX_BOUND = 40.0  # a bias-corrected KL is a product of two such exponentials: e^80 is still finite in float32
EXPONENTIALS = (torch.exp, Tensor.exp)
DIFFERENCES = (torch.sub, Tensor.sub)
PRODUCTS = (torch.mul, Tensor.mul)
WATCHED = EXPONENTIALS + DIFFERENCES + PRODUCTS
TermCount = Callable[[str, Tensor, Tensor], None]


@dataclass(frozen=True)
class Overflow:
    """The first log-ratio beyond the bound in one term of one loss.

    Args:
        term (`str`):
            `"ratio"`: `logp - old`, or its mean over a sequence. `"kl"`: `ref - logp`.
        log_ratio (`float`), bound (`float`):
            Its size before it was bounded, and the bound.
        micro_step (`int`):
            The place of its micro-batch in the accumulation group.
        sample (`int`):
            The completion in the micro-batch.
        token (`int`, *optional*):
            The position in the completion; `None` if the term has one value per sequence.
        row (`int`, *optional*):
            The dataset row, if it is known.
    """

    term: str
    log_ratio: float
    bound: float
    micro_step: int
    sample: int
    token: int | None
    row: int | None


@dataclass(frozen=True)
class _CountedTerm:
    """One term of one loss, on the device: how many of its log-ratios were bounded and, until one is found, which."""

    name: str
    num_dev: Tensor
    micro_step: int
    log_ratios: Tensor | None
    beyond: Tensor | None
    rows: Tensor | None

    def find_first(self, bound: float) -> Overflow | None:
        """Reads where the first one is; called only if there is one."""
        if self.log_ratios is None or self.beyond is None:
            return None
        at = self.beyond.nonzero()[0].tolist()
        sample, token = at[0], at[1] if self.beyond.ndim > 1 and self.beyond.shape[1] > 1 else None
        row = None if self.rows is None else int(self.rows[sample])
        return Overflow(self.name, float(self.log_ratios[tuple(at)]), bound, self.micro_step, sample, token, row)


class _Bounded(torch.autograd.Function):
    """x within +/-bound; no gradient above, all of it below."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bound = bound
        return x.clamp(-bound, bound)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient.masked_fill(x > ctx.bound, 0.0), None


class _Cut(torch.autograd.Function):
    """x, without a gradient at the positions that are cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Tensor) -> Tensor:
        ctx.save_for_backward(cut)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (cut,) = ctx.saved_tensors
        return gradient.masked_fill(cut, 0.0), None


class _Selected(torch.autograd.Function):
    """x, with 0 for what is not finite among the inactive; the gradient passes as it is, which the mask makes 0 there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inactive: Tensor) -> Tensor:
        return torch.where(inactive, x.nan_to_num(0.0, 0.0, 0.0), x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _Bounding(TorchFunctionMode):
    """Bounds what TRL's loss exponentiates; entered once its log-probs are there.

    Args:
        bound (`float`):
            The bound.
        reference (`Tensor`, *optional*):
            The reference's log-probs, as TRL gets them.
        inactive (`Tensor`):
            True at the masked positions.
        on_term (`Callable`, *optional*):
            Called with the name of a term, its log-ratios and where they are beyond the bound; `None` not to count.
    """

    def __init__(self, bound: float, reference: Tensor | None, inactive: Tensor, on_term: TermCount | None):
        super().__init__()
        self.bound = bound
        self.reference = reference
        self.inactive = inactive
        self.on_term = on_term
        self.log_ratio: Tensor | None = None  # as TRL formed it, and what became of it
        self.ratio: Tensor | None = None
        self.gap: Tensor | None = None  # likewise
        self.bounded_gap: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        by_loss = func in WATCHED and len(args) > 0 and is_policy_loss(sys._getframe(1))
        if by_loss and func in EXPONENTIALS and args[0] is not self.bounded_gap:
            return self.exponentiate(func, *args, **kwargs)
        result = func(*args, **kwargs)
        if by_loss and func in DIFFERENCES and args[0] is self.reference:
            return self.bound_gap(result)
        if by_loss and func in PRODUCTS and self.gap is not None and args[-1] is self.ratio:
            return self.cut_product(result)
        return result

    def exponentiate(self, func: Any, log_ratio: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the ratio."""
        self.count("ratio", log_ratio)
        self.log_ratio = log_ratio.detach()
        self.ratio = func(_Bounded.apply(log_ratio, self.bound), *args, **kwargs)
        return self.ratio  # type: ignore[return-value]

    def bound_gap(self, gap: Tensor) -> Tensor:
        """Returns the gap to the reference; TRL forms it twice, for the two terms of its KL."""
        if self.gap is None:
            self.count("kl", gap)
            self.gap = gap.detach()
        self.bounded_gap = _Bounded.apply(gap, self.bound)
        return self.bounded_gap  # type: ignore[return-value]

    def cut_product(self, product: Tensor) -> Tensor:
        """Returns the KL times the ratio."""
        return _Cut.apply(product, (self.gap > self.bound) | (self.log_ratio > self.bound))  # type: ignore[operator]

    @torch.no_grad()
    def count(self, name: str, x: Tensor) -> None:
        """Finds the active entries beyond the bound, on the device."""
        if self.on_term is None:
            return
        beyond = x.abs() > self.bound
        if x.shape == self.inactive.shape:  # one value a token, not one a sequence
            beyond = beyond > self.inactive
        self.on_term(name, x.detach(), beyond)


class RatioBound:
    """Keeps the log-ratios and KL gaps of TRL's policy losses within +/-`bound`; see the module for what that means.

    Args:
        bound (`float`, *optional*, defaults to `20.0`):
            The bound, above 0 and at most 40.
        on_first (`Callable`, *optional*):
            Called with the first [`Overflow`] that is read.

    Raises:
        ArgumentError: if the bound is not a number in that range.

    Example:

    ```python
    with ratio_bound.around_loss(inputs) as inputs:  # inside it, log-probs go through `on_log_probs`
        loss = super()._compute_loss(model, inputs)
    ```
    """

    def __init__(self, bound: float = 20.0, on_first: Callable[[Overflow], None] | None = None):
        if not 0.0 < bound <= MAX_BOUND:
            raise ArgumentError(f"ratio_bound must be above 0 and at most {MAX_BOUND:g}, got {bound!r}.")
        self.bound = bound
        self.on_first = on_first
        self.counts: dict[str, int] = {}  # of the terms that were read
        self._terms: list[_CountedTerm] = []  # of the step in progress
        self._num_losses = 0  # likewise
        self._has_overflowed = False
        self._inputs: MutableMapping[str, Any] | None = None
        self._counted = True
        self._stack: ExitStack | None = None

    @contextmanager
    def around_loss(self, inputs: Any, counted: bool = True) -> Iterator[Any]:
        """Bounds inside the block, once the policy's log-probs were shown to [`~RatioBound.on_log_probs`].

        Args:
            inputs (`dict`):
                What the loss was given. Neither it nor its tensors are changed.
            counted (`bool`, *optional*, defaults to `True`):
                Whether this run counts; a run of the same batch again should not.

        Returns:
            `dict`: a shallow copy, to hand to the host's `_compute_loss`.
        """
        outer = self._inputs, self._counted, self._stack
        self._num_losses += counted
        with ExitStack() as stack:
            self._inputs, self._counted, self._stack = copy(inputs), counted, stack
            try:
                yield self._inputs
            finally:
                self._inputs, self._counted, self._stack = outer

    def on_log_probs(self, result: Any) -> Any:
        """Takes what the host's `_get_per_token_logps_and_entropies` returned and returns what the loss should get.

        Outside of [`~RatioBound.around_loss`], e.g. when completions are scored, it is returned as it is.
        """
        inputs, stack = self._inputs, self._stack
        if inputs is None or stack is None:
            return result
        self._inputs = None  # only the first log-probs are the policy's
        if not any(inputs.get(name) is not None for name in (OLD, OLD_SUM, REFERENCE)):
            return result  # on policy and without a KL: every ratio is 1, and there is nothing to pay for
        inactive = completion_mask(inputs) == 0  # type: ignore[arg-type]
        for name in (OLD, REFERENCE):  # TRL reads them after the log-probs
            if inputs.get(name) is not None:
                inputs[name] = _Selected.apply(inputs[name], inactive)
        log_probs, entropies, *others = result
        log_probs = _Selected.apply(log_probs, inactive)
        entropies = None if entropies is None else _Selected.apply(entropies, inactive)
        on_term = partial(self._add_term, inputs.get(ROWS)) if self._counted else None
        stack.enter_context(_Bounding(self.bound, inputs.get(REFERENCE), inactive, on_term))
        return log_probs, entropies, *others

    def _add_term(self, rows: Tensor | None, name: str, log_ratios: Tensor, beyond: Tensor) -> None:
        kept = (None, None, None) if self._has_overflowed else (log_ratios, beyond, rows)
        self._terms.append(_CountedTerm(name, beyond.sum(), self._num_losses - 1, *kept))

    def add_readings(self, group: AccumulationGroup) -> None:
        """Has the counts of a step read with everything else that is read at its end."""
        for term in self._take_terms():
            group.read_later(term.num_dev, partial(self._count, term))

    def _take_terms(self) -> list[_CountedTerm]:
        terms, self._terms, self._num_losses = self._terms, [], 0
        return terms

    def _count(self, term: _CountedTerm, number: float) -> None:
        self.counts[term.name] = self.counts.get(term.name, 0) + int(number)
        if not number or self._has_overflowed:
            return
        self._has_overflowed = True
        first = term.find_first(self.bound)
        if first is not None and self.on_first is not None:
            self.on_first(first)

    def take_counts(self) -> dict[str, int]:
        """Returns how many `"ratio"`s (a token's or a sequence's) and `"kl"` gaps of this rank were bounded since the last
        call, and starts again; `{}` if there was nothing to bound. One host read if a loss was not read with its step."""
        terms = self._take_terms()
        for term, number in zip(terms, read_host([term.num_dev for term in terms]), strict=True):
            self._count(term, number)
        counts, self.counts = self.counts, {}
        return counts
