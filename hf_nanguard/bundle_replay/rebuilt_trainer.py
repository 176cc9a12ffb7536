"""A trainer of transformers or TRL built again from what a bundle tells, so that its own loss is what runs."""

import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from transformers.integrations.neftune import activate_neftune

from ..errors import ArgumentError
from ..hf.compat.trainer import ITEMS
from ..hf.guarded_trainer import guarded
from ..hf.trainer.arguments import GuardArguments
from ..hf.trainer.held_inputs import LossWeight
from ..hf.trainer.trainer_facts import LOSS_ARGUMENTS, LOSS_ATTRIBUTES
from .rebuilt_model import NUMBERS

# Trainers that can be built again: the package they live in, their arguments, and the rows of a dataset they accept.
TRAINERS: dict[str, tuple[str, str, list[dict[str, Any]] | None]] = {
    "Trainer": ("transformers", "TrainingArguments", None),
    "Seq2SeqTrainer": ("transformers", "Seq2SeqTrainingArguments", None),
    "SFTTrainer": ("trl", "SFTConfig", [{"text": "a b"}] * 2),
    "DPOTrainer": ("trl", "DPOConfig", [{"prompt": "a", "chosen": " b", "rejected": " c"}] * 2),
    "KTOTrainer": ("trl", "KTOConfig", [{"prompt": "a", "completion": " b", "label": i == 0} for i in range(2)]),
    "RewardTrainer": ("trl", "RewardConfig", [{"chosen": "a b", "rejected": "a c"}] * 2),
    "GRPOTrainer": ("trl", "GRPOConfig", [{"prompt": "a"}] * 2),
    "RLOOTrainer": ("trl", "RLOOConfig", [{"prompt": "a"}] * 2),
}
REFERRING = ("DPOTrainer", "KTOTrainer")  # their loss asks a reference model, unless its answers came with the batch
GENERATING = ("GRPOTrainer", "RLOOTrainer")
CHECKPOINTING = ("use_reentrant", "every_n_layers", "preserve_rng_state")
FACTORY = "Give model and loss by --factory module:function"


def check_trainer(facts: dict[str, Any], inputs: Any) -> str:
    """Returns the name of the trainer class to build, if all that its loss needs is there."""
    told = facts.get("trainer") or {}
    name = told.get("host")
    if not isinstance(name, str) or name not in TRAINERS:
        raise ArgumentError(f"The bundle's trainer must be one of {', '.join(TRAINERS)}, got {name!r}. {FACTORY}.")
    if told.get("own_loss"):
        own = ", ".join(map(str, told["own_loss"])) if isinstance(told["own_loss"], list) else "a loss"
        raise ArgumentError(f"The bundle's loss is code of its own run ({own} of {told.get('class')!r}). {FACTORY}.")
    model = facts.get("model")
    adapters = isinstance(model, dict) and model.get("adapters")
    answered = isinstance(inputs, Mapping) and any(str(key).startswith("ref_") for key in inputs)
    if name in REFERRING and not adapters and not answered:
        raise ArgumentError(f"The loss of {name} needs its reference model, which the bundle does not hold. {FACTORY}.")
    return name


def build_trainer(name: str, model: nn.Module, facts: dict[str, Any], device: torch.device) -> Any:
    """Returns a guarded trainer of the recorded class around the model, its guard off."""
    package, arguments_name, rows = TRAINERS[name]
    try:
        host = import_module(package)
    except ModuleNotFoundError as error:
        raise ArgumentError(f"The bundle's trainer {name} needs {package}. Run pip install {package}.") from error
    kwargs: dict[str, Any] = {}
    quiet: AbstractContextManager = nullcontext()
    if rows is not None:
        from datasets import Dataset

        kwargs = {"train_dataset": Dataset.from_list(rows), "processing_class": build_tokenizer(model)}
        quiet = without_bars()
    if name in GENERATING:
        kwargs["reward_funcs"] = _no_reward
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), quiet:
            warnings.simplefilter("ignore")  # what the hosts say about made-up data helps nobody
            args = build_arguments(getattr(host, arguments_name), name, facts, device, folder)
            guard = GuardArguments(nanguard_mode="off")
            trainer = guarded(getattr(host, name))(model, args=args, guard=guard, **kwargs)
    except Exception as error:  # the hosts' constructors may raise anything on values of somebody else's
        first = (str(error).strip().splitlines() or ["no message"])[0][:200]
        raise ArgumentError(
            f"The bundle's {name} could not be built with {package} {host.__version__} ({type(error).__name__}: {first}). "
            f"{FACTORY}."
        ) from error
    trainer.processing_class = None  # made up: nothing may be decoded with it
    attributes = facts.get("attributes") or {}
    for key in LOSS_ATTRIBUTES:
        if key in attributes and key in vars(trainer) and isinstance(attributes[key], (bool, int, float)):
            setattr(trainer, key, attributes[key])
    return trainer


