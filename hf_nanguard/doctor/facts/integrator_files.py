"""Facts from files of axolotl and of LlamaFactory, with their names put into those of the training arguments."""

from collections.abc import Mapping
from difflib import get_close_matches

from transformers import SchedulerType, TrainingArguments
from transformers.training_args import OptimizerNames

from ..rules.finding import Severity
from ..rules.run_facts import Facts
from .argument_facts import find_argument_facts, read_dtype, read_flag, read_number
from .argument_values import find_bad_values, find_contradictions, find_slip
from .file_facts import ConfigFile, find_scale, read_targets
from .host_configs import read_defaults
from .model_files import find_model_facts

# What the rules use of an axolotl file; the names on the right are those of the training arguments.
AXOLOTL_NAMES = {
    "micro_batch_size": "per_device_train_batch_size", "gradient_accumulation_steps": "gradient_accumulation_steps",
    "learning_rate": "learning_rate", "optimizer": "optim", "lr_scheduler": "lr_scheduler_type", "warmup_steps": "warmup_steps",
    "warmup_ratio": "warmup_steps", "max_grad_norm": "max_grad_norm", "gradient_clipping": "max_grad_norm", "max_steps": "max_steps",
    "adam_beta1": "adam_beta1", "adam_beta2": "adam_beta2", "adam_epsilon": "adam_epsilon", "weight_decay": "weight_decay",
    "bf16": "bf16", "fp16": "fp16", "sequence_len": "max_length", "deepspeed": "deepspeed", "rl_beta": "beta", "dpo_beta": "beta",
    "resume_from_checkpoint": "resume_from_checkpoint", "num_epochs": "num_train_epochs", "gradient_checkpointing": "gradient_checkpointing",
}  # fmt: skip
AXOLOTL_OWN = ("base_model", "adapter", "load_in_4bit", "load_in_8bit", "lora_target_modules", "lora_target_linear", "lora_r", "lora_alpha",
               "peft_use_rslora", "rl", "trl", "torch_dtype", "reward_model", "fsdp", "fsdp_config")  # fmt: skip
ADAPTERS = ("lora", "qlora", "llama-adapter", "loha", "lokr", "oft", "boft", "vera", "ia3")
OPTIMIZERS = (*(each.value for each in OptimizerNames), "muon", "dion", "optimi_adamw", "ao_adamw_4bit", "ao_adamw_8bit", "ao_adamw_fp8",
              "adopt_adamw", "came_pytorch", "adamw", "sgd", "galore_adamw")  # fmt: skip
SCHEDULES = (*(each.value for each in SchedulerType), "one_cycle", "rex", "log_sweep")
OTHER_ADAM = ("adam_beta3", "adam_epsilon2")  # arguments of axolotl that look like ours
TRL_PART = ("num_generations", "temperature", "beta", "max_completion_length", "num_iterations")
KINDS = {"ipo": "dpo", "gdpo": "grpo", "pt": "sft", "rm": "reward"}  # names that a kind of training has elsewhere
LLAMAFACTORY_MARKS = ("stage", "finetuning_type", "cutoff_len", "lora_target", "lora_rank", "template")
STAGES, METHODS = ("pt", "sft", "rm", "ppo", "dpo", "kto"), ("lora", "oft", "freeze", "full")
LOSSES = ("sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo")
LLAMAFACTORY_NAMES = {"cutoff_len": "max_length", "pref_beta": "beta"}
LLAMAFACTORY_OWN = ("stage", "finetuning_type", "lora_rank", "lora_alpha", "lora_target", "use_rslora", "quantization_bit", "model_name_or_path",
                    "pure_bf16", "adapter_name_or_path")  # fmt: skip


def is_axolotl(values: Mapping[str, object]) -> bool:
    return "base_model" in values


def is_llamafactory(values: Mapping[str, object]) -> bool:
    return len(set(LLAMAFACTORY_MARKS).intersection(values)) >= 2


