"""Losses that stay finite where the usual forms do not, and keep a gradient where a clamp would remove it.

Each documents what it does with a non-finite input. In general, finite inputs never give a non-finite result, and
non-finite inputs are not hidden, because the guard must see them. The two losses over a vocabulary are in
`token_losses.py`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from .token_losses import check_positive, widen
from .token_losses import distillation_loss as distillation_loss
from .token_losses import masked_cross_entropy as masked_cross_entropy


def dtype_eps(dtype: torch.dtype, eps: float = 1e-8) -> float:
    """Returns an epsilon that a dtype can represent: the given one, or the smallest normal number if that is larger.

    The usual 1e-8 is 0 in float16, so a division that it should protect is 0/0 again; subnormal numbers, which devices may
    flush to zero, are avoided too. It protects a division by a number near zero; added to numbers near one, any such
    epsilon is lost in rounding.

    Args:
        dtype (`torch.dtype`):
            A floating point dtype.
        eps (`float`, *optional*, defaults to `1e-8`):
            The epsilon to use if the dtype can represent it.

    Example:
        >>> dtype_eps(torch.float16), dtype_eps(torch.bfloat16)
        (6.103515625e-05, 1e-08)
    """
    return max(eps, torch.finfo(dtype).tiny)


def _find_directions(vectors: Tensor, eps: float) -> Tensor:
    """Returns vectors scaled to length 1; a vector of length `eps` or less has no direction and is not scaled."""
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
    """Mean squared error divided by the mean square of the target: predicting zero gives 1 at every scale.

    Squares are summed in float32, after division by the largest magnitude of the target if that is above 1: the scale
    cancels, so large values do not overflow. If the mean square of the target is at most `eps`, the error is not divided,
    because dividing by `eps` would make the gradient 1e8 times as large.

    Args:
        prediction (`Tensor`), target (`Tensor`):
            Of the same shape. No gradient reaches the target. Non-finite values that count make the loss non-finite.
        mask (`Tensor`, *optional*):
            True (or not 0) where a value counts; the shape of the prediction or of its first dimensions. Values that do
            not count, including NaN, affect neither loss nor gradient.
        eps (`float`, *optional*):
            See above; by default `dtype_eps` of the dtype in which squares are summed, 1e-8.
        directions (`bool`, *optional*, defaults to `False`):
            Compare directions only: vectors of the last dimension are scaled to length 1 on both sides first, so each
            contributes `2 - 2 * cosine`. A vector of length `eps` or less is not scaled.

    Returns:
        `Tensor`: a scalar, float32 (float64 for float64); 0 with a graph if no value counts.

    Raises:
        ArgumentError: if shapes do not match.

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
        # before anything is computed from them, so that a zero gradient never meets a NaN
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
    # the true values are energy * scale^2 and error * scale^2, but the square of a scale may overflow
    return error / torch.where(energy * scale > eps / scale, energy, 1 / scale / scale)


def bounded_loss(loss: Tensor, bound: float) -> Tensor:
    """Makes a loss grow only logarithmically above a bound: unchanged below, `bound * (1 + log(loss / bound))` above.

    A clamp has no gradient above its bound, so nothing is learned from exactly the batches with the largest loss. This form
    is monotone, has a continuous slope, and above the bound scales the gradient by `bound / loss`, as clipping would. The
    largest float32 becomes less than 89 bounds plus `bound * log(1 / bound)`. NaN and inf are unchanged, because hiding
    them would hide a fault from the guard.

    Args:
        loss (`Tensor`):
            A scalar or any number of losses; each is bounded separately. Negative ones are unchanged.
        bound (`float`):
            The loss above which growth is logarithmic.

    Raises:
        ArgumentError: if the bound is not positive and finite.

    Example:

    ```python
    loss = bounded_loss(masked_cross_entropy(logits, labels), bound=6.0)
    loss.backward()
    ```
    """
    check_positive("bound", bound)
    over = loss > bound
    large = torch.where(over, widen(loss), bound)  # before the logarithm, which never gets 0 or less
    return torch.where(over, (bound * (1 - math.log(bound) + large.log())).to(loss.dtype), loss)


def clamp_weight(weight: Tensor, max: float = 100.0) -> Tensor:
    """Clamps a loss weight, e.g. of a diffusion timestep or an importance ratio, from above.

    inf becomes `max`; NaN and negative weights are unchanged. There is no gradient above `max`, which is right for a given
    weight and wrong for a learned one: use [`soft_cap`] for that. Detach a weight that is the result of a division: a clamp
    cannot prevent 0 * inf in the backward of what comes before it.

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
    check_positive("max", max)
    return weight.clamp(max=max)


class _SoftCap(torch.autograd.Function):
    """Saves only the input, in its own dtype; the slope `1 / cosh^2` has no cancellation, unlike `1 - tanh^2`."""

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
    """Caps logits smoothly: `cap * tanh(logits / cap)`, nearly unchanged far below the cap, never beyond it.

    A hard clamp gives logits beyond its bound no gradient, so they stay there. Here the order is preserved, up to rounding
    near the cap, and the slope decreases as `4 exp(-2 |x| / cap)`, computed without cancellation: in float32 it is not 0 up
    to 43 caps instead of 9. Choose a cap above normal logits (30 to 50). Arithmetic is in float32; only the logits
    themselves are saved for the backward. Non-finite logits are unchanged and get no gradient: -inf stays a mask, NaN and
    inf stay visible. It changes the model: use the same cap when sampling.

    Args:
        logits (`Tensor`):
            Any shape and float dtype.
        cap (`float`):
            The largest magnitude.

    Raises:
        ArgumentError: if the cap is not positive and finite.

    Example:

    ```python
    logits = soft_cap(model(input_ids).logits, cap=30.0)
    loss = masked_cross_entropy(logits, labels)
    ```
    """
    check_positive("cap", cap)
    return _SoftCap.apply(logits, cap)
