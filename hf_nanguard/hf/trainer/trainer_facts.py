"""What must be known about a trainer to build its model and its loss again elsewhere, as JSON values.

Taken at the moment of failure. Neither weights nor data, and nothing that names the user's files, accounts or trackers.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from accelerate.state import AcceleratorState, is_initialized
from torch import Tensor, nn
from transformers import PreTrainedConfig, TrainingArguments

from ..compat import trainer as compat
from ..compat.host_trainer import HostTrainer
from ..compat.model_config import ATTENTION, EXPERTS, find_implementation
from .held_inputs import LossWeight
from .mixin import GuardedTrainerMixin

HOSTS = ("transformers.", "trl.")
PACKAGES = ("transformers", "trl", "accelerate", "peft", "torch")
# Arguments that a loss, or the way a model runs, depends on. Only these are taken from a bundle.
LOSS_ARGUMENTS = (
    "average_tokens_across_devices", "beta", "bf16", "cast_lm_head_to_fp32", "center_rewards_coefficient", "delta",
    "desirable_weight", "disable_dropout", "discopop_tau", "entropy_coef", "entropy_coef_delta", "entropy_coef_max",
    "entropy_coef_min", "entropy_target", "epsilon", "epsilon_high", "f_alpha_divergence_coef", "f_divergence_type",
    "fp16", "gradient_accumulation_steps", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "importance_sampling_level", "label_names", "label_smoothing", "label_smoothing_factor", "ld_alpha",
    "loss_type", "loss_weights", "mask_truncated_completions", "max_completion_length", "neftune_noise_alpha",
    "num_generations", "num_iterations", "off_policy_mask_threshold", "router_aux_loss_coef",
    "sapo_temperature_neg", "sapo_temperature_pos", "seed", "steps_per_generation", "temperature",
    "top_entropy_quantile", "undesirable_weight", "use_adaptive_entropy", "use_bias_correction_kl", "use_weighting",
    "vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos", "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
)  # fmt: skip
# Of the other arguments those that may hold paths, names or secrets.
PRIVATE = (
    "output_dir", "logging_dir", "run_name", "report_to", "hub_", "push_to_hub", "deepspeed", "fsdp", "project", "trackio",
    "resume_from_checkpoint", "log_completions_hub", "vllm_server", "chat_template_path", "model_init_kwargs",
    "generation_config", "local_rank", "ddp_", "accelerator_config", "parallelism_config",
)  # fmt: skip
PLACES = ("_name_or_path", "base_model_name_or_path", "revision", "parent_library")
# What a loss reads from the trainer itself and what may differ from the arguments, or cannot be given as one later.
LOSS_ATTRIBUTES = ("beta", "use_vllm", "entropy_coef", "precompute_ref_logps", "temperature")
# Methods through which a class makes a loss of its own.
LOSS_METHODS = (
    "training_step", "compute_loss", "_compute_loss", "compute_loss_context_manager", "_get_per_token_logps_and_entropies",
)  # fmt: skip


def describe_trainer(trainer: HostTrainer, share: LossWeight) -> dict[str, Any]:
    """Returns what it takes to build the model and the loss of a trainer again.

    Args:
        trainer (`Trainer`):
            The trainer, guarded or not.
        share (`LossWeight`):
            How it weighed the micro-batch.

    Returns:
        `dict`: JSON values only.
    """
    accelerator = trainer.accelerator
    scaler = accelerator.scaler
    host = host_class(trainer)
    return {
        "kind": "trainer",
        "model": describe_model(accelerator.unwrap_model(trainer.model, keep_torch_compile=False)),
        "trainer": {
            "class": type(trainer).__name__,
            "host": host.__name__,
            "host_module": host.__module__,
            "own_loss": find_own_loss(trainer),
            "reference": vars(trainer).get("ref_model") is not None,
        },
        "arguments": describe_arguments(trainer.args),
        "attributes": {
            name: value for name in LOSS_ATTRIBUTES if name in vars(trainer) and is_plain(value := vars(trainer)[name])
        },
        "share": {name: read_count(getattr(share, name)) for name in ("steps", "num_items", "completion_items")},
        "loss_scale": None if scaler is None else float(scaler.get_scale()),
        "world_size": int(trainer.args.world_size),
        "versions": find_versions(),
    }


def host_class(trainer: HostTrainer) -> type:
    """Returns the class of transformers or TRL that the trainer is, or was derived from."""
    return next(
        c for c in type(trainer).__mro__ if c.__module__.startswith(HOSTS) and not issubclass(c, GuardedTrainerMixin)
    )


def find_own_loss(trainer: HostTrainer) -> list[str]:
    """Returns the names of what makes the loss the user's own code, none if it is the hosts'."""
    own = {name for name in LOSS_METHODS if name in vars(trainer)}
    for c in type(trainer).__mro__:
        if not c.__module__.startswith((*HOSTS, "hf_nanguard.", "torch.", "builtins")):
            own.update(name for name in LOSS_METHODS if name in vars(c))
    if trainer.compute_loss_func is not None:
        own.add("compute_loss_func")
    if compat.has_own_loss(trainer) and not own:
        own.add("compute_loss")
    return sorted(own)


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Returns what it takes to build a model again, apart from its weights.

    Args:
        model (`nn.Module`):
            The model without wrappers of accelerate's; an adapter of PEFT's may be around it.
    """
    host: Any = model
    adapters = host.peft_config if hasattr(model, "get_base_model") else {}
    base = host.get_base_model() if adapters else host
    config = getattr(base, "config", None)
    dtype, exceptions = describe_dtypes(model)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {
        "class": type(base).__name__,
        "module": type(base).__module__,
        "config": without_names(config) if isinstance(config, PreTrainedConfig) else None,
        "attention": find_implementation(config, ATTENTION),
        "experts": find_implementation(config, EXPERTS),
        "dtype": dtype,
        "dtypes": exceptions,
        "trainable": names if len(names) < sum(1 for _ in model.parameters()) else None,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "gradient_checkpointing": bool(getattr(base, "is_gradient_checkpointing", False)),
        "adapters": {str(name): without_names(adapter) for name, adapter in adapters.items()},
        "active_adapter": str(host.active_adapter) if adapters else None,
        "mixed_precision": str(AcceleratorState().mixed_precision) if is_initialized() else "no",
        "device": next((parameter.device.type for parameter in model.parameters()), "cpu"),
    }


