"""Facts from a file: arguments of a recipe, TRL or axolotl, or a configuration of accelerate; or from the folder of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...errors import ArgumentError
from ...plain_text import printable
from ...yaml_file import read_yaml
from ..rules.finding import Examination, Finding, Severity
from ..rules.run_facts import Facts
from .argument_facts import (
    find_argument_facts,
    find_deepspeed_precision,
    find_highest_rate,
    read_count,
    read_dtype,
    read_flag,
    read_number,
)
from .host_configs import RECIPE_NAMES, RENAMED, find_task, find_unknown, read_defaults
from .json_files import read_json
from .model_files import find_model_facts, read_model_config

ACCELERATE = ("compute_environment", "distributed_type", "mixed_precision", "num_machines", "main_training_function")
AXOLOTL = ("base_model", "micro_batch_size", "sequence_len")
# What the rules use of an axolotl file; the names on the right are those of the training arguments.
AXOLOTL_NAMES = {
    "micro_batch_size": "per_device_train_batch_size", "gradient_accumulation_steps": "gradient_accumulation_steps",
    "learning_rate": "learning_rate", "optimizer": "optim", "lr_scheduler": "lr_scheduler_type", "warmup_steps": "warmup_steps",
    "warmup_ratio": "warmup_steps", "max_grad_norm": "max_grad_norm", "gradient_clipping": "max_grad_norm", "max_steps": "max_steps",
    "adam_beta1": "adam_beta1", "adam_beta2": "adam_beta2", "adam_epsilon": "adam_epsilon", "weight_decay": "weight_decay",
    "bf16": "bf16", "fp16": "fp16", "sequence_len": "max_length", "deepspeed": "deepspeed", "rl_beta": "beta",
    "resume_from_checkpoint": "resume_from_checkpoint",
}  # fmt: skip
AXOLOTL_OWN = (
    "base_model",
    "adapter",
    "load_in_4bit",
    "load_in_8bit",
    "lora_target_modules",
    "lora_target_linear",
    "rl",
    "trl",
    "torch_dtype",
)
TRL_PART = ("num_generations", "temperature", "beta", "max_completion_length", "num_iterations")


@dataclass
class ConfigFile:
    """What a file or folder says.

    Args:
        path (`str`):
            Its path.
        kind (`str`):
            `arguments`, `axolotl`, `accelerate` or `run`.
        facts (`Facts`):
            What the rules can use of it.
        unjudged (`list[str]`):
            Names in it that no rule knows.
        examination (`Examination`):
            Findings about the file itself.
    """

    path: str
    kind: str
    facts: Facts
    unjudged: list[str] = field(default_factory=list)
    examination: Examination = field(default_factory=Examination)


def read_config(
    path: str | Path, task: str | None = None, flags: Mapping[str, Any] = MappingProxyType({})
) -> ConfigFile:
    """Reads a YAML file or the folder of a run.

    Args:
        path (`str` or `Path`):
            The file or folder. Pickles (`training_args.bin`) are never loaded.
        task (`str`, *optional*):
            The kind of training, where the file does not say it.
        flags (`Mapping[str, Any]`, *optional*):
            Arguments that take precedence over those of the file.
    """
    if Path(path).is_dir():
        return read_run(Path(path))
    values = read_yaml(str(path), "The configuration")
    if "compute_environment" in values or set(ACCELERATE[1:3]) <= set(values):
        return read_accelerate(str(path), values)
    if set(AXOLOTL[:1]) <= set(values):
        return read_axolotl(str(path), values)
    return read_arguments(str(path), {**values, **flags}, task)


def read_arguments(path: str, values: Mapping[str, Any], task: str | None = None) -> ConfigFile:
    """Reads arguments of a recipe, of TRL's scripts or of the Trainer."""
    task = task or find_task(values)
    defaults = read_defaults(task)
    unknown = find_unknown(values, defaults)
    names = {**{name: RENAMED.get(name, "") for name in unknown}, **RECIPE_NAMES}
    given = {**defaults, **{names[name]: value for name, value in values.items() if names.get(name)}, **values}
    facts = find_argument_facts(given, task).update(_read_model_flags(given))
    result = ConfigFile(path, "arguments", facts)
    if unknown:
        result.examination.findings.append(_report_unknown(path, unknown, task))
    else:
        result.examination.sound.append("unknown-arguments")
    return result


def _report_unknown(path: str, unknown: Mapping[str, str], task: str) -> Finding:
    named = ", ".join(f"{name} (did you mean {near}?)" if near else name for name, near in unknown.items())
    host = "The Trainer" if task == "trainer" else f"TRL's {task} script"
    what = f"{Path(path).name} has {'an argument' if len(unknown) == 1 else 'arguments'} that nobody knows: {printable(named)}."
    why = f"{host} refuses to start with it, or the value you meant to set keeps its default."
    change = "Correct the spelling, or remove it."
    return Finding(Severity.ERROR, what, why, change, "unknown-arguments", "docs/doctor.md#files")


