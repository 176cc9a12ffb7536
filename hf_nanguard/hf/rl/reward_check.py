"""Rewards that are no numbers, and what becomes of their completions.

TRL's own code scores the completions; only the reward functions it calls are wrapped. A bad entry is handed on as an
infinity, which TRL carries through its float32 tensor and its gather, so that every rank finds the same rows to strike
without a message of ours. TRL leaves a row of NaN out of the baseline of its group and gives it the advantage 0.

A call that fails as a whole leaves every completion of this rank unscorable. Its column alone could be left out, and
the other functions would go on teaching; but that is another objective than the one that was asked for (format without
correctness, say), nobody would notice by the loss, and in a group that is spread over ranks sums of different functions
would be compared. A generation without a signal costs less. The function is never called a second time: it may depend
on the whole batch, cost money or keep a state.
"""

import inspect
import math
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from ...core.event import Culprit
from .excerpt import find_blamed, flatten, printable
from .reward_values import describe_entry, find_kind, is_listing, materialise, read_entries

BAD = math.inf
"""What TRL is handed for a reward that is none."""
SICK = -math.inf
"""What TRL is handed for a completion that was not sampled well."""
INSANE_ADVANTAGE = 1e30
MAX_KEPT = 8


@dataclass(frozen=True)
class BadReward:
    """One thing that was wrong with what a reward function returned.

    Args:
        function (`str`):
            Its name, as in TRL's metrics.
        completion (`int` or `None`):
            The index among the completions of this rank. Of a call that failed: the one it held at that moment, `None`
            if that is not clear.
        kind (`str`):
            `"nan"`, `"inf"`, `"-inf"`, `"type"`, `"length"` or `"error"`.
        detail (`str`):
            One clause for a person.
        whole (`bool`):
            Whether the call failed, so that no completion of it has a score.
        prompt, text (`str`, *optional*):
            Of that completion, cut and printable.
    """

    function: str
    completion: int | None
    kind: str
    detail: str
    whole: bool = False
    prompt: str | None = None
    text: str | None = None

    @property
    def message(self) -> str:
        """One sentence for an event."""
        link = "while it held" if self.whole else "for"
        where = "" if self.completion is None else f" {link} completion {self.completion}"
        scope = "; no completion of this call has a score" if self.whole else ""
        return f"reward function {self.function} {self.detail}{where}{scope}"

    def culprit(self, rows: Sequence[int] | None = None) -> Culprit:
        """Returns the culprit of an event; `rows` are the dataset rows of this rank's completions, if known."""
        at = self.completion
        return Culprit(
            phase="reward",
            samples=None if at is None else [at],
            rows=None if at is None or rows is None else [rows[at]],
            reward_function=self.function,
            prompt=self.prompt,
            completion=self.text,
        )


