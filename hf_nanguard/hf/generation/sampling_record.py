"""What is known of completions after they were generated: which were drawn from sick scores, and since which token.

Nothing is read before somebody asks. In continuous batching a row belongs to another request at every step, so there the
notes are kept by request.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.logits import NEVER, RowNotes, can_look, judge, repair_scores
from ..compat.generation import find_request
from .logits_processors import MAX_ROWS, NumericalStabilityLogitsProcessor

logger = logging.getLogger("hf_nanguard")

UNKNOWN = -1  # a step


class Generation:
    """What is known of one `generate`: which rows of scores were sick, and which completions they belong to.

    Args:
        prompt_length (`int`, *optional*):
            How many tokens come before the first generated one; taken from the first call if not given.
        num_beams (`int`, *optional*, defaults to `1`), num_returned (`int`, *optional*, defaults to `1`):
            How many rows of scores and how many completions belong to one sample.
    """

    def __init__(self, prompt_length: int | None = None, num_beams: int = 1, num_returned: int = 1):
        self.prompt_length = prompt_length
        self.num_beams = num_beams
        self.num_returned = num_returned
        self.notes = RowNotes()
        self.head: NumericalStabilityLogitsProcessor | None = None
        self.last_step = -1
        self.num_rows = 0
        self._read: list[tuple[int, int]] | None = None

    def begin(self, processor: NumericalStabilityLogitsProcessor, length: int, num_rows: int) -> int:
        """Returns the step that the scores after `length` tokens are for; plain host numbers, nothing is read.

        A step that comes again was a draft before (assisted decoding), so what was noted of it is void.
        """
        self.prompt_length = length if self.prompt_length is None else self.prompt_length
        step, self.num_rows, self._read = max(length - self.prompt_length, 0), num_rows, None
        if processor is self.head:
            if step <= self.last_step:
                self.notes.forget_from(step)
            self.last_step = step
        return step

    def read(self) -> list[tuple[int, int]]:
        """Returns the first repaired and first ended step of each completion; beams are a sample's own."""
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
        """How many completions come out."""
        return self.num_rows // self.num_beams * self.num_returned if self.num_beams > 1 else self.num_rows


class RequestNotes(Generation):
    """What is known of one continuous batch, where a row of scores belongs to another request at every step.

    Each request has a slot in a device tensor; the slots of a step travel with its other inputs. A slot says whether any
    token of the request was sick: one that was drawn ahead and thrown away counts as well.
    """

    SLOTS = 1 << 16

    def __init__(self, device: torch.device):
        super().__init__()
        self.codes = torch.zeros(self.SLOTS, dtype=torch.int32, device=device)  # slot 0 is for rows of nobody
        self.slots: dict[str, int] = {}
        self.request_ids: list[str] | None = None
        self.num_users = 0

    def slot(self, request_id: str | None) -> int:
        """Returns the slot of a request, 0 for none; those that come after all slots are taken share the last."""
        if request_id is None:
            return 0
        return self.slots.setdefault(request_id, min(len(self.slots) + 1, self.SLOTS - 1))

    def add(self, slots: Tensor, top: Tensor, left: Tensor) -> None:
        """Notes what one step has shown: 1 for a repaired, 2 for an ended row."""
        repaired, ended = judge(top, left)
        self.codes.scatter_reduce_(0, slots.long(), repaired.int() + 2 * ended.int(), "amax")

    def clear(self) -> None:
        """Forgets everything, but keeps the tensor, whose address a captured graph holds."""
        self.codes.zero_()
        self.slots, self.request_ids = {}, None

    def read(self) -> list[tuple[int, int]]:
        """Returns for each request whether it was repaired or ended, at which step is not known: one host read."""
        codes = self.codes[: len(self.slots) + 1].tolist()
        ids = self.request_ids if self.request_ids is not None else list(self.slots)
        found = [codes[self.slots[i]] if i in self.slots else 0 for i in ids]
        return [(UNKNOWN if code == 1 else NEVER, UNKNOWN if code == 2 else NEVER) for code in found]

    @property
    def num_completions(self) -> int:
        """How many completions come out; not known if requests were not put by `generate_batch`."""
        return -1 if self.request_ids is None else len(self.request_ids)