@contextmanager
def without_bars() -> Iterator[None]:
    """Keeps the progress bars of datasets off the screen."""
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def build_arguments(arguments_class: Any, name: str, facts: dict[str, Any], device: torch.device, folder: str) -> Any:
    """Returns the recorded arguments as far as a loss depends on them, all others set for a run that never begins."""
    known = {f.name for f in fields(arguments_class)}
    told = facts.get("arguments") or {}
    kwargs = {
        key: _value(told[key]) for key in LOSS_ARGUMENTS if key in told and key in known and _is_simple(told[key])
    }
    checkpointing = told.get("gradient_checkpointing_kwargs")
    if isinstance(checkpointing, dict):
        allowed = {key: checkpointing[key] for key in CHECKPOINTING if _is_simple(checkpointing.get(key, []))}
        kwargs["gradient_checkpointing_kwargs"] = allowed
    model = facts.get("model")
    if isinstance(model, dict):
        kwargs["gradient_checkpointing"] = bool(model.get("gradient_checkpointing"))
    kwargs |= {
        "output_dir": folder, "report_to": "none", "save_strategy": "no", "eval_strategy": "no", "logging_strategy": "no",
        "disable_tqdm": True, "max_steps": 1, "use_cpu": device.type == "cpu", "dataloader_pin_memory": False,
        "per_device_train_batch_size": 2,
    }  # fmt: skip
    if name in GENERATING:
        # The reference's answers came with the batch: without beta no reference model is looked for.
        kwargs |= {"beta": 0.0, "per_device_train_batch_size": int(kwargs.get("num_generations") or 2)}
    if name in REFERRING and not (isinstance(model, dict) and model.get("adapters")):
        kwargs["precompute_ref_log_probs"] = True  # as in the run; else the constructor loads a reference model
    return arguments_class(**kwargs)


def _is_simple(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, (bool, int, float, str)) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _value(told: Any) -> Any:
    return NUMBERS.get(told, told) if isinstance(told, str) else told


def _no_reward(completions: list, **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def build_tokenizer(model: nn.Module) -> PreTrainedTokenizerFast:
    """Returns a tokenizer that knows no words, with the model's own special tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    eos, pad = (getattr(config, name, None) for name in ("eos_token_id", "pad_token_id"))
    eos = eos[0] if isinstance(eos, list) and eos else eos
    eos = eos if isinstance(eos, int) else 1
    pad = pad if isinstance(pad, int) else eos
    words = {"<eos>": eos} if pad == eos else {"<pad>": pad, "<eos>": eos}
    words["<unk>"] = next(i for i in range(3) if i not in words.values())
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<eos>" if pad == eos else "<pad>",
        unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}",
    )


def set_up_training(trainer: Any, facts: dict[str, Any]) -> None:
    """Does what `train()` does with a model before its first step."""
    args, model = trainer.args, trainer.model
    if args.gradient_checkpointing:
        told = dict(args.gradient_checkpointing_kwargs or {})
        every = told.pop("every_n_layers", 1)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=told or None, every_n_layers=every)
    if args.neftune_noise_alpha is not None:
        activate_neftune(model, args.neftune_noise_alpha, trainer.accelerator)
    recorded: Any = facts.get("model")
    recorded = recorded if isinstance(recorded, dict) else {}
    if recorded.get("mixed_precision") == "fp16" and args.device.type == "cpu" and recorded.get("device") != "cpu":
        # accelerate has no such autocast on the CPU, torch has
        model.forward = torch.autocast("cpu", torch.float16)(model.forward)
    scale = facts.get("loss_scale")
    if (
        trainer.accelerator.scaler is not None
        and isinstance(scale, (int, float))
        and math.isfinite(scale)
        and scale > 0
    ):
        trainer.accelerator.scaler = torch.amp.GradScaler(args.device.type, init_scale=float(scale))


def build_share(facts: dict[str, Any], inputs: Any, device: torch.device) -> LossWeight:
    """Returns how the micro-batch was weighed. Losses multiply by the number of processes, and here there is one."""
    told = facts.get("share")
    told = told if isinstance(told, dict) else {}
    size = facts.get("world_size")
    size = size if isinstance(size, int) and size > 0 else 1
    items, steps = told.get("num_items"), told.get("steps")
    averaged = (facts.get("arguments") or {}).get("average_tokens_across_devices")
    count = None
    if isinstance(items, (int, float)):
        count = torch.tensor(items / size if size > 1 and averaged else items, device=device)
    if size > 1 and isinstance(inputs, dict) and isinstance(inputs.get(ITEMS), Tensor):
        inputs[ITEMS] = inputs[ITEMS] / size
    return LossWeight(steps if isinstance(steps, (int, float)) and steps > 0 else 1, count)
