"""The private names of TRL's online trainers that we use, each with the condition under which it can be removed."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from ...boundary import Boundary
from .accelerate import replaced_method
from .trainer_protocol import HostTrainer

Completions = dict[str, Any]
"""The batch of an online trainer: prompts, completions and what was computed for them, by TRL's names."""
# Keys of an online trainer's batch: log-probs of the policy that sampled, their sums (RLOO), and those of the reference.
OLD, OLD_SUM, REFERENCE = "old_per_token_logps", "old_logps", "ref_per_token_logps"
SCORING = "_calculate_rewards"
POLICY_LOGPS = "_get_per_token_logps_and_entropies"


class OnlineTrainer(HostTrainer, Protocol):
    """A TRL online trainer. One without reward functions has no `reward_funcs` (distillation)."""

    reward_funcs: list[Callable[..., object]]  # functions and reward models


def name_reward_functions(trainer: HostTrainer) -> list[str]:
    """Returns the names of a trainer's reward functions, as in TRL's metrics; a model without a name there is called by its
    class. `[]` for a trainer without reward functions.

    Can go when TRL names every reward function.
    """
    functions = vars(trainer).get("reward_funcs", [])
    known = vars(trainer).get("reward_func_names") or [""] * len(functions)
    return [name or type(function).__name__ for name, function in zip(known, functions, strict=True)]


@contextmanager
def replaced_reward_functions(trainer: OnlineTrainer, functions: list[Callable[..., object]]) -> Iterator[None]:
    """Makes a TRL trainer call other reward functions inside the block.

    Can go when TRL has a hook for what its reward functions return.
    """
    before, trainer.reward_funcs = trainer.reward_funcs, functions
    try:
        yield
    finally:
        trainer.reward_funcs = before


def is_policy_loss(frame: FrameType) -> bool:
    """Returns whether a frame is TRL's own policy loss, not a function that it calls.

    Can go when TRL bounds its log-ratios, or computes them in a separate method.
    """
    return frame.f_code.co_name == "_compute_loss" and frame.f_globals.get("__name__", "").startswith("trl.")


def find_own_scoring(trainer: HostTrainer) -> str | None:
    """Returns the name of the user's own `_calculate_rewards`, `None` if it is TRL's.

    Can go when TRL has a public method for it.
    """
    places = [
        vars(trainer),
        *(vars(c) for c in type(trainer).__mro__ if not c.__module__.startswith(("trl.", "hf_nanguard."))),
    ]
    own = next((place[SCORING] for place in places if SCORING in place), None)
    return None if own is None else getattr(own, "__qualname__", SCORING)  # a callable object has none


def replaced_scoring(
    trainer: HostTrainer, score: Callable[..., Tensor], boundary: Boundary
) -> AbstractContextManager[None]:
    """Makes a TRL trainer call `score(calculate, ...)` in place of its `_calculate_rewards`, which is passed as `calculate`
    even if a subclass has overridden it.

    Can go together with `find_own_scoring`.
    """
    if not hasattr(trainer, SCORING):  # e.g. distillation, which does not score completions
        return nullcontext()
    return replaced_method(trainer, SCORING, partial(boundary.overriding, "rewards", score))


def split_images(batch: Completions) -> Completions:
    """Returns a shallow copy of a TRL online trainer's batch with image fields as lists of one entry per completion; a model
    may keep the patches of all images in one tensor.

    Can go when TRL's batches have one entry per completion.
    """
    from trl.trainer.utils import split_pixel_values_by_grid

    return dict(split_pixel_values_by_grid(batch))


def join_images(batch: Completions) -> Completions:
    """Undoes [`split_images`].

    Can go together with it.
    """
    from trl.trainer.utils import unsplit_pixel_values_by_grid

    return unsplit_pixel_values_by_grid(batch)


def is_between_generations(trainer: HostTrainer) -> bool:
    """Returns whether the next micro-batch of a trainer begins with a new generation; always true for one that generates none.

    Can go when TRL says when it generates.
    """
    known, steps = vars(trainer), getattr(trainer.args, "steps_per_generation", None)
    if known.get("_buffered_inputs") is None or steps is None:  # without that argument, each optimizer step generates
        return True
    return known["_step"] % (steps * known["num_iterations"]) == 0


class GenerationBuffer:
    """The completions that an online trainer has yet to use, as a part of a snapshot: those of a policy that was rewound are
    dropped, and the next micro-batch generates.

    Can go together with `is_between_generations`.
    """

    def __init__(self, trainer: HostTrainer):
        self.trainer = trainer

    def copy(self, reused: object) -> None:
        return None

    def restore(self, saved: None, step: int) -> None:
        if "_buffered_inputs" in vars(self.trainer):
            vars(self.trainer)["_buffered_inputs"] = None


def is_online(trainer: HostTrainer) -> bool:
    """Returns whether a TRL trainer samples completions itself.

    Can go when TRL's online trainers have a common base class.
    """
    return hasattr(type(trainer), "_generate_and_score_completions")


def generate_batch(trainer: HostTrainer, rows: list[object], max_tokens: int) -> Completions:
    """Returns sampled and scored completions of at most so many tokens: one group for each of the first rows, as many as one
    micro-batch has. A trainer without groups (distillation) has one completion for each row.

    Can go when TRL's online trainers can be asked for completions.
    """
    online: Any = trainer
    config = copy.copy(vars(trainer).get("generation_config"))
    if config is not None:
        config.max_new_tokens = min(config.max_new_tokens or max_tokens, max_tokens)
        online.generation_config = config
    online.mask_truncated_completions = False  # a cut completion would have no loss
    size = getattr(online, "num_generations", 1)
    groups = max(trainer.args.per_device_train_batch_size // size, 1)
    trainer.model.train()
    return online._generate_and_score_completions([row for row in rows[:groups] for _ in range(size)])


def has_policy_logps(trainer: HostTrainer) -> bool:
    """Returns whether a trainer computes log-probabilities of completions; distillation compares whole distributions.

    Can go together with [`policy_logps`].
    """
    return hasattr(type(trainer), POLICY_LOGPS)


def policy_logps(trainer: HostTrainer, model: object, batch: Completions) -> Tensor:
    """Returns the log-probabilities of the completions' tokens as the loss of a TRL online trainer computes them.

    Can go when TRL makes the method public.
    """
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    online: Any = trainer
    images = ("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "image_sizes", "token_type_ids")
    more = {name: batch[name] for name in images if name in batch}
    with torch.no_grad():
        found = online._get_per_token_logps_and_entropies(model, ids, mask, batch["completion_ids"].shape[1], **more)
    return found[0] if isinstance(found, tuple) else found
