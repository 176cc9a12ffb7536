"""The private names of transformers' generation and continuous batching, each with the condition under which it can go."""

from typing import Any

from transformers import LogitsProcessorList

PROCESSORS, DRAFTS, MANAGER, BATCH = "processors", "drafts", "manager", "batch"
SEAMS = {
    PROCESSORS: "_get_logits_processor",
    DRAFTS: "_get_candidate_generator",
    MANAGER: "init_continuous_batching",
    BATCH: "generate_batch",
}
WARM_UP = "__warmup_"


def find_seams(model: Any) -> dict[str, str]:
    """Returns the methods by which a model builds its processors, its drafts and its continuous batches, and runs a batch;
    only those that it has.

    Can go when `generate` and `generate_batch` take processors that come after all of their own.
    """
    return {what: name for what, name in SEAMS.items() if hasattr(model, name)}


def read_processor_call(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, int | None]:
    """Returns the generation config and the length of the prompt, if told, from a call that builds the processors.

    Can go together with `find_seams`.
    """
    config = kwargs["generation_config"] if "generation_config" in kwargs else args[0]
    return config, kwargs.get("input_ids_seq_length", args[1] if len(args) > 1 else None)


def is_draft(config: Any) -> bool:
    """Returns whether a generation config is that of a model that drafts tokens for another.

    Can go together with `find_seams`.
    """
    return bool(getattr(config, "is_assistant", False))


def list_processors(manager: Any) -> list:
    """Returns the processors of a manager of continuous batching.

    Can go together with `find_seams`.
    """
    return list(manager.logit_processor.logits_processor)


def has_begun(manager: Any) -> bool:
    """Returns whether a manager of continuous batching has built its batches, so that processors come too late.

    Can go together with `find_seams`.
    """
    return manager.batch_processor is not None or manager.warmed_up


def put_processors(manager: Any, processors: list, own_class: type) -> None:
    """Puts processors into a manager of continuous batching; those of `own_class` are called with a tensor each.

    Can go together with `find_seams`.
    """
    from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

    ContinuousBatchingLogitsProcessor.register(own_class)
    held = manager.logit_processor
    held.tensors_required += len(processors) - len(held.logits_processor)
    held.logits_processor = LogitsProcessorList(processors)
    held.do_processing = True


def find_request(request: Any) -> str | None:
    """Returns the id of a request that gets a new token, `None` for one that only warms up.

    Can go when continuous batching tells its processors which requests they are called for.
    """
    request_id = request.state.request_id
    return None if request_id.startswith(WARM_UP) else request_id
