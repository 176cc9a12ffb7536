"""A model rebuilt from the facts of a bundle: its class by name, its config, its adapters.

Anybody may have written the bundle. Names in it are looked up in closed lists and never imported, nothing is downloaded
or unpickled, and a model that would not fit into memory is refused before it is built.
"""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..core.autopsy.bundle.tensor_file import count_bytes
from ..errors import ArgumentError
from ..hf.compat import model_config as compat_model
from .limited_process import find_usable_memory
from .rebuilt_weights import ADAPTER, check_folder, find_dtype, load_adapter
from .untrusted_facts import Facts, needs_factory, take

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
EXPERTS = ("eager", "batched_mm", "grouped_mm")
# Config entries that would download, import or select something outside of the model's own code.
DROPPED = (
    "auto_map", "custom_pipelines", "_name_or_path", "name_or_path", "attn_implementation", "_attn_implementation",
    "_attn_implementation_internal", "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
    "torch_dtype", "dtype", "transformers_version", "trust_remote_code", "use_kernels", "kernel_config", "distributed_config",
)  # fmt: skip
SWITCHED_OFF = ("use_pretrained_backbone", "pretrained")
LARGEST = 2**31
LONGEST = 2**17  # entries of a list
MOST_LAYERS = 4096
LARGEST_RANK = 4096
# A regular expression of an adapter could take for ever: one that repeats a group, or repeats more often, is refused.
REPEATED_GROUP = re.compile(r"\)\s*[*+{]")
REPEAT = re.compile(r"[*+{]")
MOST_REPEATS = 3
LAYERS = re.compile(r"layers|blocks|depth|stages|experts")
NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
# What is taken from the config of a LoRA adapter, and what does not matter because its weights are loaded.
LORA = (
    "task_type", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias",
    "use_rslora", "modules_to_save", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "trainable_token_indices", "use_dora", "layer_replication", "lora_bias", "target_parameters", "ensure_weight_tying",
)  # fmt: skip
LORA_IGNORED = (
    "peft_type", "peft_version", "auto_mapping", "inference_mode", "init_lora_weights", "megatron_core", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config",
)  # fmt: skip


def build_model(facts: Facts, checkpoints: list[Path]) -> tuple[nn.Module, set[int]]:
    """Builds a model from facts as `describe_model` returned them, and loads checkpoints: folders of safetensors with weights
    of the model or its adapter. Returns the model and the ids of the parameters that have weights from a checkpoint."""
    if "class" not in facts:
        raise needs_factory("The bundle does not describe its model")
    model_class = find_model_class(facts["class"], facts.get("module"))
    config = build_config(facts, model_class)
    dtype = find_dtype(facts.get("dtype"))
    adapters = [folder for folder in map(check_folder, checkpoints) if (folder / ADAPTER).is_file()]
    whole = [folder for folder in checkpoints if folder not in adapters]
    check_size(model_class, config, dtype, trains_all=facts.get("trainable") is None)
    known: set[int] = set()
    if whole:
        load: Any = model_class.from_pretrained  # returns two values here
        model, info = load(
            str(whole[-1]), config=config, dtype=dtype, use_safetensors=True, local_files_only=True,
            output_loading_info=True,
        )  # fmt: skip
        missing = set(info["missing_keys"])
        known = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name not in missing}
    else:
        model = compat_model.build_empty(model_class, config, dtype)
        model.tie_weights()
    recorded = {name: adapter for name, adapter in find_adapters(facts).items() if name != "ref"}
    adapted = add_adapters(model, recorded)
    for folder in adapters:
        known |= load_adapter(adapted, folder, take(facts, "active_adapter", str) or "default")
    return adapted, known


# ---- architecture ----


def find_model_class(name: object, module: object) -> type[PreTrainedModel]:
    """Returns the model class of that name in transformers, if the bundle's model was of transformers."""
    found = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    known = isinstance(found, type) and issubclass(found, PreTrainedModel) and found.config_class is not None
    if found is None or not known or not str(module).startswith("transformers."):
        raise needs_factory(
            f"The bundle's model class must be one of transformers {transformers.__version__}, got {name!r} of {module!r}"
        )
    return found


