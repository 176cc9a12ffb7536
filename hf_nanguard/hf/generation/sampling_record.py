"""Records which completions were drawn from non-finite scores, and from which token on.

Nothing is read on the host before a result is asked for. In continuous batching a row belongs to another request at every
step, so there the record is kept by request.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ...core.logits import NEVER, RowMaxima, RowNotes, can_read_in_place, repair_scores
from ..compat.generation import find_request
from .logits_processors import MAX_ROWS, NumericalStabilityLogitsProcessor

logger = logging.getLogger("hf_nanguard")

UNKNOWN = -1  # a step


@dataclass(eq=False)
class Generation:
    """Records one `generate`: which rows of scores were not finite, and which completions they belong to.

    `processors` are the guards that see its scores, in the order in which they are called. The default of `prompt_length` is
    the number of tokens at the first call. One sample has `num_beams` rows of scores and `num_returned` completions.
    """

    processors: Sequence[NumericalStabilityLogitsProcessor] = ()
    prompt_length: int | None = None
    num_beams: int = 1
    num_returned: int = 1
    notes: RowNotes = field(default_factory=RowNotes, init=False)
    last_step: int = field(default=-1, init=False)
    num_rows: int = field(default=0, init=False)
    _read: list[tuple[int, int]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for processor in self.processors:
            processor.subscribe(self.note)

    def close(self) -> None:
        for processor in self.processors:
            processor.unsubscribe(self.note)

    def note(
        self, processor: NumericalStabilityLogitsProcessor, length: int, num_rows: int, maxima: RowMaxima | None
    ) -> None:
        """Records the scores after `length` tokens; nothing is read.

        A step that comes again was a draft before (assisted decoding), so its earlier notes are removed.
        """
        self.prompt_length = length if self.prompt_length is None else self.prompt_length
        step, self.num_rows, self._read = max(length - self.prompt_length, 0), num_rows, None
        if processor is self.processors[0]:
            if step <= self.last_step:
                self.notes.forget_from(step)
            self.last_step = step
        if maxima is not None:
            self.notes.add(step, maxima)

    def read(self) -> list[tuple[int, int]]:
        """Returns the first repaired and first ended step of each completion; all beams of a sample count for it."""
        if self._read is None:
            rows = self.notes.read()
            if self.num_beams > 1 and not self.notes.mixed:
                samples = [rows[i : i + self.num_beams] for i in range(0, len(rows), self.num_beams)]
                firsts = [(min(r for r, _ in beams), min(e for _, e in beams)) for beams in samples]
                rows = [first for first in firsts for _ in range(self.num_returned)]
            self._read = rows
        return self._read

    @property
    def num_completions(self) -> int:
        """How many completions it returns."""
        return self.num_rows // self.num_beams * self.num_returned if self.num_beams > 1 else self.num_rows


class RequestNotes(Generation):
    """Records one continuous batch, where a row of scores belongs to another request at every step.

    Each request has a slot in a device tensor; the slots of a step are part of its inputs. A slot says whether the scores of
    any token of the request were not finite, including tokens that were drawn ahead and discarded.
    """

    SLOTS = 1 << 16

    def __init__(self, device: torch.device):
        super().__init__()
        self.codes = torch.zeros(self.SLOTS, dtype=torch.int32, device=device)  # slot 0 is for rows without a request
        self.slots: dict[str, int] = {}
        self.request_ids: list[str] | None = None
        self.num_users = 0

    def open(self) -> None:
        """Adds a user. The first one starts with empty notes, in the same tensor, whose address a captured graph holds."""
        if self.num_users == 0:
            self.codes.zero_()
            self.slots, self.request_ids = {}, None
        self.num_users += 1

    def close(self) -> None:
        self.num_users -= 1

    def set_order(self, request_ids: Iterable[str]) -> None:
        self.request_ids = list(request_ids)

    def slot(self, request_id: str | None) -> int:
        """Returns the slot of a request, 0 for none; once all slots are taken, further requests share the last."""
        if request_id is None:
            return 0
        return self.slots.setdefault(request_id, min(len(self.slots) + 1, self.SLOTS - 1))

    def add(self, slots: Tensor, maxima: RowMaxima) -> None:
        """Records one step: 1 for a repaired, 2 for an ended row."""
        repaired, ended = maxima.judge()
        self.codes.scatter_reduce_(0, slots.long(), repaired.int() + 2 * ended.int(), "amax")

    def read(self) -> list[tuple[int, int]]:
        """Returns whether each request was repaired or ended, at an unknown step: one host read."""
        codes = self.codes[: len(self.slots) + 1].tolist()
        ids = self.request_ids if self.request_ids is not None else list(self.slots)
        found = [codes[self.slots[i]] if i in self.slots else 0 for i in ids]
        return [(UNKNOWN if code == 1 else NEVER, UNKNOWN if code == 2 else NEVER) for code in found]

    @property
    def num_completions(self) -> int:
        """How many completions it returns; -1 if the requests did not come from `generate_batch`."""
        return -1 if self.request_ids is None else len(self.request_ids)


@dataclass(eq=False)
class RequestGuard:
    """The processor as continuous batching calls it: with the slot of each row's request."""

    supported_kwargs: ClassVar[dict[str, type]] = {}
    ignored_kwargs: ClassVar[tuple[str, ...]] = ()

    processor: NumericalStabilityLogitsProcessor
    notes: RequestNotes
    longest: int = field(default=0, init=False)

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Gives rows without a request slot 0."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list) -> Tensor:
        """Returns the slots of the next step, and 0 for all further rows that an earlier step has used."""
        slots = [self.notes.slot(find_request(request)) for request in requests_with_new_token]
        self.longest = max(self.longest, len(slots))
        return torch.tensor(slots + [0] * (self.longest - len(slots)), dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        return self.processor.safely(self._process, scores, tensor_arg, otherwise=lambda scores, tensor_arg: scores)

    def _process(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        # On a device nothing else uses the scores, and the host has left little memory: no copy.
        fixed, maxima = repair_scores(scores, self.processor.end_id, in_place=not can_read_in_place(scores))
        if maxima is not None:
            self.notes.add(tensor_arg[: scores.shape[0]], maxima)
            self.processor.log(scores, maxima, 0)
        return self.processor.bound(fixed)


class GenerationWatch:
    """Knows which completions of a guarded block were drawn from non-finite scores. Nothing is read before it is asked; if
    `verbose`, the result is logged when it is first read."""

    def __init__(self, verbose: bool):
        self.generations: list[Generation] = []
        self.verbose = verbose
        self._logged = ""

    def find_nonfinite(self, lengths: Sequence[int]) -> list[int]:
        """Returns the completions that hold a token drawn from a repaired or ended row of scores.

        Scores after the end of a completion do not count. Completions are numbered over all calls of `generate`, in the
        order in which they were returned. If their number is not that of `lengths`, rows cannot be assigned to
        completions, and one non-finite row makes the result all completions. A length includes the end token. One host read
        per call of `generate`; none on a CPU if all was finite.
        """
        firsts = self._read()
        numbers = [-1 if generation.notes.mixed else generation.num_completions for generation in self.generations]
        if -1 in numbers or sum(numbers) != len(lengths):
            return list(range(len(lengths))) if firsts else []
        return [index for index, length in enumerate(lengths) if min(firsts.get(index, (NEVER, NEVER))) < length]

    def _read(self) -> dict[int, tuple[int, int]]:
        """Returns the first repaired and ended step of each completion that has one."""
        firsts: dict[int, tuple[int, int]] = {}
        begin = 0
        for generation in self.generations:
            rows = generation.read()
            firsts |= {begin + row: first for row, first in enumerate(rows) if min(first) < NEVER}
            begin += max(generation.num_completions, len(rows))
        text = self._describe(firsts)
        if firsts and self.verbose and text != self._logged:
            self._logged = text
            logger.warning("hf_nanguard: %s", text)
        return firsts

    @property
    def num_repaired(self) -> int:
        """How many completions had a repaired row of scores, even if only after their end."""
        return sum(repaired < NEVER for repaired, _ in self._read().values())

    @property
    def num_ended(self) -> int:
        """How many completions had a row without a finite score, even if only after their end."""
        return sum(ended < NEVER for _, ended in self._read().values())

    def describe(self) -> str:
        """Describes which completions had non-finite scores, and from which token on; empty if none had."""
        return self._describe(self._read())

    def _describe(self, firsts: dict[int, tuple[int, int]]) -> str:
        if not firsts:
            return ""
        parts = []
        for row, (repaired, ended) in list(firsts.items())[:MAX_ROWS]:
            done = [
                what if step == UNKNOWN else f"{what} at token {step}"
                for what, step in (("repaired", repaired), ("ended", ended))
                if step < NEVER
            ]
            parts.append(f"completion {row} was {' and '.join(done)}")
        total = sum(max(generation.num_completions, 0) for generation in self.generations)
        more = f" and {len(firsts) - MAX_ROWS} more" if len(firsts) > MAX_ROWS else ""
        return f"non-finite scores in {len(firsts)} of {total} completions: {'; '.join(parts)}{more}"