def _read_model_flags(values: Mapping[str, Any]) -> Facts:
    """Returns what TRL's arguments about the model say."""
    bits = 4 if read_flag(values, "load_in_4bit") else 8 if read_flag(values, "load_in_8bit") else 0
    dtype = read_dtype(values.get("dtype"))
    uses_peft, targets = bool(read_flag(values, "use_peft")), values.get("lora_target_modules")
    facts = Facts.of(
        adapter="lora" if uses_peft else "none",
        adapter_targets=_read_targets(targets),
        has_output_head_adapter=uses_peft and "lm_head" in (_read_targets(targets) or ()),
        quantization_bits=bits,
        model_dtype=None if bits else dtype,
        compute_dtype=dtype if bits == 4 else None,
    )
    name = values.get("model_name_or_path")
    known = find_model_facts(name) if isinstance(name, str) else Facts.of(is_pretrained=False)
    return facts.update(known)


def _read_targets(value: object) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return (value,)
    return tuple(map(str, value)) if isinstance(value, list) else None


def read_axolotl(path: str, values: Mapping[str, Any]) -> ConfigFile:
    """Reads a file of axolotl."""
    defaults = {name: value for name, value in read_defaults("trainer").items() if name.startswith("adam_")}
    named = {**defaults, **{ours: values[theirs] for theirs, ours in AXOLOTL_NAMES.items() if theirs in values}}
    if named.get("bf16") in ("auto", "full"):
        named["bf16"] = True
    named["optim"] = str(named.get("optim", "adamw_torch_fused"))
    named.setdefault("max_grad_norm", 1.0)
    part = values.get("trl")
    named |= {name: part[name] for name in TRL_PART if isinstance(part, Mapping) and name in part}
    task = str(values.get("rl") or "sft").lower()
    kind = values.get("adapter")
    adapter = {"qlora": "lora"}.get(str(kind), str(kind)) if kind else "none"
    targets = _read_targets(values.get("lora_target_modules"))
    bits = 4 if read_flag(values, "load_in_4bit") else 8 if read_flag(values, "load_in_8bit") else 0
    is_bf16 = bool(read_flag(named, "bf16"))
    facts = find_argument_facts({**named, "bf16": is_bf16}, task).update(
        Facts.of(
            adapter=adapter,
            adapter_targets=targets,
            has_output_head_adapter=None if targets is None else "lm_head" in targets,
            quantization_bits=bits,
            model_dtype=read_dtype(values.get("torch_dtype")),
        )
    )
    facts = facts.update(find_model_facts(str(values["base_model"])))
    return ConfigFile(path, "axolotl", facts, [name for name in values if name not in (*AXOLOTL_NAMES, *AXOLOTL_OWN)])


def read_accelerate(path: str, values: Mapping[str, Any]) -> ConfigFile:
    """Reads a configuration of accelerate."""
    precision = str(values.get("mixed_precision") or "no").lower()
    precision = "no" if precision == "false" else precision  # YAML reads a bare no as false
    deepspeed = values.get("deepspeed_config")
    file = deepspeed.get("deepspeed_config_file") if isinstance(deepspeed, Mapping) else None
    sharding = values.get("fsdp_config")
    policy = sharding.get("fsdp_mixed_precision_policy") if isinstance(sharding, Mapping) else None
    norm = read_number(deepspeed, "gradient_clipping") if isinstance(deepspeed, Mapping) else None
    facts = Facts.of(
        accelerate_precision=precision,
        world_size=read_count(values, "num_processes"),
        deepspeed_precision=find_deepspeed_precision(file),
        fsdp_precision=policy if isinstance(policy, str) else None,
        device_type="cpu" if read_flag(values, "use_cpu") else None,
        max_grad_norm=norm,
    )
    used = (*ACCELERATE, "num_processes", "deepspeed_config", "fsdp_config", "use_cpu", "debug", "downcast_bf16", "machine_rank",
            "rdzv_backend", "same_network", "enable_cpu_affinity", "gpu_ids")  # fmt: skip
    return ConfigFile(path, "accelerate", facts, [name for name in values if name not in used])


def read_run(folder: Path) -> ConfigFile:
    """Reads the folder of a run: the state of its newest checkpoint, its model's config and adapter. Pickles are not loaded."""
    checkpoints = sorted(
        folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:]) if path.name[11:].isdigit() else -1
    )
    newest = checkpoints[-1] if checkpoints else folder
    state, config, adapter = (
        read_json(newest / name) for name in ("trainer_state.json", "config.json", "adapter_config.json")
    )
    if not any(isinstance(each, Mapping) for each in (state, config, adapter)):
        raise ArgumentError(
            f"{folder} must be the folder of a run, but it has neither a checkpoint nor a model. Give its YAML file."
        )
    facts = read_model_config(config, newest) if isinstance(config, Mapping) else Facts()
    if isinstance(state, Mapping):
        steps, rate = state.get("max_steps"), find_highest_rate(state)
        facts = facts.update(Facts.of(learning_rate=rate, max_steps=steps if isinstance(steps, int) else None))
    if isinstance(adapter, Mapping):
        targets = _read_targets(adapter.get("target_modules")) or ()
        kind = str(adapter.get("peft_type", "lora")).lower()
        facts = facts.update(
            Facts.of(adapter=kind, adapter_targets=targets, has_output_head_adapter="lm_head" in targets)
        )
    return ConfigFile(str(folder), "run", facts)
