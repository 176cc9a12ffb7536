"""Tensors nested in mappings, sequences and dataclasses: found, named and changed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ...own_fields import own_fields
from ...plain_text import quote

# Names of inputs of transformers, TRL and PEFT: names of code. Any other key of a batch may be text of the data.
HOST_NAMES = frozenset((
    "advantages", "assistant_masks", "attention_mask", "bbox", "bool_masked_pos", "chosen", "chosen_attention_mask",
    "chosen_ids", "chosen_input_ids", "chosen_labels", "class_labels", "completion", "completion_attention_mask",
    "completion_ids", "completion_input_ids", "completion_labels", "completion_mask", "completions", "content",
    "cu_seq_lens_k", "cu_seq_lens_q", "cu_seqlens", "decoder_attention_mask", "decoder_input_ids",
    "decoder_inputs_embeds", "decoder_position_ids", "encoder_attention_mask", "encoder_hidden_states",
    "encoder_outputs", "end_positions", "future_values", "global_attention_mask", "hidden_states", "image_embeds",
    "image_grid_thw", "image_position_ids", "image_sizes", "images", "importance_sampling_ratio", "input",
    "input_features", "input_features_mask", "input_ids", "input_values", "inputs", "inputs_embeds",
    "kl_completion_ids", "label", "label_ids", "labels", "logits", "logits_to_keep", "logprobs", "margin", "mask",
    "mask_labels", "mask_time_indices", "max_length_k", "max_length_q", "messages", "mm_token_type_ids",
    "num_images", "num_items_in_batch", "num_tiles", "old_logps", "old_per_token_logps", "past_key_values",
    "past_observed_mask", "past_time_features", "past_values", "pixel_attention_mask", "pixel_mask", "pixel_values",
    "pixel_values_videos", "position_embeddings", "position_ids", "prompt", "prompt_attention_mask", "prompt_ids",
    "prompt_input_ids", "prompt_mask", "prompts", "ref_chosen_logps", "ref_logps", "ref_per_token_logps",
    "ref_rejected_logps", "reference_logps", "rejected", "rejected_attention_mask", "rejected_ids",
    "rejected_input_ids", "rejected_labels", "return_loss", "rewards", "role", "sampling_per_token_logps",
    "seq_idx", "shift_labels", "spatial_shapes", "start_positions", "teacher_input_ids", "text", "token_type_ids",
    "tool_mask", "use_cache", "video_grid_thw",
))  # fmt: skip


def list_parts(value: object) -> Iterable[tuple[object, object]]:
    """Returns keys and values of a mapping, list, tuple or dataclass; nothing for anything else."""
    if isinstance(value, Mapping):  # first, because a `ModelOutput` is a dataclass, too
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if is_dataclass(value) and not isinstance(value, type):
        if hasattr(value, "__dict__"):
            return own_fields(value).items()
        return [(field.name, getattr(value, field.name)) for field in fields(value) if hasattr(value, field.name)]
    return ()


def find_tensors(value: object) -> Iterator[Tensor]:
    """Yields the tensors inside nested values, in order."""
    if isinstance(value, Tensor):
        yield value
    for _, part in list_parts(value):
        yield from find_tensors(part)


def name_tensors(value: object, prefix: str = "") -> dict[str, Tensor]:
    """Returns the tensors inside nested values by a dotted name; a lone tensor is called `input`."""
    if isinstance(value, Tensor):
        return {prefix or "input": value}
    found: dict[str, Tensor] = {}
    for key, part in list_parts(value):
        found |= name_tensors(part, f"{prefix}.{key}" if prefix else str(key))
    return found


def quote_name(name: str) -> str:
    """Returns a name of [`name_tensors`], quoted if a key in it is none of the hosts' names."""
    return name if all(part in HOST_NAMES or part.isdecimal() for part in name.split(".")) else quote(name)


def map_tensors(value: object, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns a copy of nested values with every tensor changed. A dataclass without tensors, e.g. a config, stays itself."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, Mapping) and next(find_tensors(value), None) is None:
        return value
    return map_parts(value, lambda part: map_tensors(part, change))


def map_parts(value: object, change: Callable[[object], object]) -> object:
    """Returns a container of the same type with every part changed; a value that is no container is returned as it is."""
    if isinstance(value, (list, tuple)):
        parts = [change(part) for part in value]
        make: Any = type(value)
        return make(*parts) if hasattr(value, "_fields") else make(parts)
    changed = {key: change(part) for key, part in list_parts(value)}
    if isinstance(value, Mapping):
        result: Any = copy(value)
        for key, part in changed.items():
            result[key] = part
        return result
    if not changed:
        return value
    result = copy(value)
    for name, part in changed.items():
        object.__setattr__(result, str(name), part)  # a frozen dataclass, too
    return result
