"""Facts from a configuration of accelerate, as `accelerate config` writes it, and from one of DeepSpeed."""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches

from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType, PrecisionType
from accelerate.utils.constants import FSDP_AUTO_WRAP_POLICY, FSDP_SHARDING_STRATEGY, FSDP_STATE_DICT_TYPE

from ..rules.finding import Severity
from ..rules.run_facts import Facts
from .argument_facts import find_deepspeed_precision, read_count, read_flag, read_number
from .argument_values import SLIP, find_bad_values
from .file_facts import ConfigFile

OFFLOADS = ["NONE", "CPU", "NVME"]
USED = ("compute_environment", "distributed_type", "mixed_precision", "num_machines", "main_training_function", "num_processes",
        "deepspeed_config", "fsdp_config", "use_cpu", "debug", "downcast_bf16", "machine_rank", "rdzv_backend", "same_network",
        "enable_cpu_affinity", "gpu_ids")  # fmt: skip
STAGES = ("0", "1", "2", "3")  # of ZeRO
CHOICES = {
    "fsdp_state_dict_type": FSDP_STATE_DICT_TYPE, "fsdp_auto_wrap_policy": FSDP_AUTO_WRAP_POLICY,
    "fsdp_sharding_strategy": FSDP_SHARDING_STRATEGY, "offload_optimizer_device": OFFLOADS, "offload_param_device": OFFLOADS,
}  # fmt: skip
DEEPSPEED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "zero_optimization", "bf16",
             "fp16", "optimizer", "scheduler", "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
             "activation_checkpointing", "communication_data_type", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "amp",
             "flops_profiler", "aio", "comms_logger", "tensorboard", "wandb", "csv_monitor", "torch_autocast", "checkpoint", "data_types",
             "dump_state", "compile", "seq_parallel_communication_data_type", "sequence_parallel_size", "tensor_parallel")  # fmt: skip
OLD = ("dynamo_backend",)  # which accelerate converts


def is_accelerate(values: Mapping[str, object]) -> bool:
    return "compute_environment" in values or {"distributed_type", "mixed_precision"} <= set(values)


def read_accelerate(path: str, values: Mapping[str, object]) -> ConfigFile:
    """Reads a configuration of accelerate, which refuses to start with a name that it does not know."""
    known = [*(each.name for cls in (ClusterConfig, SageMakerConfig) for each in fields(cls)), *OLD]
    unknown = {name: "".join(get_close_matches(name, known, 1)) for name in values if name not in known}
    precision = str(values.get("mixed_precision") or "no").lower()
    precision = "no" if precision == "false" else precision  # YAML reads a bare no as false
    bad = {
        name: must
        for name, must in find_bad_values(values, [ClusterConfig]).items()
        if name in ("num_processes", "num_machines")
    }
    for section in ("deepspeed_config", "fsdp_config"):
        part = values.get(section)
        if isinstance(part, Mapping):
            found, slips = _judge_section(part)
            bad |= found
            unknown |= slips
    kinds = [each.value for each in DistributedType]
    if str(values.get("distributed_type", "NO")).upper() not in (*kinds, "FALSE"):  # YAML reads a bare no as false
        near = get_close_matches(str(values["distributed_type"]).upper(), kinds, 1)
        bad["distributed_type"] = f"did you mean {near[0]}?" if near else f"must be one of {', '.join(kinds)}"
    if precision not in PrecisionType.list():
        bad["mixed_precision"] = f"must be one of {', '.join(PrecisionType.list())}"
    deepspeed, sharding = values.get("deepspeed_config"), values.get("fsdp_config")
    file = deepspeed.get("deepspeed_config_file") if isinstance(deepspeed, Mapping) else None
    policy = sharding.get("fsdp_mixed_precision_policy") if isinstance(sharding, Mapping) else None
    norm = deepspeed.get("gradient_clipping") if isinstance(deepspeed, Mapping) else None
    facts = Facts.of(
        accelerate_precision=None if "mixed_precision" in bad else precision,
        world_size=None if "num_processes" in bad else read_count(values, "num_processes"),
        deepspeed_precision=find_deepspeed_precision(file),
        fsdp_precision=policy if isinstance(policy, str) else None,
        device_type="cpu" if read_flag(values, "use_cpu") else None,
        max_grad_norm=None if norm == "auto" else read_number({"gradient_clipping": norm}, "gradient_clipping"),
        is_sharded=True
        if str(values.get("distributed_type")).upper() in ("DEEPSPEED", "FSDP", "MEGATRON_LM")
        else None,
    )
    result = ConfigFile(path, "accelerate", facts, [name for name in values if name in known and name not in USED])
    result.report_unknown(unknown, "accelerate")
    nested = {
        name: value for part in (deepspeed, sharding) if isinstance(part, Mapping) for name, value in part.items()
    }
    result.report_values(bad, {**nested, **values}, "accelerate")
    return result