def build_config(facts: Facts, model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    """Returns the model's config without entries that could download or run anything."""
    recorded: Facts = take(facts, "config", dict) or {}
    config_class: Any = model_class.config_class
    if recorded.get("model_type") != config_class.model_type:
        raise needs_factory(
            f"The bundle's config must be of model_type {config_class.model_type!r}, as {model_class.__name__} needs it, got "
            f"model_type {recorded.get('model_type')!r}"
        )
    if recorded.get("quantization_config") is not None:
        raise needs_factory("The bundle's model was quantized, and quantized weights cannot be built from a config")
    config = config_class.from_dict(clean_config(recorded))
    kinds = (("attention", compat_model.ATTENTION, ATTENTIONS), ("experts", compat_model.EXPERTS, EXPERTS))
    for fact, name, allowed in kinds:
        parts = facts.get(fact) or {}
        chosen: dict[str, Any] = parts if isinstance(parts, dict) else {"": parts}
        for value in chosen.values():
            if value not in allowed:
                raise needs_factory(
                    f"The bundle's {name.strip('_')} must be one of {', '.join(allowed)} because kernels are not downloaded, "
                    f"got {value!r}"
                )
        compat_model.set_implementation(config, name, chosen)
    return config


def clean_config(recorded: Facts) -> dict[str, Any]:
    """Returns config values without those that could download or run anything; refuses impossible sizes."""
    return {
        key: False if key in SWITCHED_OFF and not isinstance(item, (dict, list)) else _clean_value(item, key)
        for key, item in recorded.items()
        if key not in DROPPED and not (key == "quantization_config" and item is None)
    }


def _clean_value(value: object, name: str) -> object:
    if isinstance(value, dict):
        return clean_config(value)
    if isinstance(value, list):
        if len(value) > LONGEST:
            raise needs_factory(f"The bundle's config has a list {name} of {len(value)} entries, which is impossible")
        return [_clean_value(item, name) for item in value]
    if isinstance(value, str):
        return NUMBERS.get(value, value)
    if isinstance(value, int) and (abs(value) > LARGEST or (LAYERS.search(name) and value > MOST_LAYERS)):
        raise needs_factory(f"The bundle's config has {name}={value}, which is impossible")
    return value


def check_size(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype, trains_all: bool
) -> None:
    """Refuses a model whose parameters, gradients and buffers would not fit into memory."""
    with torch.device("meta"):
        model = compat_model.build_empty(model_class, config, dtype)
    needed = count_bytes(model.parameters()) * (2 if trains_all else 1) + count_bytes(model.buffers())
    free = find_usable_memory()
    if needed > free:
        raise ArgumentError(
            f"The bundle's model needs {needed / 2**30:.1f} GiB for parameters, gradients and buffers, but only {free / 2**30:.1f} GiB "
            "of memory are free. Replay it on a larger machine."
        )


# ---- adapters ----


def find_adapters(facts: Facts) -> dict[str, object]:
    """Returns the recorded configs of the model's adapters by name."""
    return {name: recorded for name, recorded in (take(facts, "adapters", dict) or {}).items() if name.isidentifier()}


def add_adapters(model: "PreTrainedModel | PeftModel", adapters: dict[str, object]) -> "PreTrainedModel | PeftModel":
    """Returns the model with the adapters it does not have yet."""
    for name, recorded in adapters.items():
        config = build_adapter(recorded)
        if isinstance(model, PreTrainedModel):
            from peft import get_peft_model

            model = get_peft_model(model, config, adapter_name=name)
        elif name not in model.peft_config:
            model.add_adapter(name, config)
    return model


def match_adapters(model: Any, adapters: dict[str, object]) -> None:
    """Makes the adapters of a model those of the run: a constructor of TRL may have added a copy named `ref`, or not."""
    if adapters:
        for name in [name for name in model.peft_config if name not in adapters]:
            model.delete_adapter(name)
        add_adapters(model, adapters)


def build_adapter(recorded: object) -> "LoraConfig":
    try:
        from peft import LoraConfig
    except ModuleNotFoundError as error:
        raise ArgumentError("The bundle's model has an adapter, which needs peft. Run pip install peft.") from error
    if not isinstance(recorded, dict) or recorded.get("peft_type") != "LORA":
        kind = recorded.get("peft_type") if isinstance(recorded, dict) else recorded
        raise needs_factory(f"The bundle's adapter must be of type LORA, got {kind!r}")
    for name, value in recorded.items():
        if value and name not in LORA and name not in LORA_IGNORED:
            raise needs_factory(f"The bundle's adapter has {name}={value!r}, which cannot be rebuilt")
    taken = {name: recorded[name] for name in LORA if recorded.get(name) is not None}
    for name, value in taken.items():
        check_adapter_value(name, value)
    return LoraConfig(**clean_config(taken))


def check_adapter_value(name: str, value: object) -> None:
    """Refuses a rank, a number of copied layers or a regular expression that would take all memory or time."""
    values: list[Any] = (
        [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    )
    patterns = [item for item in values if isinstance(item, str)]
    bad = [item for item in patterns if REPEATED_GROUP.search(item) or len(REPEAT.findall(item)) > MOST_REPEATS]
    if bad:
        raise needs_factory(f"The bundle's adapter has {name}={bad[0][:80]!r}, a pattern that could take forever")
    if name in ("r", "rank_pattern") and any(isinstance(item, int) and item > LARGEST_RANK for item in values):
        raise needs_factory(f"The bundle's adapter has {name}={str(value)[:80]}, but a rank is at most {LARGEST_RANK}")
    if name == "layer_replication" and sum(end - start for start, end in values) > MOST_LAYERS:
        raise needs_factory(f"The bundle's adapter has layer_replication={str(value)[:80]}, which is impossible")
