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
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from torch import Tensor

from ...core.event import Culprit
from ...plain_text import cut, quote, quote_error
from .reward_values import BAD_REWARD, UNUSABLE, describe_entry, find_kind, is_listing, materialise, read_entries

MAX_KEPT = 8  # findings per function
MAX_TEXT = 200  # characters of a prompt, a completion or an error
SHOWN_TEXT = 80  # characters of a completion in a message


@dataclass(frozen=True)
class BadReward:
    """One thing that was wrong with what a reward function returned."""

    function: str  # its name, as in TRL's metrics
    completion: int | None  # on this rank; of a call that failed: the one it held at that moment, if that is clear
    kind: str  # "nan", "inf", "-inf", "type", "length" or "error"
    detail: str  # what it did, as one clause
    whole: bool = False  # the call failed, so that no completion of it has a score
    prompt: str | None = None  # of that completion, cut
    text: str | None = None  # likewise, the completion itself

    @property
    def message(self) -> str:
        """One clause for an event."""
        link = "while it held" if self.whole else "for"
        text = "" if self.text is None else f" ('{quote(cut(self.text, SHOWN_TEXT))}')"
        where = "" if self.completion is None else f" {link} completion {self.completion}{text}"
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
            prompt=None if self.prompt is None else quote(self.prompt),
            completion=None if self.text is None else quote(self.text),
        )


@dataclass(eq=False)
class RewardCheck:
    """What was found while the completions of one generation were scored on this rank.

    `names` are those of the reward functions. Completions that are `unusable` are unscorable whatever their rewards. If the
    check `acts`, bad rewards are replaced by marks; otherwise TRL gets what the functions returned, errors included.
    """

    names: Sequence[str]
    unusable: Collection[int]
    acts: bool
    prompts: Sequence[object]
    completions: Sequence[object]
    # by function: async functions end in any order
    _found: dict[int, list[BadReward]] = field(default_factory=lambda: defaultdict(list), init=False)
    _columns: list[tuple[int, Tensor]] = field(default_factory=list, init=False)

    @property
    def bad(self) -> list[BadReward]:
        """What was found, at most `MAX_KEPT` per function. Scores of reward models are read here, in one host read."""
        self._read_models()
        return [bad for place in sorted(self._found) for bad in self._found[place]]

    def set_texts(
        self, prompts: Sequence[object] | None = None, completions: Sequence[object] | None = None, **_: object
    ) -> None:
        """Takes prompts and completions from the arguments of a reward function."""
        self.prompts = self.prompts if prompts is None else prompts
        self.completions = self.completions if completions is None else completions

    def check_result(self, place: int, result: object) -> object:
        """Returns what TRL gets for the result of a function: the very same object if nothing is wrong with it."""
        try:
            result = materialise(result)
        except Exception as error:  # a generator of the user's may raise anything
            return self.fail(place, error)
        if is_listing(result) and len(result) == (len(self.prompts) or len(result)):
            marked = self._check_entries(place, read_entries(result), result)
            return [marked.get(i, entry) for i, entry in enumerate(result)] if marked and self.acts else result
        if is_listing(result):
            kind, detail = "length", f"returned {len(result)} rewards for {len(self.prompts)} completions"
        else:
            returned = "None" if result is None else f"a {type(result).__name__}"
            kind, detail = "type", f"returned {returned} in place of a list of rewards"
        self._note(place, kind, detail, whole=True)
        return self._marks(len(self.prompts)) if self.acts else result

    def fail(self, place: int, error: Exception) -> list[float]:
        """Notes that a function raised and returns marks in place of its rewards; raises the error if this check does not
        act."""
        self.note_error(place, error)
        if not self.acts:
            raise error
        return self.mark_all()

    def mark_all(self) -> list[float]:
        """Returns marks in place of the rewards of a call."""
        return self._marks(len(self.prompts))

    def note_error(self, place: int, error: Exception) -> None:
        """Notes that a function or a reward model raised."""
        detail = f"raised {quote_error(error, MAX_TEXT)}"
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
        unusable = [i for i in self.unusable if i < size]
        return wide.index_fill(0, torch.tensor(unusable, device=scores.device), UNUSABLE) if unusable else wide

    def mark_scores(self, size: int, device: torch.device) -> Tensor:
        """Returns marks in place of all scores of a reward model."""
        return torch.tensor(self._marks(size), device=device)

    def _marks(self, size: int) -> list[float]:
        return [UNUSABLE if i in self.unusable else BAD_REWARD for i in range(size)]

    def _read_models(self) -> None:
        """Checks the scores of reward models: the one place where they are read, and only on request."""
        columns, self._columns = self._columns, []
        flat = torch.cat([column.to(columns[0][1].device) for _, column in columns]).tolist() if columns else []
        for place, column in columns:
            numbers, flat = flat[: len(column)], flat[len(column) :]
            self._check_entries(place, numbers, numbers)

    def _check_entries(
        self, place: int, numbers: Sequence[float | type | None], entries: Sequence[object]
    ) -> dict[int, float]:
        """Notes the bad entries and returns the replacements by index."""
        marked = {i: UNUSABLE for i in self.unusable if i < len(numbers)}
        for i, (number, entry) in enumerate(zip(numbers, entries, strict=True)):
            if i in marked or number is None:  # None is TRL's "this function does not apply here"
                continue
            kind = find_kind(number)
            if kind is not None:
                marked[i] = BAD_REWARD
                self._note(place, kind, f"returned {describe_entry(number)}", i)
            elif isinstance(number, float) and isinstance(entry, np.ndarray):
                marked[i] = number  # without dimensions the array is a number to us, but TRL cannot take it
        return marked

    def _note(self, place: int, kind: str, detail: str, at: int | None = None, whole: bool = False) -> None:
        if len(self._found[place]) < MAX_KEPT:
            prompt, text = (
                None if at is None or at >= len(texts) else cut(flatten(texts[at]).strip(), MAX_TEXT)
                for texts in (self.prompts, self.completions)
            )
            self._found[place].append(BadReward(self.names[place], at, kind, detail, whole, prompt, text))


def find_held(frames: Sequence[FrameType], completions: Sequence[object]) -> int | None:
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


def flatten(text: object) -> str:
    """Returns a prompt or completion in any of TRL's formats as one text."""
    if isinstance(text, Mapping):
        content = text.get("content", text.get("text"))
        body = flatten(content) if content else f"[{text.get('type', 'tool_calls' if 'tool_calls' in text else '')}]"
        return f"{text['role']}: {body}" if "role" in text else body
    if isinstance(text, (list, tuple)):
        return " ".join(map(flatten, text))
    return str(text)
