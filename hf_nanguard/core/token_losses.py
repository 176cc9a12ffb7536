"""Losses over a vocabulary: float32 arithmetic in chunks of tokens, gradients in closed form.

Half-precision logits are usually copied to float32 before the loss, and autograd saves the log-softmax of the copy: with a
large vocabulary that is the memory peak of the whole step. Here only one chunk of tokens at a time is in float32; the
gradient, softmax minus target, is computed from the logits in the backward. That costs a second pass of exponentials and
saves the two copies. It is an `autograd.Function` rather than a checkpoint because the closed form needs no graph, so an
ignored token cannot produce 0 * NaN: rows that do not count are filled, never multiplied. Nothing is read on the host. The
backward consists of plain operations, so second derivatives exist; for them everything is in float32 and ignored tokens
must be finite.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError

CHUNK_ELEMENTS = 2**22
LOG_FLOOR = -(2.0**17)  # the smallest log-probability that float16 logits can give


def _wide(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def widen(values: Tensor) -> Tensor:
    """Returns `values` in at least float32."""
    return values.to(_wide(values))


def _chunks(rows: Tensor, chunk_size: int | None) -> Iterator[slice]:
    size = chunk_size or max(1, CHUNK_ELEMENTS // max(1, rows.shape[-1]))
    return (slice(start, start + size) for start in range(0, len(rows), size))


def check_positive(name: str, value: float) -> None:
    """Raises an [`ArgumentError`] unless the value is positive and finite."""
    if not (value > 0 and math.isfinite(value)):
        raise ArgumentError(f"{name} must be positive and finite, got {value!r}.")


def _check_chunk(chunk_size: int | None) -> None:
    if chunk_size is not None and chunk_size < 1:
        raise ArgumentError(f"chunk_size must be at least 1 token, got {chunk_size!r}. Leave it out for the default.")


def _count(counted: Tensor, num_items: Tensor | int | None) -> Tensor:
    """Returns the divisor of the sum, at least 1, on the device."""
    number = counted.sum() if num_items is None else torch.as_tensor(num_items, device=counted.device)
    return number.clamp(min=1)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, counted: Tensor, chunk_size: int | None) -> Tensor:
        targets = labels.masked_fill(~counted, 0).unsqueeze(-1)
        total = logits.new_zeros((), dtype=_wide(logits))
        for part in _chunks(logits, chunk_size):
            rows = logits[part].log_softmax(-1, dtype=total.dtype)
            losses = rows.gather(-1, targets[part]).squeeze(-1)
            total -= losses.masked_fill_(~counted[part], 0.0).sum()
        ctx.save_for_backward(logits, targets, counted)
        ctx.chunk_size = chunk_size
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, targets, counted = ctx.saved_tensors
        result = torch.empty_like(logits)
        minus = torch.full_like(targets, -1, dtype=grad.dtype)
        for part in _chunks(logits, ctx.chunk_size):
            rows = logits[part].softmax(-1, dtype=grad.dtype)
            rows = rows.scatter_add(-1, targets[part], minus[part]) * grad
            result[part] = rows.masked_fill_(~counted[part].unsqueeze(-1), 0.0)
        return result, None, None, None


def masked_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    num_items: Tensor | int | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Cross-entropy over the labels that count; 0, with a graph and a zero gradient, if none does.

    Equal to `F.cross_entropy` in float32 up to rounding, with three differences: without any label it is 0 instead of 0/0,
    the logits of an ignored position, including NaN, affect neither loss nor gradient, and half-precision logits are never
    copied to float32 as a whole. A non-finite logit at a position that counts makes the loss non-finite, and so does a
    label whose logit is masked with -inf: the loss is inf.

    Logits and labels must be aligned. For a causal model shift the labels, not the logits, which would be copied.

    Args:
        logits (`Tensor`):
            `[..., vocabulary]`, any float dtype.
        labels (`Tensor`):
            `[...]`, token ids.
        ignore_index (`int`, *optional*, defaults to `-100`):
            The label that does not count.
        num_items (`Tensor` or `int`, *optional*):
            The divisor of the sum, e.g. the Trainer's `num_items_in_batch`; by default the number of labels that count.
        chunk_size (`int`, *optional*):
            How many tokens are in float32 at a time; about 4 million logits by default.

    Returns:
        `Tensor`: a scalar, float32 (float64 for float64 logits).

    Raises:
        ArgumentError: if shapes do not match.

    Example:

    ```python
    logits = model(input_ids).logits
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    loss = masked_cross_entropy(logits, shifted)
    ```
    """
    _check_chunk(chunk_size)
    if logits.shape[:-1] != labels.shape:
        raise ArgumentError(
            f"labels must have the shape of logits without the vocabulary, {tuple(logits.shape[:-1])}, got "
            f"{tuple(labels.shape)}. Align them first."
        )
    flat = labels.reshape(-1)
    counted = flat != ignore_index
    total = _CrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), flat, counted, chunk_size)
    return total / _count(counted, num_items)


