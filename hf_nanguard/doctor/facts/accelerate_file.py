"""Facts from a configuration of accelerate, as `accelerate config` writes it."""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches

from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
from accelerate.utils import PrecisionType

from ..rules.run_facts import Facts
from .argument_facts import find_deepspeed_precision, read_count, read_flag, read_number
from .argument_values import find_bad_values
from .file_facts import ConfigFile

USED = ("compute_environment", "distributed_type", "mixed_precision", "num_machines", "main_training_function", "num_processes",
        "deepspeed_config", "fsdp_config", "use_cpu", "debug", "downcast_bf16", "machine_rank", "rdzv_backend", "same_network",
        "enable_cpu_affinity", "gpu_ids")  # fmt: skip
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
    result.report_values(bad, values, "accelerate")
    return result
