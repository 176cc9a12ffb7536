"""A model built again from what a bundle tells about it: its class by name, its config, its adapters, its weights.

A bundle comes from somebody else. Names in it are looked up in closed lists, never imported; nothing is fetched, nothing
unpickled, no code of the bundle's is run; and what would not fit into memory is refused before it is built.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import ArgumentError
from ..hf.compat import model_config as compat_model
from .rebuilt_weights import FACTORY, check_folder, find_dtype, load_adapter

ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
EXPERTS = ("eager", "batched_mm", "grouped_mm")
# Config entries that would fetch, import or choose something outside of the model's own code.
DROPPED = (
    "auto_map", "custom_pipelines", "_name_or_path", "name_or_path", "attn_implementation", "_attn_implementation",
    "_attn_implementation_internal", "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
    "torch_dtype", "dtype", "transformers_version", "trust_remote_code", "use_kernels", "kernel_config", "distributed_config",
)  # fmt: skip
SWITCHED_OFF = ("use_pretrained_backbone", "pretrained")
LARGEST = 2**31
MOST_LAYERS = 4096
LAYERS = re.compile(r"layers|blocks|depth|stages|experts")
NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
# What a LoRA adapter may be told. Its first weights do not matter, for they are loaded.
LORA = (
    "task_type", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias",
    "use_rslora", "modules_to_save", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "trainable_token_indices", "use_dora", "layer_replication", "lora_bias", "target_parameters", "ensure_weight_tying",
)  # fmt: skip


@contextmanager
def offline() -> Iterator[None]:
    """Keeps the Hugging Face libraries off the network, whatever the environment says."""
    before = huggingface_hub.constants.HF_HUB_OFFLINE
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = before


# ---- architecture ----


def find_model_class(name: Any, module: Any) -> type[PreTrainedModel]:
    """Returns the model class of that name in transformers, if that is where the bundle's model had it from."""
    found: Any = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    known = isinstance(found, type) and issubclass(found, PreTrainedModel) and found.config_class is not None
    if not known or not str(module).startswith("transformers."):
        raise ArgumentError(
            f"The bundle's model class must be one of transformers {transformers.__version__}, got {name!r} of {module!r}. "
            f"{FACTORY}."
        )
    return found


def build_config(facts: dict[str, Any], model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    """Returns the model's config, cleaned of what could fetch or run anything."""
    told = facts.get("config")
    config_class: Any = model_class.config_class
    if not isinstance(told, dict) or told.get("model_type") != config_class.model_type:
        raise ArgumentError(
            f"The bundle's config must be one of a {config_class.model_type} model, as {model_class.__name__} needs it, got "
            f"model_type {told.get('model_type') if isinstance(told, dict) else told!r}. {FACTORY}."
        )
    if told.get("quantization_config") is not None:
        raise ArgumentError(
            "The bundle's model was quantized, and quantized weights cannot be built from a config. "
            "Load it by --factory module:function."
        )
    implementations = {
        compat_model.ATTENTION: _choose(facts.get("attention"), ATTENTIONS, "attention"),
        compat_model.EXPERTS: _choose(facts.get("experts"), EXPERTS, "experts"),
    }
    try:
        config = config_class.from_dict(clean_config(told))
    except ArgumentError:
        raise
    except Exception as error:  # a config of the hosts' may raise anything on values it does not know
        raise _unbuildable("config", model_class, error) from error
    for name, value in implementations.items():
        compat_model.set_implementation(config, name, value)
    return config


def _choose(told: Any, allowed: tuple[str, ...], what: str) -> dict[str, str]:
    """Returns how each part of the model computes, if all are ways that need no download."""
    parts = told if isinstance(told, dict) else {} if told is None else {"": told}
    for value in parts.values():
        if value not in allowed:
            raise ArgumentError(
                f"The bundle's {what} implementation must be one of {', '.join(allowed)}, got {value!r}. Kernels are not "
                f"fetched for a bundle: {FACTORY[0].lower()}{FACTORY[1:]}."
            )
    return parts


def clean_config(told: Any, name: str = "config") -> Any:
    """Returns config values without those that could fetch or run anything, refusing absurd sizes."""
    if isinstance(told, dict):
        cleaned = {
            key: False if key in SWITCHED_OFF and not isinstance(item, (dict, list)) else clean_config(item, key)
            for key, item in told.items()
            if key not in DROPPED
        }
        if cleaned.get("quantization_config") is None:
            cleaned.pop("quantization_config", None)
        return cleaned
    if isinstance(told, list):
        return [clean_config(item, name) for item in told]
    if isinstance(told, str):
        return NUMBERS.get(told, told)
    if isinstance(told, int) and (abs(told) > LARGEST or (LAYERS.search(name) and told > MOST_LAYERS)):
        raise ArgumentError(f"The bundle's config has {name}={told}, which no model has. {FACTORY}.")
    return told


def build_model(facts: dict[str, Any], checkpoints: Iterable[Path] = ()) -> tuple[nn.Module, set[int]]:
    """Builds a model from what a bundle tells.

    Args:
        facts (`dict`):
            As `describe_model` gave them.
        checkpoints (`Iterable[Path]`):
            Folders of safetensors with weights of the model or its adapter.

    Returns:
        `tuple[nn.Module, set[int]]`: the model, and the ids of the parameters that have weights from a checkpoint.
    """
    model: Any
    model_class = find_model_class(facts.get("class"), facts.get("module"))
    config = build_config(facts, model_class)
    dtype = find_dtype(facts.get("dtype"))
    folders = [check_folder(Path(folder)) for folder in checkpoints]
    whole = [folder for folder, adapter in folders if not adapter]
    loaded: set[int] = set()
    try:
        check_size(model_class, config, dtype, facts)
        if whole:
            read: Any = model_class.from_pretrained  # it returns two things here
            model, info = read(
                str(whole[-1]), config=config, dtype=dtype, use_safetensors=True, local_files_only=True,
                output_loading_info=True,
            )  # fmt: skip
            missing = set(info["missing_keys"])
            loaded = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name not in missing}
        else:
            model = compat_model.build_empty(model_class, config, dtype)
            model.tie_weights()
    except ArgumentError:
        raise
    except Exception as error:  # any constructor of the hosts' may run here, on values of somebody else's
        raise _unbuildable("model", model_class, error) from error
    adapters = facts.get("adapters") or {}
    if adapters:
        model = add_adapters(model, adapters)
        for folder in [folder for folder, adapter in folders if adapter]:
            loaded |= load_adapter(model, folder, str(facts.get("active_adapter") or "default"))
    return model, loaded


