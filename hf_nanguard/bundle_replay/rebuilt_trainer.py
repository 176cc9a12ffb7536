"""A trainer of transformers or TRL rebuilt from a bundle, so that its own loss is what runs.

The bundle names a class of a closed table and the settings of its loss; it cannot name anything else. The constructor of
that class runs, because it also adapts the model (dropout, dtypes, a fused head), but without a dataset to process.
"""

import math
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, TrainingArguments
from transformers.integrations.neftune import activate_neftune

from ..errors import ArgumentError
from ..hf.compat.model_config import find_config
from ..hf.compat.own_loss import without_data
from ..hf.compat.trainer import ITEMS
from ..hf.compat.trainer_protocol import HostTrainer
from ..hf.trainer.held_inputs import LossWeight
from ..hf.trainer.trainer_facts import LOSS_ATTRIBUTES, is_simple
from .rebuilt_model import NUMBERS
from .untrusted_facts import Facts, needs_factory, take, take_names

# The only trainers that a bundle can name: the package of each and its arguments.
TRAINERS = {
    "Trainer": ("transformers", "TrainingArguments"),
    "Seq2SeqTrainer": ("transformers", "Seq2SeqTrainingArguments"),
    "SFTTrainer": ("trl", "SFTConfig"),
    "DPOTrainer": ("trl", "DPOConfig"),
    "KTOTrainer": ("trl", "KTOConfig"),
    "RewardTrainer": ("trl", "RewardConfig"),
    "GRPOTrainer": ("trl", "GRPOConfig"),
    "RLOOTrainer": ("trl", "RLOOConfig"),
}
# Of `TrainingArguments` only these are taken from a bundle. Everything about output, hub, reporting and launchers is off.
RUN_ARGUMENTS = (
    "average_tokens_across_devices", "bf16", "fp16", "gradient_accumulation_steps", "gradient_checkpointing",
    "label_names", "label_smoothing_factor", "neftune_noise_alpha", "seed",
)  # fmt: skip
# Of the arguments that a trainer adds to these, all are taken except those that begin like this.
OFF = (
    "activation_offloading", "assistant_only", "cache_", "chat_template", "completion_only", "dataset_", "ds3_", "eos_token",
    "eval_", "generation_", "log_", "model_", "packing", "pad_t", "padding_", "predict_", "precompute_", "reward_",
    "shuffle_", "sortish_", "sync_", "transformers_", "truncation_", "trust_", "use_transformers", "use_vllm", "vllm_enable",
    "vllm_group", "vllm_m", "vllm_server", "vllm_structured",
)  # fmt: skip
CHECKPOINTING = ("use_reentrant", "every_n_layers", "preserve_rng_state")


def check_trainer(facts: Facts, inputs: object) -> str:
    """Returns the name of the trainer in the table, if the bundle contains everything that its loss needs."""
    recorded: Facts = take(facts, "trainer", dict) or {}
    name, own_loss = recorded.get("host"), take_names(recorded, "own_loss")
    if not isinstance(name, str) or name not in TRAINERS:
        raise needs_factory(f"The bundle's trainer must be one of {', '.join(TRAINERS)}, got {name!r}")
    if own_loss:
        methods = f"{', '.join(own_loss)} of {recorded.get('class')!r}"
        raise needs_factory(f"The bundle's loss is the user's own code ({methods})")
    has_reference = isinstance(inputs, Mapping) and any(str(key).startswith("ref_") for key in inputs)
    if recorded.get("reference") and not has_reference:
        raise needs_factory(f"The loss of {name} needs its reference model, which is not in the bundle")
    return name


def build_trainer(name: str, model: nn.Module, facts: Facts, device: torch.device) -> HostTrainer:
    """Returns a trainer of the table around the model."""
    package, arguments_name = TRAINERS[name]
    try:
        host = import_module(package)
    except ModuleNotFoundError as error:
        raise ArgumentError(f"The bundle's trainer {name} needs {package}. Run pip install {package}.") from error
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = build_arguments(getattr(host, arguments_name), facts, device, folder)
        kwargs: dict[str, Any] = {}
        if package == "trl":
            from datasets import Dataset

            kwargs = {"train_dataset": Dataset.from_dict({"prompt": [""]}), "processing_class": build_tokenizer(model)}
        if hasattr(args, "num_generations"):
            kwargs["reward_funcs"] = lambda completions, **kwargs: [0.0] * len(completions)
        trainer = without_data(getattr(host, name))(model, args=args, **kwargs)
    trainer.processing_class = None  # a stand-in, which must not decode anything
    attributes: Facts = take(facts, "attributes", dict) or {}
    for key in LOSS_ATTRIBUTES:
        if hasattr(trainer, key) and isinstance(attributes.get(key), (bool, int, float)):
            setattr(trainer, key, attributes[key])
    return cast(HostTrainer, trainer)


