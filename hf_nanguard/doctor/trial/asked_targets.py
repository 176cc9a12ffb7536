"""Which token each position of a batch is asked to predict: by the labels, or, where the loss is the user's own code, by the
gradient of that loss, which is negative for the token it asks for."""

from typing import Any

import torch
from torch import Tensor, nn

from ...hf.compat.own_loss import find_own_loss
from .law_result import NotApplicable
from .trial_bench import TrialBench
from .trial_rows import MASKED


def has_own_loss(bench: TrialBench) -> bool:
    """Returns whether code of the user's computes the loss, so that its labels can mean anything."""
    return bool(find_own_loss(bench.trainer))


def find_targets(bench: TrialBench, batch: Any) -> Tensor:
    """Returns for each position the token that should come next, -100 for none."""
    if has_own_loss(bench):
        return _read_gradient(bench, batch)
    if "shift_labels" in batch:
        return batch["shift_labels"]
    target = batch["labels"].roll(-1, 1)
    target[:, -1] = MASKED
    return target


def _read_gradient(bench: TrialBench, batch: Any) -> Tensor:
    kept: list[Tensor] = []

    def note(module: nn.Module, args: object, output: object) -> None:
        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.requires_grad:
            kept.append(logits)

    with bench.model.register_forward_hook(note), bench.steady():
        loss = bench.compute_loss(batch)
    if not kept or kept[0].shape[:2] != batch["input_ids"].shape:
        raise NotApplicable("its own loss does not use the logits of its inputs")
    (gradient,) = torch.autograd.grad(loss, [kept[0]], allow_unused=True)
    if gradient is None:
        raise NotApplicable("its own loss does not use the logits of its inputs")
    least, target = gradient.min(-1)
    return target.masked_fill(least >= 0, MASKED).to(batch["input_ids"].device)
