"""Guards against sick scores wherever `generate` draws tokens.

Stock sampling dies of one NaN (`probability tensor contains either inf, nan or element < 0`), and greedy search goes on
with garbage. Here a sick entry is masked, a row with nothing left ends its sequence, and who was hit is known
afterwards, so that nobody trains on it unknowingly. A healthy row is never touched by a bit: clipping it would make the
sampled policy differ from the one whose log-probabilities are trained.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import LogitsProcessorList

from ...core.logits import Tally
from ...errors import ArgumentError
from ..compat import generation as compat
from .logits_processors import MODES, LogBudget, NumericalStabilityLogitsProcessor
from .sampling_record import Generation, GenerationWatch, RequestGuard, RequestNotes

logger = logging.getLogger("hf_nanguard")

BEAM_REST = -50.0  # e^-50 is drawn after everything healthy, and is not 0 in float32
# What spreads or hides a NaN, by name, so that classes of other versions and of remote code are known as well.
SPREADING = {f"{name}LogitsWarper" for name in ("Temperature", "SafeTemperature", "TopH", "TopK", "TopP", "MinP",
             "Typical", "Epsilon", "Eta")} | {"LogitNormalization", "InfNanRemoveLogitsProcessor",
             "WatermarkLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"}  # fmt: skip


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
    """Puts guards into what a model builds while it generates. The seams are in `compat_generation`.

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
        functions = {
            compat.PROCESSORS: self.add_guards,
            compat.DRAFTS: self.mute_drafts,
            compat.MANAGER: self.guard_manager,
            compat.BATCH: self.note_requests,
        }
        self.overrides = [Override(model, name, functions[what]) for what, name in compat.find_seams(model).items()]

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
        config, prompt_length = compat.read_processor_call(args, kwargs)
        if self.building or compat.is_draft(config):  # drafts have the guards of those who check them
            return processors
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
        processors = compat.list_processors(manager)
        guards = [p for p in processors if isinstance(p, RequestGuard)]
        if not guards and compat.has_begun(manager):
            logger.warning(
                "hf_nanguard: the persistent manager of continuous batching was built before guard_generation, so it is "
                "not guarded. Call model.destroy_cached_continuous_batching_manager() first."
            )
            return manager
        notes = guards[0].notes if guards else RequestNotes(self.model.device)
        if not guards:
            head, last = (RequestGuard(guard, notes) for guard in self._make_pair(manager.generation_config))
            compat.put_processors(manager, place_guards(processors, head, last), RequestGuard)
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
    return compat.PROCESSORS in compat.find_seams(find_innermost(model))


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
