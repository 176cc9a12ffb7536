"""Guards `generate` against non-finite scores.

Without a guard, sampling raises on one NaN (`probability tensor contains either inf, nan or element < 0`), and greedy search
continues with garbage. Here a non-finite entry is masked, a row without a finite score ends its sequence, and it is
known afterwards which completions are affected, so that nobody trains on them by accident. A finite row stays
bit-identical: clipping it would make the sampled policy differ from the one whose log-probabilities are trained.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ...boundary import Boundary
from ...errors import ArgumentError
from ..compat import generation as compat
from ..compat.model_config import without_adapter
from .logits_processors import MODES, NumericalStabilityLogitsProcessor
from .sampling_record import Generation, GenerationWatch, RequestGuard, RequestNotes

if TYPE_CHECKING:
    from transformers import ContinuousBatchingManager

logger = logging.getLogger("hf_nanguard")

BEAM_REST = -50.0  # e^-50 is drawn after every finite score, and is not 0 in float32
# Processors that spread or hide a NaN, by name, to include classes of other versions and of remote code.
SPREADING = {f"{name}LogitsWarper" for name in ("Temperature", "SafeTemperature", "TopH", "TopK", "TopP", "MinP",
             "Typical", "Epsilon", "Eta")} | {"LogitNormalization", "InfNanRemoveLogitsProcessor",
             "WatermarkLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"}  # fmt: skip


def find_generator(model: nn.Module) -> PreTrainedModel | None:
    """Returns the model whose own `generate` draws the tokens, without compilation, data parallel wrappers and adapters;
    `None` if there is none."""
    while True:
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        inner = without_adapter(inner)
        is_innermost, model = inner is model, inner
        if is_innermost:
            return inner if compat.PROCESSORS in compat.find_seams(inner) else None


def find_end(config: GenerationConfig, model: PreTrainedModel) -> int:
    """Returns the id that ends a sequence: EOS, else padding, else 0."""
    for ids in (config.eos_token_id, getattr(model.config, "eos_token_id", None), config.pad_token_id):
        first = ids[0] if isinstance(ids, (list, tuple)) and ids else ids
        if isinstance(first, int) and first >= 0:  # continuous batching writes -1 for none
            return first
    return 0


def place_guards(processors: Sequence[object], head: object, last: object) -> list[object]:
    """Puts one guard before the first processor that would spread a NaN and one last; only the last if there is none."""
    spreads = [
        {cls.__name__.removeprefix("ContinuousBatching") for cls in type(processor).__mro__} & SPREADING
        for processor in processors
    ]
    first = next((index for index, names in enumerate(spreads) if names), None)
    return [*processors, last] if first is None else [*processors[:first], head, *processors[first:], last]


class GenerationGuard:
    """Adds guards to the processors that a model builds while it generates. The seams are in `hf/compat/generation.py`.

    The guards are copies of `processor`; `watch` gets a record of every generation.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        watch: GenerationWatch,
        processor: NumericalStabilityLogitsProcessor,
        boundary: Boundary,
    ):
        self.model = model
        self.watch = watch
        self.processor = processor
        self.mode = processor.mode
        self.building = False
        functions: dict[str, Callable[..., object]] = {
            compat.PROCESSORS: self.add_guards,
            compat.DRAFTS: self.mute_drafts,
            compat.MANAGER: self.guard_manager,
            compat.BATCH: self.note_requests,
        }
        seams = compat.find_seams(model)
        self.overrides = [compat.Override(model, name, functions[what], boundary) for what, name in seams.items()]

    def close(self) -> None:
        for override in reversed(self.overrides):
            override.undo()
        for generation in self.watch.generations:
            generation.close()

    def _make_pair(self, config: GenerationConfig) -> list[NumericalStabilityLogitsProcessor]:
        """Returns the guard before the warpers and the last one; only the last bounds finite rows, in mode `"always"`."""
        return [self.processor.place(find_end(config, self.model), mode) for mode in ("repair", self.mode)]

    def add_guards(
        self, original: Callable[..., LogitsProcessorList], *args: object, **kwargs: object
    ) -> LogitsProcessorList:
        """Adds guards to the processors of one `generate` and records it, also from guards that are there already."""
        processors = original(*args, **kwargs)
        config, prompt_length = compat.read_processor_call(args, kwargs)
        if self.building or compat.is_draft(config):  # drafts are checked with the guards of the main model
            return processors
        num_beams = config.num_beams or 1
        placed = [p.mode for p in processors if isinstance(p, NumericalStabilityLogitsProcessor) and p.placed]
        if not placed or self.mode not in ("repair", *placed):  # an outer guard may have been here
            if num_beams > 1 and config.do_sample:
                # Beams are drawn without replacement, so a row must offer more than its end token. Warpers would remove
                # the rest again, and there is nothing to repair before them: log-softmax has already spread a NaN.
                guard = self.processor.place(find_end(config, self.model), self.mode, BEAM_REST)
                processors = LogitsProcessorList([*processors, guard])
            else:
                processors = LogitsProcessorList(place_guards(processors, *self._make_pair(config)))
        guards = [p for p in processors if isinstance(p, NumericalStabilityLogitsProcessor)]
        generation = Generation(guards, prompt_length, num_beams, config.num_return_sequences or 1)
        self.watch.generations.append(generation)
        return processors

    def mute_drafts(self, original: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Gives the draft generator of assisted decoding guards of its own, because a draft is not part of a completion."""

        def mute(value: object) -> object:
            if not isinstance(value, LogitsProcessorList):
                return value
            ours = NumericalStabilityLogitsProcessor
            return LogitsProcessorList([p.muted() if isinstance(p, ours) else p for p in value])

        return original(*map(mute, args), **{name: mute(value) for name, value in kwargs.items()})

    def guard_manager(
        self, original: Callable[..., "ContinuousBatchingManager"], *args: object, **kwargs: object
    ) -> "ContinuousBatchingManager":
        """Adds guards to a new manager of continuous batching.

        They are added after its settings were resolved, because those reserve less memory for the cache if there is a
        processor.
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
                "hf_nanguard: the persistent manager of continuous batching is not guarded because it was built before "
                "guard_generation. Call model.destroy_cached_continuous_batching_manager() first."
            )
            return manager
        notes = guards[0].notes if guards else RequestNotes(self.model.device)
        if not guards:
            head, last = (RequestGuard(guard, notes) for guard in self._make_pair(manager.generation_config))
            compat.put_processors(manager, place_guards(processors, head, last), RequestGuard)
        notes.open()
        self.watch.generations.append(notes)
        return manager

    def note_requests(
        self, original: Callable[..., dict[str, object]], *args: object, **kwargs: object
    ) -> dict[str, object]:
        """Records the order in which `generate_batch` returns its requests."""
        known = len(self.watch.generations)
        results = original(*args, **kwargs)
        for generation in self.watch.generations[known:]:
            if isinstance(generation, RequestNotes):
                generation.set_order(results)
        return results


