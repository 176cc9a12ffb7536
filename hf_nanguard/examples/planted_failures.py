"""Failures that people met, planted in a trainer, stock or guarded, so that both can be seen under the same one."""

from typing import Any

import torch
from torch import Tensor

MASKED = -100


def find_third(num: int) -> int:
    """Returns which of a number of steps is a third of the way, but not the first if there are others; 0 if unknown."""
    return max(0, min(max(num // 3, 1), num - 1))


class CutOff:
    """A collator as it was, but in one batch a sample has been cut off before its answer: all its labels are masked.

    Args:
        collator (`Callable`):
            The trainer's own.
        batch (`int`):
            Which batch, counted from 0.
    """

    def __init__(self, collator: Any, batch: int):
        self.collator = collator
        self.batch = batch
        self.num_made = 0

    def __call__(self, examples: list) -> Any:
        made = self.collator(examples)
        if self.num_made == self.batch:
            made["labels"][0] = MASKED
        self.num_made += 1
        return made


def cut_off_answer(trainer: Any, batch: int) -> None:
    """Plants a sample without an answer in one batch of a trainer."""
    trainer.data_collator = CutOff(trainer.data_collator, batch)


def blank_scores(model: Any, generation: int) -> None:
    """Makes the scores of one sequence NaN throughout one generation of a model.

    Args:
        model (`PreTrainedModel`):
            The model that generates; also one with adapters.
        generation (`int`):
            Which call of `generate`, counted from 0.
    """
    generate, num_calls = model.generate, 0

    def blank(module: Any, args: Any, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[0] = torch.nan
        return scores

    def generate_blanked(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls - 1 != generation:
            return generate(*args, **kwargs)
        handle = model.get_output_embeddings().register_forward_hook(blank)
        try:
            return generate(*args, **kwargs)
        finally:
            handle.remove()

    model.generate = generate_blanked
