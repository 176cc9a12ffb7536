"""Private names of transformers' configs and model classes, each with the condition under which it can go."""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

ATTENTION, EXPERTS = "_attn_implementation", "_experts_implementation"


def find_implementation(config: Any, name: str) -> dict[str, str] | None:
    """Returns the implementation of attention or experts: under `""`, and for each part with a config of its own.

    Can go when `to_dict` has both.
    """
    if not isinstance(config, PreTrainedConfig):
        return None
    parts = {"": config, **{key: getattr(config, key, None) for key in config.sub_configs}}
    return {key: value for key, part in parts.items() if isinstance(value := getattr(part, name, None), str)}


def set_implementation(config: PreTrainedConfig, name: str, value: dict[str, str]) -> None:
    """Sets what [`find_implementation`] found.

    Can go when `from_dict` sets it for sub-configs too.
    """
    if value:
        setattr(config, name, value)


def build_empty(model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a model with uninitialised weights; `model_class(config)` lacks contexts that some models need.

    Can go when `from_config` is a public method of every model class.
    """
    with no_init_weights():
        return model_class._from_config(config, dtype=dtype)