def _unbuildable(what: str, model_class: type, error: Exception) -> ArgumentError:
    first = (str(error).strip().splitlines() or ["no message"])[0][:200]
    return ArgumentError(
        f"The bundle's {what} of {model_class.__name__} could not be built with transformers {transformers.__version__} "
        f"({type(error).__name__}: {first}). {FACTORY}."
    )


def check_size(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype, facts: dict[str, Any]
) -> None:
    """Refuses a model whose parameters and gradients would not fit into memory."""
    with torch.device("meta"):
        model = compat_model.build_empty(model_class, config, dtype)
    sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    needed = sum(sizes) * (1 if facts.get("trainable") is not None else 2)
    free = find_free_memory()
    if needed > free:
        raise ArgumentError(
            f"The bundle's model needs {needed / 2**30:.1f} GiB for parameters and gradients, but {free / 2**30:.1f} GiB of "
            "memory are free here. Replay it on a larger machine."
        )


def find_free_memory() -> int:
    """Returns how many bytes of memory could be used."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not a Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# ---- adapters ----


def add_adapters(model: nn.Module, adapters: dict[str, Any]) -> nn.Module:
    """Puts the LoRA adapters of a bundle around a model."""
    try:
        from peft import get_peft_model
    except ModuleNotFoundError as error:
        raise ArgumentError("The bundle's model has an adapter, which needs peft. Run pip install peft.") from error
    configs = {name: build_adapter(told) for name, told in adapters.items() if name.isidentifier()}
    try:
        (first, config), *others = configs.items()
        wrapped = get_peft_model(model, config, adapter_name=first)  # type: ignore[arg-type]
        for name, config in others:
            wrapped.add_adapter(name, config)
    except Exception as error:  # of PEFT's, on values of somebody else's
        raise _unbuildable("adapter", type(model), error) from error
    return wrapped


def build_adapter(told: Any) -> Any:
    """Returns the config of a LoRA adapter."""
    from peft import LoraConfig

    if not isinstance(told, dict) or told.get("peft_type") != "LORA":
        kind = told.get("peft_type") if isinstance(told, dict) else told
        raise ArgumentError(f"The bundle's adapter must be of type LORA, got {kind!r}. {FACTORY}.")
    unusual = LoraConfig().to_dict()
    fixed = (
        "use_qalora",
        "use_bdlora",
        "arrow_config",
        "velora_config",
        "monteclora_config",
        "alora_invocation_tokens",
    )
    for name in (*fixed, "megatron_config", "kasa_config"):
        if name in unusual and told.get(name, unusual[name]) != unusual[name]:
            raise ArgumentError(f"The bundle's adapter has {name}={told[name]!r}, which cannot be built. {FACTORY}.")
    return LoraConfig(**{name: clean_config(told[name], name) for name in LORA if told.get(name) is not None})
