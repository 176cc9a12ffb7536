"""What a model is asked for whose class is not known, and private names of transformers' configs and model classes, each with
the condition under which it can go."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

ATTENTION, EXPERTS = "_attn_implementation", "_experts_implementation"


def find_config(model: object) -> Any:
    """Returns the config of a model, `None` of one without. Can go when a Trainer takes models with a config only."""
    return getattr(model, "config", None)


def find_tokenizer(processor: object) -> object:
    """Returns the tokenizer of a processor of several kinds of data; a tokenizer is its own.

    Can go when tokenizers and processors have a common way to ask for it.
    """
    return getattr(processor, "tokenizer", processor)


def find_adapters(model: Any) -> Mapping[str, Any]:
    """Returns the configs of the PEFT adapters of a model, around it or added by `add_adapter`, by name. peft is optional, so its class
    is not imported.

    Can go when transformers can tell a PEFT model without peft.
    """
    has_adapters = hasattr(model, "get_base_model") or getattr(model, "_hf_peft_config_loaded", False)
    return model.peft_config if has_adapters else {}


def plain_adapter_name(name: str) -> str:
    """Returns the name that a module or parameter had before PEFT wrapped it. Can go together with `find_adapters`."""
    return ".".join(part for part in name.split(".") if part not in ("base_layer", "original_module"))


def without_adapter(model: object) -> Any:
    """Returns the model inside a PEFT adapter, or the model itself. Can go together with `find_adapters`."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_encoder_decoder(model: object) -> bool:
    """Returns whether a model, with or without an adapter, has an encoder beside the decoder.

    Can go when every config says it; those of diffusers and of one's own do not.
    """
    return bool(getattr(find_config(without_adapter(model)), "is_encoder_decoder", False))


def find_implementation(config: object, name: str) -> dict[str, str] | None:
    """Returns the implementation of attention or experts: under `""`, and for each part with a config of its own.

    Can go when `to_dict` has both.
    """
    if not isinstance(config, PreTrainedConfig):
        return None
    parts = {"": config, **{key: getattr(config, key, None) for key in config.sub_configs}}
    return {key: value for key, part in parts.items() if isinstance(value := getattr(part, name, None), str)}


def checkpoints_activations(model: object) -> bool:
    """Returns whether gradient checkpointing is on; transformers 5.23 has renamed the property and warns of the old name.

    Can go when transformers 5.22 is not supported any more.
    """
    old = False if hasattr(model, "is_activation_checkpointing") else getattr(model, "is_gradient_checkpointing", False)
    return bool(getattr(model, "is_activation_checkpointing", old))


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
