"""Guards against sick scores wherever `generate` draws tokens.

Stock sampling dies of one NaN (`probability tensor contains either inf, nan or element < 0`), and greedy search goes on
with garbage. Here a sick entry is masked, a row with nothing left ends its sequence, and who was hit is known
afterwards, so that nobody trains on it unknowingly. A healthy row is never touched by a bit: clipping it would make the
sampled policy differ from the one whose log-probabilities are trained.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from ..core.logits import NEVER, RowNotes, Tally, bound_scores, can_look, judge, repair_scores
from ..errors import ArgumentError

logger = logging.getLogger("hf_nanguard")

MODES = ("repair", "always", "off")
MAX_ROWS = 4
UNKNOWN = -1  # a step
BEAM_REST = -50.0  # e^-50 is drawn after everything healthy, and is not 0 in float32
# What spreads or hides a NaN, by name, so that classes of other versions and of remote code are known as well.
SPREADING = {f"{name}LogitsWarper" for name in ("Temperature", "SafeTemperature", "TopH", "TopK", "TopP", "MinP",
             "Typical", "Epsilon", "Eta")} | {"LogitNormalization", "InfNanRemoveLogitsProcessor",
             "WatermarkLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"}  # fmt: skip


def check_number(name: str, value: Any, lowest: float, highest: float = math.inf, above: bool = False) -> None:
    """Raises an [`ArgumentError`] unless the value is a finite number of the range, without `lowest` if `above`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < lowest or value > highest or (above and value == lowest):
        least = f"above {lowest:g}" if above else f"at least {lowest:g}"
        most = "" if highest == math.inf else f" and at most {highest:g}"
        raise ArgumentError(
            f"{name} must be a finite number {least}{most}, got {value!r}. Leave it out for the default."
        )


@dataclass
class LogBudget:
    """How many more occurrences are logged with their values; guards that work together share one."""

    left: int = 3


class NumericalStabilityLogitsProcessor(LogitsProcessor):
    """Repairs scores before a token is drawn from them.

    With `mode="repair"` healthy rows pass bit-identical, NaN and +inf entries are masked, -inf stays a mask, and a row
    with nothing left ends its sequence; **`clip_value` and `min_prob` play no part**. With `mode="always"` every row is
    then bounded to `[max - 2 * clip_value, max]`, unmasked tokens get at least `min_prob`, and the row is normalised: it
    changes the policy of a healthy model, so log-probabilities computed elsewhere no longer agree with it.

    In beam search scores arrive after a log-softmax, so a row with one NaN is all NaN and is ended.

    Args:
        clip_value (`float`, *optional*, defaults to `30.0`):
            Half the largest distance to the best token, in mode `"always"`.
        min_prob (`float`, *optional*, defaults to `1e-8`):
            The least probability of an unmasked token, in mode `"always"`.
        verbose (`bool`, *optional*, defaults to `True`):
            Whether the first occurrences are logged with shape and values. On devices other than the CPU nothing is read
            while generating, so they are logged when somebody asks for the counts.
        mode (`str`, *optional*, defaults to `"repair"`):
            `"repair"` or `"always"`.
        eos_token_id (`int` or `list[int]`, *optional*):
            What ends a sequence; the first of several. Without it a row with nothing left gets token 0.

    Raises:
        ArgumentError: If an argument cannot work.

    Example:
        >>> guard = NumericalStabilityLogitsProcessor(eos_token_id=tokenizer.eos_token_id)
        >>> model.generate(**inputs, do_sample=True, logits_processor=LogitsProcessorList([guard]))
        >>> guard.num_repaired, guard.num_ended
    """

    supports_continuous_batching = True

    def __init__(
        self,
        clip_value: float = 30.0,
        min_prob: float = 1e-8,
        verbose: bool = True,
        mode: str = "repair",
        eos_token_id: int | Sequence[int] | None = None,
    ):
        check_number("clip_value", clip_value, 0, above=True)
        check_number("min_prob", min_prob, 0, highest=1)
        if mode not in MODES[:2]:
            raise ArgumentError(
                f"mode must be 'repair' or 'always', got {mode!r}. Leave the processor out to have none."
            )
        ids = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ArgumentError(f"eos_token_id must be token ids, got {eos_token_id!r}. Give tokenizer.eos_token_id.")
        self.clip_value = clip_value
        self.min_prob = min_prob
        self.verbose = verbose
        self.mode = mode
        self.end_id = ids[0] if ids else 0
        self.rest = -math.inf
        self.tally = Tally()
        self.listeners: list[Generation] = []
        self.placed = False
        self.budget = LogBudget()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length = input_ids.shape[-1] if input_ids.ndim > 1 else 0
        steps = [generation.begin(self, length, scores.shape[0]) for generation in self.listeners]
        fixed, top, left = repair_scores(scores, self.end_id, rest=self.rest)
        if top is not None and left is not None:
            self.tally.add(top, left)
            for generation, step in zip(self.listeners, steps, strict=True):
                generation.notes.add(step, top, left)
            if can_look(top):
                self.log(scores, top, left, length)
        return self.bound(fixed)

    def bound(self, repaired: Tensor) -> Tensor:
        """Bounds repaired scores if the mode says so."""
        return repaired if self.mode == "repair" else bound_scores(repaired, self.clip_value, self.min_prob)

    def log(self, scores: Tensor, top: Tensor, left: Tensor, length: int) -> None:
        """Logs sick scores with shape and values, the first few times."""
        if self.verbose and self.budget.left > 0:
            self.budget.left -= 1
            more = "" if self.budget.left else " Later ones are counted only."
            logger.warning("hf_nanguard: %s%s", describe_scores(scores, top, left, length), more)

    @property
    def num_repaired(self) -> int:
        """How many rows of scores were repaired so far; one host read."""
        return self.tally.read()[0]

    @property
    def num_ended(self) -> int:
        """How many rows of scores had nothing left so far; one host read."""
        return self.tally.read()[1]