def build_arguments(
    arguments_class: type[TrainingArguments], facts: Facts, device: torch.device, folder: str
) -> TrainingArguments:
    """Returns the recorded arguments that a loss depends on, with all others set for a run that never begins."""
    recorded: Facts = take(facts, "arguments", dict) or {}
    model: Facts = take(facts, "model", dict) or {}
    common = {f.name for f in fields(TrainingArguments)}
    known = {f.name for f in fields(arguments_class)}
    allowed = {name for name in known - common if not name.startswith(OFF)} | set(RUN_ARGUMENTS)
    values = {name: NUMBERS.get(value, value) if isinstance(value, str) else value for name, value in recorded.items()}
    kwargs: dict[str, Any] = {name: value for name, value in values.items() if name in allowed and is_simple(value)}
    checkpointing = take(recorded, "gradient_checkpointing_kwargs", dict) or {}
    kwargs |= {
        "output_dir": folder, "report_to": "none", "save_strategy": "no", "eval_strategy": "no", "logging_strategy": "no",
        "disable_tqdm": True, "max_steps": 1, "use_cpu": device.type == "cpu", "dataloader_pin_memory": False,
        "per_device_train_batch_size": 2, "gradient_checkpointing": bool(model.get("gradient_checkpointing")),
        "gradient_checkpointing_kwargs": {
            key: checkpointing[key] for key in CHECKPOINTING if isinstance(checkpointing.get(key), (bool, int))
        } or None,
    }  # fmt: skip
    if "num_generations" in known:
        # The outputs of the reference model are part of the batch. With beta 0 no reference model is loaded.
        kwargs |= {"beta": 0.0, "per_device_train_batch_size": int(kwargs.get("num_generations") or 2)}
    if "precompute_ref_log_probs" in known:  # otherwise the constructor loads a reference model
        kwargs["precompute_ref_log_probs"] = True
    return arguments_class(**kwargs)


def build_tokenizer(model: nn.Module) -> PreTrainedTokenizerFast:
    """Returns a tokenizer without words that has the special tokens of the model's config, which constructors ask for."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    config = find_config(model)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    eos, pad = (getattr(config, name, None) for name in ("eos_token_id", "pad_token_id"))
    eos = eos[0] if isinstance(eos, list) and eos else eos
    eos = eos if isinstance(eos, int) else 1
    pad = "<eos>" if not isinstance(pad, int) or pad == eos else "<pad>"
    words = {"<eos>": eos} | ({"<pad>": config.pad_token_id} if pad == "<pad>" else {})
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), eos_token="<eos>", pad_token=pad)


def set_up_training(trainer: HostTrainer, facts: Facts) -> None:
    """Does what `train()` does with a model before its first step."""
    args, model, accelerator = trainer.args, trainer.model, trainer.accelerator
    host: Any = model
    if args.gradient_checkpointing:
        kwargs: Any = dict(args.gradient_checkpointing_kwargs or {})  # type: ignore[arg-type] # never a string here
        every = kwargs.pop("every_n_layers", 1)
        host.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs or None, every_n_layers=every)
    if args.neftune_noise_alpha is not None:
        activate_neftune(host, args.neftune_noise_alpha, accelerator)
    recorded: Facts = take(facts, "model", dict) or {}
    if recorded.get("mixed_precision") == "fp16" and args.device.type == "cpu" and recorded.get("device") != "cpu":
        host.forward = torch.autocast("cpu", torch.float16)(host.forward)  # accelerate has no such autocast on the CPU
    scale = facts.get("loss_scale")
    if accelerator.scaler is not None and isinstance(scale, (int, float)) and 0 < scale < math.inf:
        accelerator.scaler = torch.amp.GradScaler(args.device.type, init_scale=float(scale))


def build_weight(facts: Facts, inputs: object, device: torch.device) -> LossWeight:
    """Returns how the micro-batch was weighed. Losses multiply by the number of processes, which is one here."""
    recorded: Facts = take(facts, "share", dict) or {}
    size = max(take(facts, "world_size", int) or 1, 1)
    items, steps = recorded.get("num_items"), recorded.get("steps")
    averaged = (take(facts, "arguments", dict) or {}).get("average_tokens_across_devices")
    count = None
    if isinstance(items, (int, float)):
        count = torch.tensor(items / size if size > 1 and averaged else items, device=device)
    if size > 1 and isinstance(inputs, dict) and isinstance(inputs.get(ITEMS), Tensor):
        inputs[ITEMS] = inputs[ITEMS] / size
    return LossWeight(steps if isinstance(steps, (int, float)) and steps > 0 else 1, count)