def without_names(config: Any) -> dict[str, Any]:
    """Returns the config of a model or an adapter without the places it came from."""
    return {name: value for name, value in plain(config.to_dict()).items() if name not in PLACES}


def describe_dtypes(model: nn.Module) -> tuple[str, dict[str, str]]:
    """Returns the dtype of most floating-point numbers, and the names of parameters and buffers that have another."""
    named = {name: tensor for name, tensor in name_state(model) if tensor.is_floating_point()}
    count: Counter = Counter()
    for tensor in named.values():
        count[tensor.dtype] += tensor.numel()
    most = count.most_common(1)[0][0] if count else None
    other = {name: _short(tensor.dtype) for name, tensor in named.items() if tensor.dtype != most}
    return _short(most), other


def name_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields all parameters and buffers, shared ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def describe_arguments(args: TrainingArguments) -> dict[str, Any]:
    """Returns the arguments a loss depends on, and of the hosts' others those that differ from their defaults."""
    host = next(c for c in type(args).__mro__ if c.__module__.startswith(HOSTS))
    found = {}
    for f in fields(host):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        value = getattr(args, f.name)
        told = f.name in LOSS_ARGUMENTS or (value != default and not f.name.startswith(PRIVATE))
        if told and is_plain(value := plain(value)):
            found[f.name] = value
    return found


def plain(value: Any) -> Any:
    """Returns a value with tuples and sets as lists, enumerations as their values and keys as strings."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value), key=str)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def is_plain(value: Any) -> bool:
    """Returns whether a value is a number, a text, or a list or mapping of such."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def read_count(value: Any) -> float | int | None:
    """Returns a count that may live on a device."""
    return value.item() if isinstance(value, Tensor) else value


def find_versions() -> dict[str, str]:
    """Returns the versions of the packages whose code decides what is computed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