def describe_scores(scores: Tensor, top: Tensor, left: Tensor, length: int) -> str:
    """Returns shape and values of sick rows in words. It reads them: only for rows known to be sick, on the CPU."""
    repaired, ended = judge(top, left)
    parts = []
    rows = (repaired | ended).nonzero().flatten().tolist()
    for row in rows[:MAX_ROWS]:
        values = scores[row].float()
        good = values[values.isfinite()]
        kinds = {"NaN": values.isnan(), "inf": values == math.inf, "-inf": values == -math.inf}
        counts = ", ".join(f"{int(found.sum())} {kind}" for kind, found in kinds.items() if found.any())
        among = f", {good.numel()} finite from {good.min():.4g} to {good.max():.4g}" if good.numel() else ""
        parts.append(f"row {row} ({counts}{among}) was {'ended' if ended[row] else 'repaired'}")
    more = f" and {len(rows) - MAX_ROWS} more" if len(rows) > MAX_ROWS else ""
    shape = f"{list(scores.shape)} {str(scores.dtype).removeprefix('torch.')}"
    return f"scores {shape} after {length} tokens were not finite: {'; '.join(parts)}{more}."


class SafeTemperatureLogitsWarper(LogitsProcessor):
    """Divides scores by a temperature that cannot be too small, and keeps what the division would overflow finite.

    Healthy scores come out as from the host's own warper. -inf stays a mask; NaN and +inf are left for
    [`NumericalStabilityLogitsProcessor`], which masks them. Do not use it in a trainer that divides log-probabilities by
    its own temperature: the two would no longer agree.

    Args:
        temperature (`float`):
            What to divide by.
        min_temperature (`float`, *optional*, defaults to `0.1`):
            What to divide by at least.

    Raises:
        ArgumentError: If an argument cannot work.

    Example:
        >>> warper = SafeTemperatureLogitsWarper(temperature=0.0)
        >>> model.generate(**inputs, do_sample=True, logits_processor=LogitsProcessorList([warper]))
    """

    supports_continuous_batching = True

    def __init__(self, temperature: float, min_temperature: float = 0.1):
        check_number("temperature", temperature, 0)
        check_number("min_temperature", min_temperature, 0, above=True)
        self.temperature = max(temperature, min_temperature)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        divided = scores / self.temperature
        if self.temperature >= 1:
            return divided
        limits = torch.finfo(divided.dtype)
        return torch.where(scores.isinf(), scores, divided.clamp_(limits.min, limits.max))


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

    def slot(self, request_id: str) -> int:
        """Returns the slot of a request; those that come after all slots are taken share the last."""
        if request_id.startswith("__warmup_"):
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
        slots = [self.notes.slot(request.state.request_id) for request in requests_with_new_token]
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


class Override:
    """A method of one model, replaced for a while.

    A copy or a pickle that is made of the model meanwhile gets the model's own method.
    """

    def __init__(self, model: nn.Module, name: str, function: Callable):
        self.model = model
        self.name = name
        self.function = function
        self.original = getattr(model, name)
        self.before = vars(model).get(name)
        vars(model)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.original, *args, **kwargs)

    def __reduce__(self) -> tuple:
        return (getattr, (self.model, self.name)) if self.before is None else (copy.copy, (self.before,))

    def undo(self) -> None:
        """Puts back what was there."""
        self.function = lambda original, *args, **kwargs: original(*args, **kwargs)  # for shallow copies of the model
        if self.before is None:
            vars(self.model).pop(self.name, None)
        else:
            vars(self.model)[self.name] = self.before