def _log_probs(logits: Tensor, temperature: float) -> Tensor:
    """Returns log-probabilities in float32. The maximum is subtracted first: dividing large logits would lose digits."""
    rows = widen(logits)
    return ((rows - rows.amax(-1, keepdim=True)) / temperature).log_softmax(-1)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, counted: Tensor, temperature: float, chunk_size: int | None
    ) -> Tensor:
        total = student.new_zeros((), dtype=_wide(student))
        for part in _chunks(student, chunk_size):
            ours = _log_probs(student[part], temperature)
            theirs = _log_probs(teacher[part], temperature)
            probs = theirs.exp()
            gaps = (theirs - ours.masked_fill_(ours == -math.inf, LOG_FLOOR)).masked_fill_(probs == 0, 0.0)
            losses = gaps.mul_(probs).sum(-1).clamp_(min=0.0)  # negative only by rounding
            total += losses.masked_fill_(~counted[part], 0.0).sum().to(total.dtype)
        ctx.save_for_backward(student, teacher, counted)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        return total * temperature**2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        student, teacher, counted = ctx.saved_tensors
        result = torch.empty_like(student)
        scale = grad * ctx.temperature
        for part in _chunks(student, ctx.chunk_size):
            ours = _log_probs(student[part], ctx.temperature).exp()
            gaps = ours - _log_probs(teacher[part], ctx.temperature).exp_()
            result[part] = (gaps * scale).masked_fill_(~counted[part].unsqueeze(-1), 0.0)
        return result, None, None, None, None


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    num_items: Tensor | int | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """KL divergence of the student from the teacher at a temperature, times its square, averaged over tokens.

    `T^2 * mean over tokens of sum p * (log p - log q)` with `p = softmax(teacher / T)` and `q = softmax(student / T)`. The
    square keeps the gradients at the same scale for every temperature. It is computed in log space from the logits minus
    their maximum, so saturated logits stay finite and the gradient, `T * (q - p)`, is bounded by T for each logit.

    Masks: a token with a teacher logit of -inf has probability 0 and adds nothing (0 * -inf counts as 0). A token with a
    student logit of -inf to which the teacher gives probability would make the loss infinite; it counts with a
    log-probability of -131072, so the loss is finite, but so large that the disagreement of the masks is noticed. A
    position at which either has only -inf does not count. NaN and +inf make the loss non-finite. No gradient reaches the
    teacher.

    Args:
        student_logits (`Tensor`), teacher_logits (`Tensor`):
            `[..., vocabulary]`, of the same shape; the dtypes may differ.
        temperature (`float`, *optional*, defaults to `2.0`):
            The divisor of the logits.
        mask (`Tensor`, *optional*):
            `[...]`, true (or not 0) where a token counts, e.g. `labels != -100`. Other tokens, including NaN, have no effect.
        num_items (`Tensor` or `int`, *optional*):
            The divisor of the sum; by default the number of tokens that count.
        chunk_size (`int`, *optional*):
            How many tokens are in float32 at a time; about 4 million logits by default.

    Returns:
        `Tensor`: a scalar, float32 (float64 for a float64 student); 0 with a graph if no token counts.

    Raises:
        ArgumentError: if shapes do not match or the temperature is not positive.

    Example:

    ```python
    with torch.no_grad():
        teacher_logits = teacher(input_ids).logits
    loss = 0.9 * ce + 0.1 * distillation_loss(student(input_ids).logits, teacher_logits, mask=labels != -100)
    ```
    """
    _check_chunk(chunk_size)
    check_positive("temperature", temperature)
    if student_logits.shape != teacher_logits.shape:
        raise ArgumentError(
            f"student_logits and teacher_logits must have the same shape, got {tuple(student_logits.shape)} and "
            f"{tuple(teacher_logits.shape)}. Cut both to the tokens they share; different tokenizers must be aligned."
        )
    if mask is not None and mask.shape != student_logits.shape[:-1]:
        raise ArgumentError(
            f"mask must have the shape of the logits without the vocabulary, {tuple(student_logits.shape[:-1])}, got "
            f"{tuple(mask.shape)}."
        )
    student = student_logits.reshape(-1, student_logits.shape[-1])
    teacher = teacher_logits.detach().reshape(student.shape)
    # a NaN is not equal to -inf, so it counts
    counted = (student.detach().amax(-1) != -math.inf) & (teacher.amax(-1) != -math.inf)
    counted = counted if mask is None else counted & (mask.reshape(-1) != 0)
    return _Divergence.apply(student, teacher, counted, temperature, chunk_size) / _count(counted, num_items)
