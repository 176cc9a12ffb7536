"""Facts from training arguments: an object of the hosts, or names and values of a file."""

import math
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from ..rules.run_facts import Facts
from .json_files import read_json

TRUTHS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


def read_number(values: Mapping[str, Any], name: str) -> float | None:
    """Returns a number; YAML reads 1e-5 as text."""
    value = values.get(name)
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{name} must be a number, got {value!r}.") from None


def read_count(values: Mapping[str, object], name: str) -> int | None:
    number = read_number(values, name)
    if number is not None and (not math.isfinite(number) or number != int(number)):
        raise ArgumentError(f"{name} must be an integer, got {values[name]!r}.")
    return None if number is None else int(number)


def read_flag(values: Mapping[str, object], name: str) -> bool | None:
    """Returns a truth value, `None` if it is neither true nor false."""
    value = values.get(name)
    return value if isinstance(value, bool) else TRUTHS.get(str(value).strip().lower())


def read_dtype(value: object) -> str | None:
    """Returns the name of a dtype; `None` for `auto`."""
    name = str(value).removeprefix("torch.").lower()
    name = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}.get(
        name, name
    )
    return name if name in ("bfloat16", "float16", "float32", "float64") else None


def find_argument_facts(values: Mapping[str, object], task: str) -> Facts:
    """Returns what training arguments say, given all of them by name, as in [`~transformers.TrainingArguments`], its subclasses
    and TRL's `ModelConfig`."""
    bf16, fp16 = read_flag(values, "bf16"), read_flag(values, "fp16")
    if bf16 is None and task != "trainer":  # TRL's default
        bf16 = not fp16
    accumulation, batch = (
        read_count(values, "gradient_accumulation_steps"),
        read_count(values, "per_device_train_batch_size"),
    )
    facts = Facts.of(
        task=task,
        bf16=bool(bf16),
        fp16=bool(fp16),
        mixed_precision="fp16" if fp16 else "bf16" if bf16 else os.environ.get("ACCELERATE_MIXED_PRECISION", "no"),
        accelerate_precision=os.environ.get("ACCELERATE_MIXED_PRECISION"),
        deepspeed_precision=find_deepspeed_precision(values.get("deepspeed")),
        device_type="cpu" if read_flag(values, "use_cpu") else None,
        optimizer=_plain(values.get("optim")),
        scheduler=_plain(values.get("lr_scheduler_type")),
        batch_size=batch,
        accumulation_steps=accumulation,
        world_size=int(os.environ["WORLD_SIZE"]) if os.environ.get("WORLD_SIZE", "").isdigit() else None,
        max_grad_norm=(read_number(values, "max_grad_norm") or 0.0) if "max_grad_norm" in values else None,
        gradient_checkpointing=read_flag(values, "gradient_checkpointing"),
        assistant_only_loss=read_flag(values, "assistant_only_loss"),
        **{name: read_number(values, name) for name in (
            "learning_rate", "warmup_steps", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "temperature",
            "beta",
        )},
        **{name: read_count(values, name) for name in (
            "max_steps", "num_generations", "generation_batch_size", "num_iterations", "max_completion_length", "max_length",
        )},
    )  # fmt: skip
    resumed = values.get("resume_from_checkpoint")
    return facts.update(find_resumed_facts(Path(resumed))) if isinstance(resumed, str) else facts


def _plain(value: object) -> str | None:
    """Returns the value of an enum member, or a text as it is."""
    return None if value is None else str(value.value if isinstance(value, Enum) else value)


def find_deepspeed_precision(config: object) -> str | None:
    """Returns the precision of a DeepSpeed configuration: `auto`, `bf16`, `fp16` or `no`; `None` without one."""
    if isinstance(config, str):
        config = read_json(Path(config)) if config.endswith(".json") else None
    if not isinstance(config, Mapping):
        return None
    flags = {name: part.get("enabled") for name in ("bf16", "fp16") if isinstance(part := config.get(name), Mapping)}
    is_off = len(flags) == 2 and "auto" not in flags.values()  # a section that is missing is filled in by accelerate
    return next((name for name, on in flags.items() if on is True), "no" if is_off else "auto")


def find_resumed_facts(checkpoint: Path) -> Facts:
    """Returns what a checkpoint says about the learning rate a resumed run will have."""
    state = read_json(checkpoint / "trainer_state.json")
    if not isinstance(state, Mapping) or not (checkpoint / "scheduler.pt").is_file():
        return Facts()
    step = state.get("global_step")
    return Facts.of(resumed_rate=find_highest_rate(state), resumed_step=step if isinstance(step, int) else None)


def find_highest_rate(state: Mapping[str, object]) -> float | None:
    """Returns the highest learning rate in the log of a trainer's state."""
    history = state.get("log_history")
    rows = [row for row in history if isinstance(row, Mapping)] if isinstance(history, list) else []
    return max((rate for row in rows if isinstance(rate := row.get("learning_rate"), float)), default=None)
