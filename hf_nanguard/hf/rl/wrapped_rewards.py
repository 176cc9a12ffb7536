"""Wraps the reward functions and reward models of a TRL trainer so that what they return is checked."""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

from accelerate.utils import DistributedType
from torch import Tensor, nn

from ...boundary import Boundary
from ..compat.online_trainer import OnlineTrainer, name_reward_functions, replaced_reward_functions
from .bad_rewards import RewardCheck


@contextmanager
def checked_rewards(
    trainer: OnlineTrainer,
    unusable: Collection[int] = (),
    prompts: Sequence[object] = (),
    completions: Sequence[object] = (),
    acts: bool = True,
    boundary: Boundary | None = None,
) -> Iterator[RewardCheck]:
    """Checks what the reward functions of a TRL trainer return while its `_calculate_rewards` runs inside.

    Errors are caught on the rank where they are raised, which then goes on to TRL's gather as the others do. A function that
    communicates with other ranks must fail on all of them. The trainer gets the very same list of functions back.

    Completions of this rank that are `unusable` are unscorable whatever their rewards, without a finding. `prompts` and
    `completions` are needed for the findings of reward models only, because functions are given both. With `acts=False`
    there are findings only; values and errors reach TRL as they are. Errors of the checks go to the `boundary`.
    """
    boundary = boundary or Boundary()
    check = RewardCheck(name_reward_functions(trainer), unusable, acts, prompts, completions)
    sharded = trainer.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    alone = not sharded or trainer.accelerator.num_processes == 1
    wrapped = [
        CheckedModel(function, place, check, alone, boundary)
        if isinstance(function, nn.Module)
        else _wrap(function, place, check, boundary)
        for place, function in enumerate(trainer.reward_funcs)
    ]
    with replaced_reward_functions(trainer, wrapped):
        yield check


class CheckedModel(nn.Module):
    """A reward model whose scores are checked. A module, because TRL distinguishes models from functions by that.

    `place` is its index among the reward functions. Unless its forward runs `alone`, without other ranks, an error must
    end the run because the others wait.
    """

    def __init__(self, model: nn.Module, place: int, check: RewardCheck, alone: bool, boundary: Boundary):
        super().__init__()
        self.model = model
        self.place = place
        self.check = check
        self.alone = alone
        self.boundary = boundary

    def forward(self, **inputs: Tensor) -> SimpleNamespace:
        first = next(iter(inputs.values()))
        try:
            scores = self.model(**inputs).logits[:, 0]
        except Exception as error:  # a user's model may raise anything
            self.boundary.call("rewards", self.check.note_error, self.place, error)
            if not (self.alone and self.check.acts):
                raise
            return SimpleNamespace(logits=self.check.mark_scores(len(first), first.device).unsqueeze(1))
        checked = self.boundary.call(
            "rewards",
            self.check.check_scores,
            self.place,
            scores,
            len(first),
            otherwise=lambda place, scores, size: scores,
        )
        return SimpleNamespace(logits=checked.unsqueeze(1))


def _wrap(function: Callable[..., Any], place: int, check: RewardCheck, boundary: Boundary) -> Callable[..., object]:
    """Returns the function with its result checked; async if the function is."""
    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func

    def fail(error: Exception) -> object:
        boundary.call("rewards", check.note_error, place, error)
        if not check.acts:
            raise error
        return check.mark_all()

    def finish(result: object) -> object:
        return boundary.call("rewards", check.check_result, place, result, otherwise=lambda place, result: result)

    @wraps(function)
    def call(*args: object, **kwargs: Any) -> object:
        boundary.call("rewards", partial(check.set_texts, **kwargs))
        try:
            result = function(*args, **kwargs)
        except Exception as error:  # a user's function may raise anything
            return fail(error)
        return finish(result)

    @wraps(function)
    async def call_async(*args: object, **kwargs: Any) -> object:
        boundary.call("rewards", partial(check.set_texts, **kwargs))
        try:
            result = await function(*args, **kwargs)
        except Exception as error:  # a user's function may raise anything
            return fail(error)
        return finish(result)

    return call_async if any(map(inspect.iscoroutinefunction, (inner, inner.__call__))) else call
