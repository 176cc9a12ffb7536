"""Failures from field reports, planted in a stock or guarded trainer."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from trl import SFTTrainer

from .tasks.small_llama import MASKED


def find_third(num: int) -> int:
    """Returns the step a third of the way through `num` steps, and not the first if there are others; 0 if unknown."""
    return max(0, min(max(num // 3, 1), num - 1))


def mean_over_answers(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean over samples of each sample's mean token loss. It is 0 / 0 for a sample without labels."""
    targets = labels[:, 1:]
    mask = targets != MASKED
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -((log_probs * mask).sum(1) / mask.sum(1)).mean()


class AnswerTrainer(SFTTrainer):
    """An SFT trainer with a custom loss, as users write them: it fails on a sample whose labels are all masked."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = mean_over_answers(outputs.logits, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


@dataclass(eq=False)
class CutOffAnswer:
    """A collator that masks the labels of the first sample in one batch, as if it was cut off before its answer."""

    collator: Callable[[list], dict[str, Tensor]]
    batch: int
    num_made: int = 0

    def __call__(self, examples: list) -> dict[str, Tensor]:
        made = self.collator(examples)
        if self.num_made == self.batch:
            made["labels"][0] = MASKED
        self.num_made += 1
        return made


def blank_scores(model: Any, generation: int) -> None:
    """Makes the scores of one sequence NaN in one call of `generate` of a model, which may have adapters."""
    generate, calls = model.generate, count()

    def blank(module: nn.Module, args: tuple, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[0] = torch.nan
        return scores

    def generate_blanked(*args: object, **kwargs: object) -> object:
        if next(calls) != generation:
            return generate(*args, **kwargs)
        handle = model.get_output_embeddings().register_forward_hook(blank)
        try:
            return generate(*args, **kwargs)
        finally:
            handle.remove()

    model.generate = generate_blanked