class RewardCheck:
    """What was found while the completions of one generation were scored on this rank.

    Args:
        names (`Sequence[str]`):
            Of the reward functions.
        unusable (`Collection[int]`, *optional*):
            Completions that are struck whatever their rewards.
        acts (`bool`, *optional*, defaults to `True`):
            Whether TRL is handed marks; otherwise it gets what the functions gave, errors included.
        prompts, completions (`Sequence`, *optional*):
            As TRL has them, in any of its formats.
    """

    def __init__(
        self,
        names: Sequence[str],
        unusable: Collection[int] = (),
        acts: bool = True,
        prompts: Sequence[Any] = (),
        completions: Sequence[Any] = (),
    ):
        self.names = names
        self.unusable = frozenset(unusable)
        self.acts = acts
        self.prompts = prompts
        self.completions = completions
        self._found: list[list[BadReward]] = [[] for _ in names]  # by function: the async ones end in any order
        self._num_found = 0
        self._columns: list[tuple[int, Tensor]] = []

    @property
    def bad(self) -> list[BadReward]:
        """What was found, at most `MAX_KEPT` a function."""
        self._read_models()
        return [bad for found in self._found for bad in found]

    @property
    def num_bad(self) -> int:
        """How many there were, also those that were not kept."""
        self._read_models()
        return self._num_found

    @property
    def failed(self) -> list[str]:
        """The functions whose call failed as a whole."""
        return [bad.function for found in self._found for bad in found if bad.whole]

    def see(self, prompts: Sequence[Any] | None = None, completions: Sequence[Any] | None = None, **_: Any) -> None:
        """Takes note of what a function is called with."""
        self.prompts = self.prompts if prompts is None else prompts
        self.completions = self.completions if completions is None else completions

    def judge(self, place: int, result: Any) -> Any:
        """Returns what TRL gets for the result of a function: the very same if nothing is wrong with it."""
        if is_listing(result) and len(result) == (len(self.prompts) or len(result)):
            marked = self._judge_entries(place, read_entries(result), result)
            return [marked.get(i, entry) for i, entry in enumerate(result)] if marked and self.acts else result
        if is_listing(result):
            detail = f"returned {len(result)} rewards for {len(self.prompts)} completions"
            self._note(place, "length", detail, whole=True)
        else:
            kind = "None" if result is None else f"a {type(result).__name__}"
            self._note(place, "type", f"returned {kind} in place of a list of rewards", whole=True)
        return self.mark_all() if self.acts else result

    def judge_error(self, place: int, error: Exception) -> None:
        """Notes that a function failed."""
        detail = f"raised {printable(traceback.format_exception_only(error)[-1])}"
        frames = list(traceback.walk_tb(error.__traceback__))[1:]  # the first is ours
        if frames:
            frame, line = frames[-1]
            detail += f" ({Path(frame.f_code.co_filename).name}:{line})"
        blamed = find_blamed([frame for frame, _ in frames], self.completions)
        self._note(place, "error", detail, blamed, whole=True)

    def judge_model(self, place: int, column: Tensor, size: int) -> Tensor:
        """Returns the scores of a reward model with marks among them; nothing is read."""
        if tuple(column.shape) != (size,):
            detail = f"returned scores of shape {tuple(column.shape)} for {size} completions"
            self._note(place, "length", detail, whole=True)
            return self.mark_model(size, column.device) if self.acts else column
        scores = column.detach().float()
        self._columns.append((place, scores))
        if not self.acts:
            return column
        scores = torch.where(torch.isfinite(scores), scores, BAD)
        return scores.index_fill(0, self._struck(size, column.device), SICK) if self.unusable else scores

    def mark_model(self, size: int, device: torch.device) -> Tensor:
        """Returns marks in place of all scores of a reward model."""
        return torch.full((size,), BAD, device=device).index_fill(0, self._struck(size, device), SICK)

    def _struck(self, size: int, device: torch.device) -> Tensor:
        return torch.tensor([i for i in self.unusable if i < size], dtype=torch.long, device=device)

    def mark_all(self) -> list[float]:
        """Returns marks in place of all rewards of a function."""
        return [SICK if i in self.unusable else BAD for i in range(len(self.prompts))]

    def _read_models(self) -> None:
        """Judges the scores of reward models: the one place where they are read, and only if somebody asks."""
        columns, self._columns = self._columns, []
        flat = torch.cat([column.to(columns[0][1].device) for _, column in columns]).tolist() if columns else []
        for place, column in columns:
            numbers, flat = flat[: len(column)], flat[len(column) :]
            self._judge_entries(place, numbers, numbers)

    def _judge_entries(self, place: int, numbers: Sequence[Any], entries: Sequence[Any]) -> dict[int, float]:
        """Notes the bad ones and returns what takes whose place."""
        marked = {i: SICK for i in self.unusable if i < len(numbers)}
        for i, (number, entry) in enumerate(zip(numbers, entries, strict=True)):
            if i in marked:
                continue
            if (kind := find_kind(number)) is not None:
                marked[i] = BAD
                self._note(place, kind, f"returned {describe_entry(number)}", i)
            elif isinstance(entry, np.ndarray):  # without dimensions: a number to us, but TRL cannot take it
                marked[i] = number
        return marked

    def _note(self, place: int, kind: str, detail: str, at: int | None = None, whole: bool = False) -> None:
        self._num_found += 1
        if len(self._found[place]) < MAX_KEPT:
            prompt, text = (
                None if at is None or at >= len(texts) else printable(flatten(texts[at]))
                for texts in (self.prompts, self.completions)
            )
            self._found[place].append(BadReward(self.names[place], at, kind, detail, whole, prompt, text))


class CheckedModel(nn.Module):
    """A reward model whose scores are checked. A module, because TRL tells models from functions by that.

    Args:
        model (`nn.Module`):
            The reward model.
        place (`int`):
            Its place among the reward functions.
        check (`RewardCheck`):
            Where findings go.
        alone (`bool`):
            Whether its forward runs without other ranks. If not, one that failed must end the run: the others wait.
    """

    def __init__(self, model: nn.Module, place: int, check: RewardCheck, alone: bool):
        super().__init__()
        self.model = model
        self.place = place
        self.check = check
        self.alone = alone

    def forward(self, **inputs: Any) -> SimpleNamespace:
        first = next(iter(inputs.values()))
        try:
            column = self.model(**inputs).logits[:, 0]
        except Exception as error:  # whatever a user's model raises
            self.check.judge_error(self.place, error)
            if not (self.alone and self.check.acts):
                raise
            return SimpleNamespace(logits=self.check.mark_model(len(first), first.device).unsqueeze(1))
        return SimpleNamespace(logits=self.check.judge_model(self.place, column, len(first)).unsqueeze(1))


