"""Private names of transformers' generation and continuous batching, each with the condition under which it can go."""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from ...boundary import Boundary

if TYPE_CHECKING:
    from transformers import ContinuousBatchingManager
    from transformers.generation.continuous_batching.requests import FutureRequestState

PROCESSORS, DRAFTS, MANAGER, BATCH = "processors", "drafts", "manager", "batch"
SEAMS = {
    PROCESSORS: "_get_logits_processor",
    DRAFTS: "_get_candidate_generator",
    MANAGER: "init_continuous_batching",
    BATCH: "generate_batch",
}
WARM_UP = "__warmup_"


class Override:
    """Replaces a method of one model until `undo`.

    A copy or a pickle of the model that is made meanwhile gets the model's own method. Can go together with `find_seams`.
    """

    def __init__(self, model: nn.Module, name: str, function: Callable[..., object], boundary: Boundary):
        self.model = model
        self.boundary = boundary
        self.name = name
        self.function = function
        self.original = getattr(model, name)
        self.before = vars(model).get(name)
        vars(model)[name] = self

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        return self.boundary.around("generation", self.function, self.original, *args, **kwargs)

    def __reduce__(self) -> tuple:
        return (getattr, (self.model, self.name)) if self.before is None else (copy.copy, (self.before,))

    def undo(self) -> None:
        """Puts back what was there."""
        self.function = lambda original, *args, **kwargs: original(*args, **kwargs)  # in shallow copies of the model
        if self.before is None:
            vars(self.model).pop(self.name, None)
        else:
            vars(self.model)[self.name] = self.before


def find_seams(model: nn.Module) -> dict[str, str]:
    """Returns the methods with which a model builds its processors, its draft generator and its continuous batches, and runs
    a batch; only those that it has.

    Can go when `generate` and `generate_batch` accept processors to be called after all of their own.
    """
    return {what: name for what, name in SEAMS.items() if hasattr(model, name)}


def read_processor_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[GenerationConfig, int | None]:
    """Returns the generation config and, if given, the length of the prompt from a call that builds the processors.

    Can go together with `find_seams`.
    """
    config = kwargs["generation_config"] if "generation_config" in kwargs else args[0]
    return config, kwargs.get("input_ids_seq_length", args[1] if len(args) > 1 else None)


def is_draft(config: GenerationConfig) -> bool:
    """Returns whether a generation config belongs to a model that drafts tokens for another.

    Can go together with `find_seams`.
    """
    return bool(getattr(config, "is_assistant", False))


def list_processors(manager: "ContinuousBatchingManager") -> list[LogitsProcessor]:
    """Returns the processors of a manager of continuous batching.

    Can go together with `find_seams`.
    """
    return list(manager.logit_processor.logits_processor)


def has_begun(manager: "ContinuousBatchingManager") -> bool:
    """Returns whether a manager of continuous batching has built its batches, after which processors cannot be added.

    Can go together with `find_seams`.
    """
    return manager.batch_processor is not None or manager.warmed_up


def put_processors(manager: "ContinuousBatchingManager", processors: list[object], own_class: type) -> None:
    """Sets the processors of a manager of continuous batching; those of `own_class` are called with a tensor each.

    Can go together with `find_seams`.
    """
    from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

    ContinuousBatchingLogitsProcessor.register(own_class)
    held = manager.logit_processor
    held.tensors_required += len(processors) - len(held.logits_processor)
    held.logits_processor = LogitsProcessorList(processors)
    held.do_processing = True


def find_request(request: "FutureRequestState") -> str | None:
    """Returns the id of a request that gets a new token, `None` for a warm-up request.

    Can go when continuous batching passes the requests to its processors.
    """
    request_id = request.state.request_id
    return None if request_id.startswith(WARM_UP) else request_id