def find_innermost(model: Any) -> Any:
    """Returns the model whose own `generate` draws the tokens: without compilation, data parallel wrappers, adapters."""
    while True:
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        if inner is model:
            return model
        model = inner


def find_end(config: Any, model: Any) -> list[int]:
    """Returns the ids that end a sequence: EOS, or else padding, or else 0."""
    for ids in (config.eos_token_id, getattr(model.config, "eos_token_id", None), config.pad_token_id):
        ids = [ids] if isinstance(ids, int) else ids if isinstance(ids, (list, tuple)) else []
        if ids and ids[0] >= 0:  # continuous batching writes -1 for none
            return list(ids)
    return [0]


def place_guards(processors: list, head: Any, last: Any) -> list:
    """Puts one guard before the first processor that would spread a NaN and one last; only the last if there is none."""
    spreads = [
        {cls.__name__.removeprefix("ContinuousBatching") for cls in type(processor).__mro__} & SPREADING
        for processor in processors
    ]
    first = next((index for index, names in enumerate(spreads) if names), None)
    return [*processors, last] if first is None else [*processors[:first], head, *processors[first:], last]


class GenerationGuard:
    """Puts guards into what a model builds while it generates. The seams are private names of the host.

    Args:
        model (`PreTrainedModel`):
            The innermost model.
        watch (`GenerationWatch`):
            Who is told.
        mode (`str`), clip_value (`float`), min_prob (`float`), verbose (`bool`):
            As in [`NumericalStabilityLogitsProcessor`].
    """

    def __init__(self, model: Any, watch: GenerationWatch, mode: str, **settings: Any):
        self.model = model
        self.watch = watch
        self.mode = mode
        self.settings = settings
        self.building = False
        self.budget = LogBudget()
        self.subscribed: list[tuple[NumericalStabilityLogitsProcessor, Generation]] = []
        # Should move to hf/compat.py with their conditions: these four names are the host's.
        seams = {
            "_get_logits_processor": self.add_guards,
            "_get_candidate_generator": self.mute_drafts,
            "init_continuous_batching": self.guard_manager,
            "generate_batch": self.note_requests,
        }
        self.overrides = [Override(model, name, function) for name, function in seams.items() if hasattr(model, name)]

    def close(self) -> None:
        """Leaves the model as it was."""
        for override in reversed(self.overrides):
            override.undo()
        for processor, generation in self.subscribed:
            processor.listeners = [listener for listener in processor.listeners if listener is not generation]
        for generation in self.watch.generations:
            if isinstance(generation, RequestNotes):
                generation.num_users -= 1

    def _make_pair(self, config: Any) -> tuple[NumericalStabilityLogitsProcessor, NumericalStabilityLogitsProcessor]:
        """Returns the guard before the warpers and the last one, which alone bounds healthy rows if asked to."""
        end = find_end(config, self.model)
        modes = ("repair", self.mode)
        head, last = (NumericalStabilityLogitsProcessor(mode=m, eos_token_id=end, **self.settings) for m in modes)
        head.placed = last.placed = True
        head.budget = last.budget = self.budget
        return head, last

    def add_guards(self, original: Callable, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        """Adds guards to the processors of one `generate`, and listens to those that are there already."""
        processors = original(*args, **kwargs)
        config = kwargs["generation_config"] if "generation_config" in kwargs else args[0]
        if self.building or getattr(config, "is_assistant", False):  # drafts have the guards of those who check them
            return processors
        prompt_length = kwargs.get("input_ids_seq_length", args[1] if len(args) > 1 else None)
        generation = Generation(prompt_length, config.num_beams or 1, config.num_return_sequences or 1)
        placed = [p.mode for p in processors if isinstance(p, NumericalStabilityLogitsProcessor) and p.placed]
        if not placed or self.mode not in ("repair", *placed):  # an outer guard may have been here
            head, last = self._make_pair(config)
            if generation.num_beams > 1 and config.do_sample:
                # Beams are drawn without replacement, so a row must offer more than its end. Warpers would take that
                # away again, and there is nothing to repair before them: one NaN has spread by the log-softmax.
                last.rest = BEAM_REST
                processors = LogitsProcessorList([*processors, last])
            else:
                processors = LogitsProcessorList(place_guards(processors, head, last))
        guards = [p for p in processors if isinstance(p, NumericalStabilityLogitsProcessor)]
        generation.head = guards[0]
        for guard in guards:
            guard.listeners.append(generation)
            self.subscribed.append((guard, generation))
        self.watch.generations.append(generation)
        return processors

    def mute_drafts(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Gives who drafts tokens (assisted decoding) guards of its own: what is sick in a draft is in no completion."""

        def mute(value: Any) -> Any:
            if not isinstance(value, LogitsProcessorList):
                return value
            muted = LogitsProcessorList(value)
            for index, processor in enumerate(muted):
                if isinstance(processor, NumericalStabilityLogitsProcessor):
                    muted[index] = copy.copy(processor)
                    muted[index].listeners, muted[index].tally = [], Tally()
            return muted

        return original(*map(mute, args), **{name: mute(value) for name, value in kwargs.items()})

    def guard_manager(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Puts guards into a new manager of continuous batching.

        They come after its settings were resolved: those leave less memory to the cache if there is a processor.
        """
        self.building = True
        try:
            manager = original(*args, **kwargs)
        finally:
            self.building = False
        processors = manager.logit_processor
        guards = [p for p in processors.logits_processor if isinstance(p, RequestGuard)]
        if not guards and (manager.batch_processor is not None or manager.warmed_up):
            logger.warning(
                "hf_nanguard: the persistent manager of continuous batching was built before guard_generation, so it is "
                "not guarded. Call model.destroy_cached_continuous_batching_manager() first."
            )
            return manager
        notes = guards[0].notes if guards else RequestNotes(self.model.device)
        if not guards:
            from transformers.generation.continuous_batching.cb_logits_processors import (
                ContinuousBatchingLogitsProcessor,
            )

            ContinuousBatchingLogitsProcessor.register(RequestGuard)
            head, last = (RequestGuard(guard, notes) for guard in self._make_pair(manager.generation_config))
            before = len(processors.logits_processor)
            processors.logits_processor = LogitsProcessorList(place_guards(processors.logits_processor, head, last))
            processors.tensors_required += len(processors.logits_processor) - before
            processors.do_processing = True
        elif notes.num_users == 0:  # kept from an earlier guard
            notes.clear()
        notes.num_users += 1
        self.watch.generations.append(notes)
        return manager

    def note_requests(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Notes the order in which `generate_batch` returns its requests."""
        known = len(self.watch.generations)
        results = original(*args, **kwargs)
        for generation in self.watch.generations[known:]:
            if isinstance(generation, RequestNotes):
                generation.request_ids = list(results)
        return results


def can_generate(model: Any) -> bool:
    """Returns whether a model, wrapped or not, has a `generate` to guard."""
    return hasattr(find_innermost(model), "_get_logits_processor")


@contextmanager
def guard_generation(
    model: nn.Module, mode: str = "repair", clip_value: float = 30.0, min_prob: float = 1e-8, verbose: bool = True
) -> Iterator[GenerationWatch]:
    """Guards every `generate` and `generate_batch` of a model inside the block.

    Sampling, greedy and beam search, assisted decoding and continuous batching are covered; processors of the user keep
    their place. One guard stands right before temperature and its kin, one last, before probabilities are formed. A
    healthy model generates the same tokens as without, and no host read is added.

    Args:
        model (`nn.Module`):
            The model, wrapped or not.
        mode (`str`, *optional*, defaults to `"repair"`):
            `"repair"`, `"always"`, or `"off"` to do nothing.
        clip_value (`float`, *optional*, defaults to `30.0`), min_prob (`float`, *optional*, defaults to `1e-8`),
        verbose (`bool`, *optional*, defaults to `True`):
            As in [`NumericalStabilityLogitsProcessor`].

    Returns:
        `GenerationWatch`: What tells afterwards which completions were hit.

    Raises:
        ArgumentError: If an argument cannot work, or the model cannot generate.

    Example:
        >>> with guard_generation(model) as watch:
        ...     completions = model.generate(**inputs, do_sample=True)[:, inputs["input_ids"].shape[1] :]
        >>> sick = watch.find_sick([len(completion) for completion in completions])
    """
    if mode not in MODES:
        raise ArgumentError(f"mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}. Use 'off' for no guard.")
    watch = GenerationWatch(verbose)
    if mode == "off":
        yield watch
        return
    settings = {"clip_value": clip_value, "min_prob": min_prob, "verbose": verbose}
    NumericalStabilityLogitsProcessor(mode=mode, **settings)  # type: ignore[arg-type] # what is wrong is said here
    inner = find_innermost(model)
    if not can_generate(inner):
        raise ArgumentError(
            f"model must be one that can generate, got {type(inner).__name__}. Give a causal or seq2seq LM."
        )
    guard = GenerationGuard(inner, watch, mode, **settings)
    try:
        yield watch
    finally:
        guard.close()