def name_functions(trainer: Any) -> list[str]:
    """Returns the names of a trainer's reward functions, as in TRL's metrics; a model that came from nowhere has none there
    and is called by its class."""
    known = vars(trainer).get("reward_func_names") or [""] * len(trainer.reward_funcs)
    return [name or type(function).__name__ for name, function in zip(known, trainer.reward_funcs, strict=True)]


@contextmanager
def checked_rewards(
    trainer: Any,
    unusable: Collection[int] = (),
    prompts: Sequence[Any] = (),
    completions: Sequence[Any] = (),
    acts: bool = True,
) -> Iterator[RewardCheck]:
    """Checks what the reward functions of a TRL trainer return while its `_calculate_rewards` runs inside.

    Errors are caught on the rank where they arise, which then goes on to TRL's gather as the others do. A function that
    talks to other ranks by itself must see to it that it fails on all of them.

    Args:
        trainer (`Trainer`):
            A trainer with `reward_funcs`; it gets the very same list back.
        unusable (`Collection[int]`, *optional*):
            Completions of this rank that are struck whatever their rewards, without a finding.
        prompts, completions (`Sequence`, *optional*):
            What is scored. Functions are handed both anyway; for the findings of reward models they are needed here.
        acts (`bool`, *optional*, defaults to `True`):
            `False`: findings only; values and errors reach TRL as they are.

    Returns:
        A context manager that gives the [`RewardCheck`].

    Example:

    ```python
    with checked_rewards(self, unusable, prompts, completions) as check:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
    rewards = strike_unscorable(rewards)
    ```
    """
    functions = trainer.reward_funcs
    names = name_functions(trainer)
    check = RewardCheck(names, unusable, acts, prompts, completions)
    sharded = trainer.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    alone = not sharded or trainer.accelerator.num_processes == 1
    trainer.reward_funcs = [
        CheckedModel(function, place, check, alone)
        if isinstance(function, nn.Module)
        else _wrap(function, place, check)
        for place, function in enumerate(functions)
    ]
    try:
        yield check
    finally:
        trainer.reward_funcs = functions


def strike_unscorable(rewards_per_func: Tensor) -> Tensor:
    """Returns the gathered rewards with every marked row NaN in all columns: TRL's own "unscorable". Nothing is read."""
    return torch.where(torch.isinf(rewards_per_func).any(dim=1, keepdim=True), math.nan, rewards_per_func)


def holds_bad_reward(rewards_per_func: Tensor) -> bool:
    """Returns whether the gathered rewards, before they are struck, hold a bad one of any rank: the same answer on
    every rank. One host read."""
    return bool((rewards_per_func == BAD).any())


def is_insane(advantage: float) -> bool:
    """Returns whether an advantage is no number that any normalisation of rewards gives."""
    return not abs(advantage) < INSANE_ADVANTAGE  # a NaN is not below either


def check_advantages(output: dict[str, Any]) -> list[int]:
    """Sets advantages that are no sane numbers to 0, in place; TRL's `nan_to_num` makes 3.4e38 of an infinity.

    Args:
        output (`dict`):
            Of `_generate_and_score_completions`; advantages a completion or a token. One host read.

    Returns:
        `list[int]`: the completions of this rank that lost theirs.
    """
    advantages = output.get("advantages")
    if not isinstance(advantages, Tensor) or not advantages.numel():
        return []
    insane = ~(advantages.abs() < INSANE_ADVANTAGE).reshape(len(advantages), -1).all(dim=1)  # a NaN is not below either
    found = [i for i, is_insane in enumerate(insane.tolist()) if is_insane]
    if found:
        advantages[insane] = 0.0
    return found


def _wrap(function: Callable, place: int, check: RewardCheck) -> Callable:
    """Returns the function with its result checked, async if it is."""
    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check.see(**kwargs)
        try:
            result = materialise(function(*args, **kwargs))
        except Exception as error:  # whatever a user's function raises
            check.judge_error(place, error)
            if not check.acts:
                raise
            return check.mark_all()
        return check.judge(place, result)

    @wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        check.see(**kwargs)
        try:
            result = materialise(await function(*args, **kwargs))
        except Exception as error:  # whatever a user's function raises
            check.judge_error(place, error)
            if not check.acts:
                raise
            return check.mark_all()
        return check.judge(place, result)

    return call_async if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(inner.__call__) else call