def read_axolotl(path: str, values: Mapping[str, object], task: str | None = None) -> ConfigFile:
    given = {name: value for name, value in values.items() if value is not None}
    defaults = {name: value for name, value in read_defaults("trainer").items() if name.startswith("adam_")}
    named = {**defaults, **{ours: given[theirs] for theirs, ours in AXOLOTL_NAMES.items() if theirs in given}}
    if named.get("bf16") in ("auto", "full"):
        named["bf16"] = True
    if isinstance(named.get("gradient_checkpointing"), str):  # a kind of it, such as offload
        named["gradient_checkpointing"] = read_flag(named, "gradient_checkpointing") is not False
    named["optim"] = str(named.get("optim", "adamw_torch_fused"))
    named.setdefault("max_grad_norm", 1.0)
    part = values.get("trl")
    named |= {name: part[name] for name in TRL_PART if isinstance(part, Mapping) and name in part}
    bad = _drop_bad_values(named)
    rl = str(values.get("rl") or ("reward" if read_flag(values, "reward_model") else "sft")).lower()
    task = task or KINDS.get(rl, rl)
    kind = values.get("adapter")
    bits = 4 if read_flag(values, "load_in_4bit") else 8 if read_flag(values, "load_in_8bit") else 0
    targets = read_targets(values.get("lora_target_modules"))
    facts = find_argument_facts({**named, "bf16": bool(read_flag(named, "bf16"))}, task).update(
        Facts.of(
            adapter={"qlora": "lora"}.get(str(kind), str(kind)) if kind else "none",
            adapter_targets=targets,
            adapter_scale=_read_scale(values, "lora_r", "peft_use_rslora") if kind else None,
            # its own trainer, which learns answers, calls the head; TRL's, for everything else, do not
            has_output_head_adapter=None if targets is None or task == "sft" else "lm_head" in targets,
            quantization_bits=bits,
            model_dtype=read_dtype(values.get("torch_dtype")),
            is_sharded=True if given.get("deepspeed") or given.get("fsdp") or given.get("fsdp_config") else None,
        )
    )
    facts = facts.update(find_model_facts(str(values["base_model"])))
    known = (*AXOLOTL_NAMES, *AXOLOTL_OWN)
    result = ConfigFile(path, "axolotl", facts, [name for name in values if name not in known])
    unknown = {
        name: near[0]
        for name in result.unjudged
        if name not in OTHER_ADAM and (near := get_close_matches(name, known, 1, 0.88))
    }
    result.report_unknown(unknown, "axolotl", Severity.WARNING)
    theirs = {ours: name for name, ours in AXOLOTL_NAMES.items() if name in given}
    bad = {theirs.get(name, name): must for name, must in bad.items()} | find_contradictions(given)
    if kind == "qlora" and bits == 8:
        bad["load_in_8bit"] = "must be false for adapter: qlora, which needs load_in_4bit: true"
    bad |= _find_slips(given, {"adapter": ADAPTERS, "optimizer": OPTIMIZERS, "lr_scheduler": SCHEDULES})
    result.report_values(bad, {**bad, **named, **values}, "axolotl")
    return result


def read_llamafactory(path: str, values: Mapping[str, object], task: str | None = None) -> ConfigFile:
    """Reads a file of LlamaFactory, whose names are those of the training arguments and its own."""
    given = {name: value for name, value in values.items() if value is not None}
    defaults = read_defaults("trainer")
    renamed = {
        ours: given[theirs]
        for theirs, ours in {**LLAMAFACTORY_NAMES, "warmup_ratio": "warmup_steps"}.items()
        if theirs in given
    }
    named = {**defaults, **given, **renamed}
    bad = _drop_bad_values(named)
    stage = str(values.get("stage") or "sft").lower()
    stage = stage if stage in STAGES else "sft"
    kind = str(values.get("finetuning_type") or "lora").lower()
    kind = kind if kind in METHODS else "lora"
    is_bf16 = bool(read_flag(named, "bf16") or read_flag(named, "pure_bf16"))
    bits = read_number(given, "quantization_bit") if "quantization_bit" not in bad else None
    facts = find_argument_facts({**named, "bf16": is_bf16}, task or KINDS.get(stage, stage)).update(
        Facts.of(
            adapter="none" if kind in ("full", "freeze") else kind,
            adapter_targets=read_targets(values.get("lora_target")),
            adapter_scale=_read_scale({"lora_rank": 8, **given}, "lora_rank", "use_rslora") if kind == "lora" else None,
            quantization_bits=int(bits or 0),
            is_sharded=True if given.get("deepspeed") or given.get("fsdp") else None,
        )
    )
    facts = facts.update(find_model_facts(str(values.get("model_name_or_path") or "")))
    known = {*defaults, *LLAMAFACTORY_NAMES, *LLAMAFACTORY_OWN, "warmup_ratio"}
    result = ConfigFile(path, "llamafactory", facts, [name for name in values if name not in known])
    if "warmup_steps" in bad and "warmup_ratio" in given:
        bad["warmup_ratio"] = bad.pop("warmup_steps")
    bad |= find_contradictions(given) | _find_slips(
        given, {"pref_loss": LOSSES, "optim": OPTIMIZERS, "lr_scheduler_type": SCHEDULES}
    )
    if (read_number(given, "warmup_ratio") or 0) > 1 and "warmup_ratio" not in bad:
        bad["warmup_ratio"] = "must be at most 1: a share of all steps"
    closed = {"stage": STAGES, "finetuning_type": METHODS}
    bad |= {
        n: f"must be one of {', '.join(known)}"
        for n, known in closed.items()
        if n in given and str(given[n]).lower() not in known
    }
    slips = {n: near[0] for n in result.unjudged if (near := get_close_matches(n, known, 1, 0.88))}
    result.report_unknown(slips, "LlamaFactory", Severity.WARNING)
    result.report_values(bad, values, "LlamaFactory")
    return result


def _find_slips(values: Mapping[str, object], known: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Returns the names whose value is nearly a known one; integrators take others as well."""
    return {name: slip for name, names in known.items() if (slip := find_slip(values.get(name), names, 0.75))}


def _read_scale(values: Mapping[str, object], rank: str, stabilised: str) -> float | None:
    return find_scale(read_number(values, rank), read_number(values, "lora_alpha"), read_flag(values, stabilised))


def _drop_bad_values(named: dict[str, object]) -> dict[str, str]:
    """Takes out the values that no training argument takes, and returns what each must be. Integrators know more optimizers and
    schedules than the Trainer."""
    free = ("optim", "lr_scheduler_type", "report_to", "save_strategy", "eval_strategy")
    bad = {name: must for name, must in find_bad_values(named, [TrainingArguments]).items() if name not in free}
    for name in bad:
        del named[name]
    return bad
