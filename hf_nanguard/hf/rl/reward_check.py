"""Finds rewards that are not finite numbers, and names function, completion and prompt.

TRL's own code scores the completions; only the reward functions it calls are wrapped ([`checked_rewards`]). A bad entry is
passed on as an infinity, which TRL carries through its float32 tensor and its gather, so that every rank finds the same
unscorable rows without communication of ours. TRL leaves a row of NaN out of the baseline of its group and gives it the
advantage 0.

A call that fails as a whole leaves every completion of this rank unscorable. Leaving out only its column would let the other
functions go on, but that changes the objective (format without correctness, for example), nobody would notice by the
loss, and in a group that is spread over ranks sums of different functions would be compared. A generation without a signal
costs less. The function is never called a second time: it may depend on the whole batch, cost money or keep state.
"""

import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.event import Culprit
from ...plain_text import format_error, printable
from .reward_values import BAD_REWARD, UNUSABLE, describe_entry, find_kind, is_listing, materialise, read_entries

MAX_KEPT = 8  # findings per function
MAX_TEXT = 200  # characters of a prompt, a completion or an error


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
            What it did, as one clause.
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
        """One clause for an event."""
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
            Completions that are unscorable whatever their rewards.
        acts (`bool`, *optional*, defaults to `True`):
            Whether bad rewards are replaced by marks; otherwise TRL gets what the functions returned, errors included.
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
        self._found: list[list[BadReward]] = [[] for _ in names]  # by function: async functions end in any order
        self._columns: list[tuple[int, Tensor]] = []

    @property
    def bad(self) -> list[BadReward]:
        """What was found, at most `MAX_KEPT` per function. Scores of reward models are read here, in one host read."""
        self._read_models()
        return [bad for found in self._found for bad in found]

    def set_texts(
        self, prompts: Sequence[Any] | None = None, completions: Sequence[Any] | None = None, **_: Any
    ) -> None:
        """Takes prompts and completions from the arguments of a reward function."""
        self.prompts = self.prompts if prompts is None else prompts
        self.completions = self.completions if completions is None else completions

    def check_result(self, place: int, result: Any) -> Any:
        """Returns what TRL gets for the result of a function: the very same object if nothing is wrong with it."""
        try:
            result = materialise(result)
        except Exception as error:  # a generator of the user's may raise anything
            return self.fail(place, error)
        if is_listing(result) and len(result) == (len(self.prompts) or len(result)):
            marked = self._check_entries(place, read_entries(result), result)
            return [marked.get(i, entry) for i, entry in enumerate(result)] if marked and self.acts else result
        if is_listing(result):
            detail = f"returned {len(result)} rewards for {len(self.prompts)} completions"
            self._note(place, "length", detail, whole=True)
        else:
            kind = "None" if result is None else f"a {type(result).__name__}"
            self._note(place, "type", f"returned {kind} in place of a list of rewards", whole=True)
        return self._marks() if self.acts else result

    def fail(self, place: int, error: Exception) -> list[float]:
        """Notes that a function raised, and returns marks in place of its rewards.

        Raises:
            Exception: the same error, if this check does not act.
        """
        self.note_error(place, error)
        if not self.acts:
            raise error
        return self._marks()

    def note_error(self, place: int, error: Exception) -> None:
        """Notes that a function or a reward model raised."""
        detail = f"raised {format_error(error, MAX_TEXT)}"
        frames = list(traceback.walk_tb(error.__traceback__))[1:]  # the first is ours
        if frames:
            frame, line = frames[-1]
            detail += f" ({Path(frame.f_code.co_filename).name}:{line})"
        held = find_held([frame for frame, _ in frames], self.completions)
        self._note(place, "error", detail, held, whole=True)

    def check_scores(self, place: int, scores: Tensor, size: int) -> Tensor:
        """Returns the scores of a reward model with marks among them; nothing is read."""
        if tuple(scores.shape) != (size,):
            detail = f"returned scores of shape {tuple(scores.shape)} for {size} completions"
            self._note(place, "length", detail, whole=True)
            return self.mark_scores(size, scores.device) if self.acts else scores
        wide = scores.detach().float()
        self._columns.append((place, wide))
        if not self.acts:
            return scores
        wide = torch.where(torch.isfinite(wide), wide, BAD_REWARD)
        return wide.index_fill(0, self._unusable_dev(size, scores.device), UNUSABLE) if self.unusable else wide

    def mark_scores(self, size: int, device: torch.device) -> Tensor:
        """Returns marks in place of all scores of a reward model."""
        marks = torch.full((size,), BAD_REWARD, device=device)
        return marks.index_fill(0, self._unusable_dev(size, device), UNUSABLE)

    def _unusable_dev(self, size: int, device: torch.device) -> Tensor:
        return torch.tensor([i for i in self.unusable if i < size], dtype=torch.long, device=device)

    def _marks(self) -> list[float]:
        return [UNUSABLE if i in self.unusable else BAD_REWARD for i in range(len(self.prompts))]

    def _read_models(self) -> None:
        """Checks the scores of reward models: the one place where they are read, and only on request."""
        columns, self._columns = self._columns, []
        flat = torch.cat([column.to(columns[0][1].device) for _, column in columns]).tolist() if columns else []
        for place, column in columns:
            numbers, flat = flat[: len(column)], flat[len(column) :]
            self._check_entries(place, numbers, numbers)

    def _check_entries(self, place: int, numbers: Sequence[Any], entries: Sequence[Any]) -> dict[int, float]:
        """Notes the bad entries and returns the replacements by index."""
        marked = {i: UNUSABLE for i in self.unusable if i < len(numbers)}
        for i, (number, entry) in enumerate(zip(numbers, entries, strict=True)):
            if i in marked:
                continue
            if (kind := find_kind(number)) is not None:
                marked[i] = BAD_REWARD
                self._note(place, kind, f"returned {describe_entry(number)}", i)
            elif isinstance(entry, np.ndarray):  # without dimensions: a number to us, but TRL cannot take it
                marked[i] = number
        return marked

    def _note(self, place: int, kind: str, detail: str, at: int | None = None, whole: bool = False) -> None:
        if len(self._found[place]) < MAX_KEPT:
            prompt, text = (
                None if at is None or at >= len(texts) else printable(flatten(texts[at]).strip(), MAX_TEXT)
                for texts in (self.prompts, self.completions)
            )
            self._found[place].append(BadReward(self.names[place], at, kind, detail, whole, prompt, text))


def find_held(frames: Sequence[FrameType], completions: Sequence[Any]) -> int | None:
    """Returns the one completion that functions held in local variables when an error was raised, `None` if there is none
    or more than one. Completions are compared by identity, not by text."""
    owners: dict[int, set[int]] = {}
    for i, completion in enumerate(completions):
        messages = completion if isinstance(completion, list) else []
        contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
        for thing in (completion, *messages, *contents):
            if isinstance(thing, (list, Mapping)) or (isinstance(thing, str) and len(thing) > 1):  # "" is shared by all
                owners.setdefault(id(thing), set()).add(i)
    values = (value for frame in frames for value in frame.f_locals.values())
    held = set().union(*(owners.get(id(value), ()) for value in values))
    return held.pop() if len(held) == 1 else None


def flatten(text: Any) -> str:
    """Returns a prompt or completion in any of TRL's formats as one text."""
    if isinstance(text, Mapping):
        content = text.get("content", text.get("text"))
        body = flatten(content) if content else f"[{text.get('type', 'tool_calls' if 'tool_calls' in text else '')}]"
        return f"{text['role']}: {body}" if "role" in text else body
    if isinstance(text, (list, tuple)):
        return " ".join(map(flatten, text))
    return str(text)
