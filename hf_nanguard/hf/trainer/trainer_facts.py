"""What is recorded about a trainer so that its model and loss can be rebuilt elsewhere, as JSON values.

Recorded at the moment of failure. Contains neither weights nor data, and nothing that names the user's files, accounts
or trackers.
"""

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from accelerate.state import AcceleratorState, is_initialized
from torch import Tensor, nn
from transformers import PreTrainedConfig, TrainingArguments

from ...boundary import attempt
from ...plain_text import REDACTED, quote
from ..compat.model_config import (
    ATTENTION,
    EXPERTS,
    checkpoints_activations,
    find_adapters,
    find_config,
    find_implementation,
    without_adapter,
)
from ..compat.own_loss import HOSTS, find_own_loss
from ..compat.trainer_protocol import HostTrainer
from .guarded_class import is_made_here

PACKAGES = ("transformers", "trl", "accelerate", "peft", "torch")
# Training arguments that may contain paths, names or secrets.
PRIVATE = (
    "output_dir", "logging_dir", "run_name", "report_to", "hub_", "push_to_hub", "deepspeed", "fsdp", "project", "trackio",
    "resume_from_checkpoint", "log_completions_hub", "vllm_server", "chat_template_path", "model_init_kwargs",
    "generation_config", "local_rank", "ddp_", "accelerator_config", "parallelism_config",
)  # fmt: skip
PLACES = ("_name_or_path", "base_model_name_or_path", "revision", "parent_library", "label2id")
PATH = re.compile(r"/|^~|^[A-Za-z]:\\|^\\\\")  # or the name of a model on the Hub
# Attributes of a trainer that its loss reads and that can differ from the argument of the same name.
LOSS_ATTRIBUTES = ("beta", "use_vllm", "entropy_coef", "precompute_ref_logps", "temperature")


def describe_trainer(trainer: HostTrainer, weight: Mapping[str, Tensor | float | None]) -> dict[str, object]:
    """Returns what it takes to rebuild the model and the loss of a trainer, as JSON values; `weight` are the counts by which it
    weighed the micro-batch."""
    accelerator = trainer.accelerator
    scaler = accelerator.scaler
    host = next(c for c in type(trainer).__mro__ if c.__module__.startswith(HOSTS) and not is_made_here(c))
    attributes = {name: getattr(trainer, name, None) for name in LOSS_ATTRIBUTES}
    return {
        "kind": "trainer",
        "model": describe_model(accelerator.unwrap_model(trainer.model, keep_torch_compile=False)),
        "trainer": {
            "class": type(trainer).__name__,
            "host": host.__name__,
            "own_loss": find_own_loss(trainer),
            "reference": getattr(trainer, "ref_model", None) is not None,
        },
        "arguments": describe_arguments(trainer.args),
        "attributes": {name: value for name, value in attributes.items() if isinstance(value, (bool, int, float))},
        "share": {name: count.item() if isinstance(count, Tensor) else count for name, count in weight.items()},
        "loss_scale": None if scaler is None else float(scaler.get_scale()),
        "world_size": int(trainer.args.world_size),
        "versions": find_versions(),
    }


def describe_model(model: nn.Module) -> dict[str, object]:
    """Returns what it takes to rebuild a model, with or without a PEFT adapter, apart from its weights."""
    host: Any = model
    base: object = without_adapter(model)
    adapters = {} if base is model else find_adapters(model)
    config = find_config(base)
    dtype, exceptions = describe_dtypes(model)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {
        "class": type(base).__name__,
        "module": type(base).__module__,
        "config": describe_config(config) if isinstance(config, PreTrainedConfig) else None,
        "attention": find_implementation(config, ATTENTION),
        "experts": find_implementation(config, EXPERTS),
        "dtype": dtype,
        "dtypes": exceptions,
        "trainable": names if len(names) < sum(1 for _ in model.parameters()) else None,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "gradient_checkpointing": checkpoints_activations(base),
        "adapters": {str(name): describe_config(adapter) for name, adapter in adapters.items()},
        "active_adapter": str(host.active_adapter) if adapters else None,
        "mixed_precision": str(AcceleratorState().mixed_precision) if is_initialized() else "no",
        "device": next((parameter.device.type for parameter in model.parameters()), "cpu"),
    }


def describe_config(config: Any) -> dict[str, object]:
    """Returns the config of a model or an adapter without the places it came from and the names of its classes. What the user has
    added to it is quoted, because it may be text."""
    found = without_places(to_json(config.to_dict()))
    known = find_settings(type(config))
    return {
        **{name: found[name] for name in found if name in known},
        **quoted({name: found[name] for name in found if name not in known}),
    }


def find_settings(config_class: type) -> set[str]:
    """Returns the names of what a class of configs defines, also while it builds one."""
    built: Mapping[str, object] = attempt(lambda: config_class().to_dict(), lambda error: {})  # type: ignore[attr-defined]
    return {*built, *inspect.signature(config_class).parameters, *PreTrainedConfig().to_dict()}


def quoted(value: object) -> Any:
    """Returns JSON values, nested or not, with every text quoted."""
    if isinstance(value, dict):
        return {quote(name): quoted(item) for name, item in value.items()}
    if isinstance(value, list):
        return [quoted(item) for item in value]
    return quote(value) if isinstance(value, str) else value


def without_places(value: object) -> Any:
    """Returns JSON values, nested or not, without paths and without what names a model or a class of the data."""
    if isinstance(value, list):
        return [without_places(item) for item in value]
    if isinstance(value, str):
        return REDACTED if PATH.search(value) else value
    if not isinstance(value, dict):
        return value
    kept = {name: without_places(item) for name, item in value.items() if name not in PLACES and not PATH.search(name)}
    if isinstance(classes := kept.get("id2label"), dict):
        kept["id2label"] = {number: f"LABEL_{number}" for number in classes}  # as the host calls them by default
    return kept


def describe_dtypes(model: nn.Module) -> tuple[str, dict[str, str]]:
    """Returns the dtype of most floating-point values, and those of parameters and buffers that have another."""
    named = {name: tensor for name, tensor in named_tensors(model) if tensor.is_floating_point()}
    count: Counter[str] = Counter()
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in named.items()}
    for name, tensor in named.items():
        count[dtypes[name]] += tensor.numel()
    most = max(count, key=count.__getitem__, default="None")
    return most, {name: dtype for name, dtype in dtypes.items() if dtype != most}


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields all parameters and buffers, shared ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def describe_arguments(args: TrainingArguments) -> dict[str, object]:
    """Returns the simple-valued fields of the host's own arguments, except private ones."""
    host: Any = next(c for c in type(args).__mro__ if c.__module__.startswith(HOSTS))
    found = {f.name: to_json(getattr(args, f.name)) for f in fields(host) if not f.name.startswith(PRIVATE)}
    return {name: value for name, value in found.items() if is_simple(value)}


def to_json(value: object) -> object:
    """Returns a value with tuples and sets as lists, enumerations as their values and keys as strings."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(to_json, value), key=str)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def is_simple(value: object) -> bool:
    """Returns whether a value is `None`, a number, a single word (so no path and no address), or a list or a mapping of
    these."""
    if isinstance(value, dict):
        return is_simple(list(value)) and is_simple(list(value.values()))
    if isinstance(value, list):
        return all(map(is_simple, value))
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and value.isidentifier())


def find_versions() -> dict[str, str]:
    """Returns the versions of the packages whose code decides what is computed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