def can_generate(model: nn.Module) -> bool:
    """Returns whether a model, wrapped or not, has a `generate` to guard."""
    return find_generator(model) is not None


@contextmanager
def guard_generation(
    model: nn.Module, mode: str = "repair", clip_value: float = 30.0, min_prob: float = 1e-8, verbose: bool = True
) -> Iterator[GenerationWatch]:
    """Guards every `generate` and `generate_batch` of a model inside the block.

    Sampling, greedy and beam search, assisted decoding and continuous batching are covered; processors of the user keep
    their place. One guard runs right before temperature and other warpers, one last, before probabilities are computed. A
    healthy model generates the same tokens as without a guard, and no host read is added.

    Args:
        model (`nn.Module`):
            The model, wrapped or not.
        mode (`str`, *optional*, defaults to `"repair"`):
            `"repair"`, `"always"`, or `"off"` to do nothing.
        clip_value (`float`, *optional*, defaults to `30.0`), min_prob (`float`, *optional*, defaults to `1e-8`),
        verbose (`bool`, *optional*, defaults to `True`):
            As in [`NumericalStabilityLogitsProcessor`].

    Returns:
        `GenerationWatch`: Says afterwards which completions were drawn from non-finite scores.

    Raises:
        ArgumentError: If an argument cannot work, or the model cannot generate.

    Example:
        >>> with guard_generation(model) as watch:
        ...     completions = model.generate(**inputs, do_sample=True)[:, inputs["input_ids"].shape[1] :]
        >>> bad = watch.find_nonfinite([len(completion) for completion in completions])
    """
    with guarded_sampling(model, mode, clip_value, min_prob, verbose, Boundary()) as watch:
        yield watch


@contextmanager
def guarded_sampling(
    model: nn.Module, mode: str, clip_value: float, min_prob: float, verbose: bool, boundary: Boundary
) -> Iterator[GenerationWatch]:
    """Does what [`guard_generation`] does; errors of the guard go to a boundary."""
    if mode not in MODES:
        raise ArgumentError(f"mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}. Use 'off' for no guard.")
    watch = GenerationWatch(verbose)
    if mode == "off":
        yield watch
        return
    processor = NumericalStabilityLogitsProcessor(clip_value, min_prob, verbose, mode)
    generator = find_generator(model)
    if generator is None:
        raise ArgumentError(
            f"model must be one that can generate, got {type(model).__name__}. Give a causal or seq2seq LM."
        )
    processor.report_to(boundary)
    with closing(GenerationGuard(generator, watch, processor, boundary)):
        yield watch