class RequestGuard:
    """The processor as continuous batching calls it: with the slot of each row's request."""

    supported_kwargs: dict[str, type] = {}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, processor: NumericalStabilityLogitsProcessor, notes: RequestNotes):
        self.processor = processor
        self.notes = notes
        self.longest = 0

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Rows of no request have slot 0."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list) -> Tensor:
        """Returns the slots of the next step, and 0 for all rows that an earlier one has written."""
        slots = [self.notes.slot(find_request(request)) for request in requests_with_new_token]
        self.longest = max(self.longest, len(slots))
        return torch.tensor(slots + [0] * (self.longest - len(slots)), dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        processor, looks = self.processor, can_look(scores)
        # On a device the scores are the step's own and memory is what the host left free: no copy.
        fixed, top, left = repair_scores(scores, processor.end_id, in_place=not looks)
        if top is not None and left is not None:
            self.notes.add(tensor_arg[: scores.shape[0]], top, left)
            if looks:
                processor.log(scores, top, left, 0)
        return processor.bound(fixed)


class GenerationWatch:
    """What a guarded stretch of code has generated from sick scores. Nothing is read before somebody asks.

    Args:
        verbose (`bool`, *optional*, defaults to `True`):
            Whether what was found is logged, once, when it is first read.
    """

    def __init__(self, verbose: bool = True):
        self.generations: list[Generation] = []
        self.verbose = verbose
        self._told = ""

    def find_sick(self, lengths: Sequence[int]) -> list[int]:
        """Returns the completions that hold a token drawn from a repaired or ended row of scores.

        A row that is sick only after its completion has ended does not count. Completions are counted over all calls of
        `generate` in their order, as they were returned. If their number is not that of `lengths`, rows cannot be told
        apart, and all completions are sick if any row is.

        Args:
            lengths (`list[int]`):
                How many generated tokens each completion has, its end token among them.

        Returns:
            `list[int]`: Indices into `lengths`. One host read a call of `generate`; none on a healthy CPU run.
        """
        firsts = self._read()
        if sum(generation.num_completions for generation in self.generations) != len(lengths) or any(
            generation.num_completions < 0 or generation.notes.mixed for generation in self.generations
        ):
            return list(range(len(lengths))) if firsts else []
        return [index for index, length in enumerate(lengths) if min(firsts.get(index, (NEVER, NEVER))) < length]

    def _read(self) -> dict[int, tuple[int, int]]:
        """Returns the first repaired and ended step of each completion that was ever sick."""
        firsts: dict[int, tuple[int, int]] = {}
        begin = 0
        for generation in self.generations:
            rows = generation.read()
            firsts |= {begin + row: first for row, first in enumerate(rows) if min(first) < NEVER}
            begin += max(generation.num_completions, len(rows))
        text = self._describe(firsts)
        if firsts and self.verbose and text != self._told:
            self._told = text
            logger.warning("hf_nanguard: %s", text)
        return firsts

    @property
    def num_repaired(self) -> int:
        """How many completions hold a token drawn from a repaired row of scores, or would, had they not ended before."""
        return sum(repaired < NEVER for repaired, _ in self._read().values())

    @property
    def num_ended(self) -> int:
        """How many completions were ended because nothing was left to draw, or would, had they not ended before."""
        return sum(ended < NEVER for _, ended in self._read().values())

    def describe(self) -> str:
        """Returns in words which completions were sick, and since which token; empty if none was."""
        return self._describe(self._read())

    def _describe(self, firsts: dict[int, tuple[int, int]]) -> str:
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
        return (
            f"scores of {len(firsts)} of {total} completions were not finite: {'; '.join(parts)}{more}"
            if firsts
            else ""
        )
