"""Completions of an online trainer, with the probabilities they were drawn with and the rewards they got."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...boundary import Boundary
from ...hf.compat.generation import PROCESSORS, Override, find_seams, read_processor_call
from ...hf.compat.model_config import find_tokenizer
from ...hf.compat.online_trainer import Completions, generate_batch, replaced_scoring
from ...hf.generation.guard_generation import find_generator

MAX_TOKENS = 16


@dataclass
class Sampled:
    """Scored completions, with log-probabilities of the drawn tokens."""

    batch: Completions  # as the trainer's loss gets it
    prompts: Tensor | None  # what the sampler was given
    drawn: Tensor | None  # as drawn
    scaled: Tensor | None  # with temperature, but without top-p and the like
    plain: Tensor | None  # with neither
    rewards: Tensor | None  # one for each completion
    is_recorded: bool  # whether `drawn` was recorded where tokens were drawn, not reported by an engine


class _Scores:
    """Records scores on their way through a list of logits processors."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self.prompts: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.prompts is None:
            self.prompts = input_ids.clone()
        self.steps.append(scores.detach().clone())
        return scores

    def of(self, ids: Tensor, temperature: float = 1.0) -> Tensor | None:
        """Returns the log-probabilities of tokens, `None` if they were not all drawn here."""
        size = ids.shape[1]
        if len(self.steps) < size or any(len(step) != len(ids) for step in self.steps):
            return None
        logps = torch.stack([(step.float() / temperature).log_softmax(-1) for step in self.steps[:size]], 1)
        return logps.gather(2, ids.unsqueeze(2)).squeeze(2)


class _Stopper:
    """Makes every second completion end at a given place."""

    def __init__(self, token: int, stop_at: int):
        self.token, self.left = token, stop_at

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left != 0:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token] = 0.0
        return torch.where((torch.arange(len(scores), device=scores.device) % 2 == 0).unsqueeze(1), scores, forced)


@contextmanager
def _recorded(
    trainer: Any, before: _Scores, after: _Scores, temperatures: list[float], stoppers: list[_Stopper]
) -> Iterator[None]:
    """Records scores before and after all processors of the model's `generate` inside the block, and lets `stoppers` change them."""
    generator: Any = find_generator(trainer.model)
    seam = None if generator is None else find_seams(generator).get(PROCESSORS)

    def add(original: Callable[..., Any], *args: object, **kwargs: object) -> object:
        temperatures.append(float(read_processor_call(args, kwargs)[0].temperature or 1.0))
        processors = original(*args, **kwargs)
        return type(processors)([before, *processors, after, *stoppers])

    override = None if seam is None else Override(generator, seam, add, Boundary())
    try:
        yield
    finally:
        if override is not None:
            override.undo()


def sample_completions(trainer: Any, rows: list[Any], stop_at: int | None = None) -> Sampled:
    """Lets a trainer sample and score completions of the shortest prompts; with `stop_at`, every second one ends at that place."""
    stop = getattr(find_tokenizer(trainer.processing_class), "eos_token_id", None)
    stoppers = [] if stop_at is None or not isinstance(stop, int) else [_Stopper(stop, stop_at)]
    before, after = _Scores(), _Scores()
    temperatures: list[float] = []
    rewards: list[Tensor] = []

    def score(calculate: Callable[..., Tensor], *args: object, **kwargs: object) -> Tensor:
        rewards.append(calculate(*args, **kwargs))
        return rewards[-1]

    short = sorted(rows, key=lambda row: len(str(row.get("prompt"))))
    with ExitStack() as stack:
        stack.enter_context(_recorded(trainer, before, after, temperatures, stoppers))
        stack.enter_context(replaced_scoring(trainer, score, Boundary()))
        batch = generate_batch(trainer, short, MAX_TOKENS)
    ids, given = batch["completion_ids"], batch.get("sampling_per_token_logps")
    total = None
    if rewards:
        weights = trainer.reward_weights.to(rewards[0].device)
        total = (rewards[0] * weights.unsqueeze(0)).nansum(1)
    return Sampled(
        batch, after.prompts, after.of(ids) if given is None else given,
        before.of(ids, temperatures[0] if temperatures else 1.0), before.of(ids), total, given is None,
    )  # fmt: skip
