"""Losses that stay finite where the usual forms break, and keep a gradient where a clamp would kill it.

Each says what it does with a non-finite input. The rule is that arithmetic must not make one out of healthy numbers,
and that one which is there already is not hidden: the guard has to see it. The two losses over a vocabulary live in
`token_loss`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from .token_losses import distillation_loss as distillation_loss
from .token_losses import masked_cross_entropy as masked_cross_entropy
from .token_losses import widen


def _check_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ArgumentError(f"{name} must be positive and finite, got {value!r}.")


def dtype_eps(dtype: torch.dtype, eps: float = 1e-8) -> float:
    """Returns an epsilon that a dtype can hold: the given one, or the smallest normal number where that is larger.

    The usual 1e-8 is 0 in float16, so a division it should guard is 0/0 again; subnormal numbers, which devices may
    flush to zero, are avoided too. It guards a division by something near zero; added to numbers near one it is lost
    in rounding, as any such epsilon.

    Args:
        dtype (`torch.dtype`):
            A floating point dtype.
        eps (`float`, *optional*, defaults to `1e-8`):
            What is wanted.

    Example:
        >>> dtype_eps(torch.float16), dtype_eps(torch.bfloat16)
        (6.103515625e-05, 1e-08)
    """
    return max(eps, torch.finfo(dtype).tiny)


def _find_directions(vectors: Tensor, eps: float) -> Tensor:
    """Returns vectors of length 1; one that is not longer than `eps` has no direction and stays as it is."""
    largest = vectors.detach().abs().amax(-1, keepdim=True)
    scaled = vectors / torch.where(largest == 0, 1.0, largest)  # squares do not overflow, and the direction is the same
    length = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    # a NaN is not at most eps, so it stays visible
    return torch.where(length * largest <= eps, vectors, scaled / torch.where(length == 0, 1.0, length))


def normalized_mse(
    prediction: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    eps: float | None = None,
    directions: bool = False,
) -> Tensor:
    """Mean squared error divided by the mean square of the target: 1 is what predicting zero costs, whatever the scale.

    Squares are summed in float32, after division by the target's largest magnitude if that is above 1: scale cancels,
    so large values do not overflow. A target without energy (mean square of at most `eps`) gives no scale, so the error is not
    divided there; dividing by `eps` would make the gradient 1e8 times as large.

    Args:
        prediction (`Tensor`), target (`Tensor`):
            Of the same shape. No gradient reaches the target. Non-finite values that count stay visible.
        mask (`Tensor`, *optional*):
            True (or not 0) where a value counts; the shape of the prediction or of its first dimensions. What is
            elsewhere, NaN too, reaches neither loss nor gradient.
        eps (`float`, *optional*):
            See above; by default `dtype_eps` of the dtype in which squares are summed, 1e-8.
        directions (`bool`, *optional*, defaults to `False`):
            Compare directions only: vectors of the last dimension are brought to length 1 on both sides first, so each
            costs `2 - 2 * cosine`. One that is not longer than `eps` stays as it is.

    Returns:
        `Tensor`: a scalar, float32 (float64 for float64); 0 with a graph if nothing counts.

    Raises:
        ArgumentError: if shapes do not fit.

    Example:

    ```python
    latents, targets = model(batch), encoder(batch).detach()
    loss = normalized_mse(latents, targets, mask=attention_mask)
    ```
    """
    if prediction.shape != target.shape:
        raise ArgumentError(
            f"prediction and target must have the same shape, got {tuple(prediction.shape)} and {tuple(target.shape)}."
        )
    guess, goal = widen(prediction), widen(target.detach())
    eps = dtype_eps(goal.dtype) if eps is None else eps
    number = goal.new_tensor(float(goal.numel()))
    if mask is not None:
        if mask.shape != prediction.shape[: mask.ndim]:
            raise ArgumentError(
                f"mask must have the shape of the prediction or of its first dimensions, {tuple(prediction.shape)}, got "
                f"{tuple(mask.shape)}."
            )
        counted = (mask != 0).reshape(mask.shape + (1,) * (prediction.ndim - mask.ndim))
        # before anything is computed of them: a zero gradient that comes back stays a zero
        guess, goal = torch.where(counted, guess, 0.0), torch.where(counted, goal, 0.0)
        number = counted.expand(prediction.shape).sum()
    if not prediction.numel():
        return guess.sum()
    if directions:
        guess, goal = _find_directions(guess, eps), _find_directions(goal, eps)
    gaps = guess - goal
    number = number.clamp(min=1)
    scale = goal.abs().amax().clamp(min=1.0)
    energy = (goal / scale).square().sum() / number
    error = (gaps / scale).square().sum() / number
    # energy * scale^2 is the true one, and error * scale^2 the plain error; squares of a scale may overflow
    return error / torch.where(energy * scale > eps / scale, energy, 1 / scale / scale)


def bounded_loss(loss: Tensor, bound: float) -> Tensor:
    """Lets a loss grow only logarithmically above a bound: unchanged below, `bound * (1 + log(loss / bound))` above.

    A clamp has no gradient above its bound, so the batches that need it most teach nothing. This form is monotone, has
    a continuous slope, and above the bound scales the gradient by `bound / loss`, as clipping would. The largest
    float32 becomes less than 89 bounds plus `bound * log(1 / bound)`. NaN and inf stay what they are: the guard handles
    them, and a bound that swallowed them would hide a fault.

    Args:
        loss (`Tensor`):
            A scalar or any number of losses; each is bounded by itself. Negative ones are unchanged.
        bound (`float`):
            Where the logarithm begins.

    Raises:
        ArgumentError: if the bound is not positive and finite.

    Example:

    ```python
    loss = bounded_loss(masked_cross_entropy(logits, labels), bound=6.0)
    loss.backward()
    ```
    """
    _check_positive("bound", bound)
    over = loss > bound
    large = torch.where(over, widen(loss), bound)  # selected before the logarithm: log of 0 or less is never taken
    return torch.where(over, (bound * (1 - math.log(bound) + large.log())).to(loss.dtype), loss)


def clamp_weight(weight: Tensor, max: float = 100.0) -> Tensor:
    """Clamps a loss weight, e.g. of a diffusion timestep or an importance ratio, from above.

    inf becomes `max`; NaN, which has no size, stays visible, and so do negative weights. It has no gradient above `max`,
    which is right for a weight that is given and wrong for one that is learned: bound that by [`soft_cap`]. Detach a
    weight that comes out of a division: a clamp cannot keep 0 * inf out of what lies before it.

    Args:
        weight (`Tensor`):
            Any shape and float dtype.
        max (`float`, *optional*, defaults to `100.0`):
            The largest weight.

    Raises:
        ArgumentError: if `max` is not positive and finite.

    Example:

    ```python
    weight = clamp_weight(1.0 / noise_level.square())
    loss = (weight * (prediction - target).square().mean(-1)).mean()
    ```
    """
    _check_positive("max", max)
    return weight.clamp(max=max)


class _SoftCap(torch.autograd.Function):
    """Keeps only the input, in its own dtype; its slope, `1 / cosh^2`, does not cancel as `1 - tanh^2` does."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.cap = cap
        capped = ((widen(logits) / cap).tanh_() * cap).to(logits.dtype)
        return torch.where(logits.isfinite(), capped, logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        [logits] = ctx.saved_tensors
        decay = (widen(logits).abs() / ctx.cap).mul_(-2).exp_()
        slope = 4 * decay / (1 + decay).square()
        return torch.where(logits.isfinite(), widen(grad) * slope, 0.0).to(logits.dtype), None


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Caps logits smoothly: `cap * tanh(logits / cap)`, nearly unchanged well inside, never beyond `cap`.

    A hard clamp leaves logits beyond its bound without a gradient for ever. Here order is kept, up to rounding near the
    cap, and the slope falls off as `4 exp(-2 |x| / cap)`, computed without cancellation: in float32 it lasts to 43 caps
    instead of 9. Choose a cap above healthy logits (30 to 50). Arithmetic is float32; only the logits themselves are kept
    for the backward. What is not finite is not capped: -inf stays a mask, and NaN and inf stay visible, with no
    gradient. It changes the model: use the same cap when sampling.

    Args:
        logits (`Tensor`):
            Any shape and float dtype.
        cap (`float`):
            The bound.

    Raises:
        ArgumentError: if the cap is not positive and finite.

    Example:

    ```python
    logits = soft_cap(model(input_ids).logits, cap=30.0)
    loss = masked_cross_entropy(logits, labels)
    ```
    """
    _check_positive("cap", cap)
    return _SoftCap.apply(logits, cap)