def _judge_section(part: Mapping[str, object]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns values that cannot be, and names that are nearly those of `accelerate launch`, which passes over a name that it does not know."""
    known = [action.dest for action in launch_command_parser()._actions]
    slips = {n: near[0] for n in part if n not in known and (near := get_close_matches(n, known, 1, SLIP))}
    bad = {name: f"must be one of {', '.join(choices)}" for name, choices in CHOICES.items()
           if part.get(name) is not None and str(part[name]).upper() not in choices and not str(part[name]).isdigit()}  # fmt: skip
    if part.get("zero_stage") is not None and str(part["zero_stage"]) not in STAGES:
        bad["zero_stage"] = "must be 0, 1, 2 or 3"
    for name in ("gradient_accumulation_steps", "gradient_clipping"):
        value, may_be_zero = part.get(name), name == "gradient_clipping"  # 0 turns clipping off
        if value not in (None, "auto", "none") and not _is_positive(value, may_be_zero):
            bad[name] = f"must be a number {'of at least' if may_be_zero else 'above'} 0, or auto"
    return bad, slips


def _is_positive(value: object, may_be_zero: bool = False) -> bool:
    try:
        number = float(str(value))
    except ValueError:
        return False
    return number > 0 or (may_be_zero and number == 0)


# ---- DeepSpeed ----


def is_deepspeed(values: Mapping[str, object]) -> bool:
    """Returns whether a mapping is a configuration of DeepSpeed: sections where the Trainer has a truth value, or its own names."""
    sections = [isinstance(values.get(name), Mapping) for name in ("zero_optimization", "fp16", "bf16", "optimizer")]
    return any(sections) or "train_micro_batch_size_per_gpu" in values


def read_deepspeed(path: str, values: Mapping[str, object]) -> ConfigFile:
    """Reads a configuration of DeepSpeed, which passes over a name that it does not know."""
    unknown = {n: near[0] for n in values if n not in DEEPSPEED and (near := get_close_matches(n, DEEPSPEED, 1, SLIP))}
    zero, bad = values.get("zero_optimization"), {}
    if isinstance(zero, Mapping) and str(zero.get("stage", 0)) not in STAGES:
        bad["zero_optimization"] = "must have stage 0, 1, 2 or 3"
    flags = {
        name: part.get("enabled", False) for name in ("bf16", "fp16") if isinstance(part := values.get(name), Mapping)
    }
    bad |= {
        name: "must have enabled true, false or auto" for name, on in flags.items() if on not in (True, False, "auto")
    }
    if flags.get("bf16") is True and flags.get("fp16") is True:
        bad["fp16"] = "must not be enabled together with bf16"
    for name in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size"):
        if values.get(name) not in (None, "auto") and not _is_positive(values[name]):
            bad[name] = "must be a number above 0, or auto"
    norm = values.get("gradient_clipping")
    facts = Facts.of(
        deepspeed_precision=find_deepspeed_precision(values) if not {"bf16", "fp16"}.intersection(bad) else None,
        max_grad_norm=None if norm == "auto" else read_number(values, "gradient_clipping"),
        is_sharded=True if isinstance(zero, Mapping) and zero.get("stage") not in (None, 0) else None,
    )
    result = ConfigFile(
        path, "deepspeed", facts, [name for name in values if name not in DEEPSPEED and name not in unknown]
    )
    result.report_unknown(unknown, "DeepSpeed", Severity.WARNING)
    result.report_values(bad, values, "DeepSpeed")
    return result
