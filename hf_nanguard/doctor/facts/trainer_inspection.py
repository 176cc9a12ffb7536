"""Facts from a trainer that is built: its arguments, model, tokenizer, collator, device and disk. Nothing is run or changed."""

import shutil
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType
from torch import nn
from transformers import DataCollatorForLanguageModeling, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...hf.compat.model_config import find_adapters, find_config, find_tokenizer, plain_adapter_name, without_adapter
from ...hf.compat.trainer_protocol import HostTrainer
from ...own_fields import own_fields
from ..rules.memory_estimate import find_activation_bytes, find_optimizer_bytes
from ..rules.run_facts import Facts
from .argument_facts import find_argument_facts, find_deepspeed_precision
from .device_facts import find_device_facts
from .file_facts import find_scale

# By the name of the class or of one of its bases, which may be guarded or the user's own.
LORA_SCALE = ("r", "rank_pattern", "alpha_pattern", "lora_alpha", "use_rslora")
TASK_NAMES = {
    "SFTTrainer": "sft", "DPOTrainer": "dpo", "KTOTrainer": "kto", "RewardTrainer": "reward", "GRPOTrainer": "grpo",
    "RLOOTrainer": "rloo", "OnlineDPOTrainer": "online_dpo", "ORPOTrainer": "orpo", "CPOTrainer": "cpo",
    "DistillationTrainer": "distill", "GKDTrainer": "distill",
}  # fmt: skip

TARGETS = ("target_modules", "target_parameters", "modules_to_save")
HEADS = ("classifier", "score")  # which PEFT adds by itself, whichever of them a classifier has


def find_trainer_facts(trainer: HostTrainer) -> Facts:
    """Returns everything the rules can know about a trainer."""
    args = trainer.args
    task = next((TASK_NAMES[c.__name__] for c in type(trainer).__mro__ if c.__name__ in TASK_NAMES), "trainer")
    facts = find_argument_facts({each.name: getattr(args, each.name, None) for each in fields(args)}, task)
    model = trainer.accelerator.unwrap_model(trainer.model)
    facts = facts.update(find_model_facts(model)).update(find_device_facts(args.device.type))
    facts = facts.update(
        Facts.of(
            mixed_precision=trainer.accelerator.mixed_precision,
            accelerate_precision=facts.accelerate_precision,
            deepspeed_precision=_find_engine_precision(trainer),
            world_size=args.world_size,
            label_names=tuple(getattr(trainer, "label_names", None) or ()),
        )
    )
    facts = facts.update(find_tokenizer_facts(trainer.processing_class, trainer.data_collator))
    is_sharded = trainer.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    return facts.update(find_resource_facts(facts, args, is_sharded))


def _find_engine_precision(trainer: HostTrainer) -> str | None:
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else find_deepspeed_precision(plugin.deepspeed_config)


def find_model_facts(model: nn.Module) -> Facts:
    """Returns what a model, with or without a PEFT adapter, says about itself."""
    adapters = find_adapters(model)
    base = without_adapter(model) if adapters else model
    config = find_config(base)
    text = config.get_text_config() if isinstance(config, PreTrainedConfig) else config
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    modules = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    first = next(iter(adapters.values()), None)
    quantization = _find_quantization(config)
    name = getattr(config, "name_or_path", None)
    return Facts.of(
        model_name=name or type(base).__name__,
        model_type=getattr(config, "model_type", None),
        is_pretrained=bool(name) and isinstance(base, PreTrainedModel),
        adapter="none" if first is None else _plain(first.peft_type).lower(),
        adapter_targets=tuple(sorted(modules)) if adapters else None,
        missing_targets=_find_missing_targets(base, adapters) if adapters else None,
        adapter_scale=_find_scale(first),
        has_output_head_adapter="lm_head" in modules if adapters else False,
        parameters=sum(map(_count, parameters)),
        trainable=sum(map(_count, trained)),
        model_dtype=_largest_dtype(trained),
        checkpoint_dtype=None,
        max_positions=_positive(text, "max_position_embeddings"),
        hidden_size=_positive(text, "hidden_size"),
        intermediate_size=_positive(text, "intermediate_size"),
        num_layers=_positive(text, "num_hidden_layers"),
        is_causal="CausalLM" in type(base).__name__,
        embedding_rows=_rows(base, "get_input_embeddings"),
        head_rows=_rows(base, "get_output_embeddings"),
        weight_bytes=sum(parameter.nbytes for parameter in parameters),
        trainable_bytes=sum(parameter.nbytes for parameter in trained),
        **quantization,
    )


def _find_missing_targets(base: nn.Module, adapters: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of modules and parameters in the configs of adapters that none of the model has. PEFT needs one of a list only."""
    known = [
        f".{plain_adapter_name(name)}" for part in (base.named_modules(), base.named_parameters()) for name, _ in part
    ]
    asked = [
        name
        for config in adapters.values()
        for field in TARGETS
        if isinstance(names := getattr(config, field, None), list | set | tuple)
        for name in names
        if name not in HEADS
    ]
    return tuple(sorted(name for name in set(asked) if not any(each.endswith(f".{name}") for each in known)))


def _find_scale(config: Any) -> float | None:
    """Returns the scale of a LoRA; ranks and alphas that differ by module are left alone."""
    rank, ranks, alphas, alpha, is_scaled = (getattr(config, name, None) for name in LORA_SCALE)
    if rank is None or ranks or alphas:
        return None
    return find_scale(rank, alpha, bool(is_scaled))


def _count(parameter: nn.Parameter) -> int:
    """Returns the number of entries, of which DeepSpeed's ZeRO-3 leaves none in the parameter itself."""
    return getattr(parameter, "ds_numel", parameter.numel())


def _largest_dtype(parameters: list[nn.Parameter]) -> str | None:
    """Returns the dtype of most of the weights."""
    sizes: dict[str, int] = {}
    for parameter in parameters:
        name = str(parameter.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + _count(parameter)
    return max(sizes, key=sizes.__getitem__) if sizes else None


def _positive(config: object, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _rows(base: nn.Module, getter: str) -> int | None:
    if not isinstance(base, PreTrainedModel):
        return None
    try:
        module = getattr(base, getter)()
    except (NotImplementedError, AttributeError):  # what transformers raises for a model without token embeddings
        return None
    # The logical size: sharded and quantized weights have another shape, and to read a parametrized weight computes it.
    if isinstance(module, nn.Embedding):
        return module.num_embeddings
    return module.out_features if isinstance(module, nn.Linear) else None


def _find_quantization(config: object) -> dict[str, object]:
    given = getattr(config, "quantization_config", None)
    values = given if isinstance(given, Mapping) else own_fields(given) if given is not None else {}
    bits = (
        4
        if values.get("load_in_4bit", values.get("_load_in_4bit"))
        else 8
        if values.get("load_in_8bit", values.get("_load_in_8bit"))
        else 0
    )
    compute = values.get("bnb_4bit_compute_dtype") if bits == 4 else None
    return {
        "quantization_bits": bits,
        "compute_dtype": None if compute is None else str(compute).removeprefix("torch."),
    }


def find_tokenizer_facts(processor: object, collator: object) -> Facts:
    """Returns what the tokenizer says, and whether the collator masks its pad token."""
    tokenizer = find_tokenizer(processor)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return Facts()
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    return Facts.of(
        vocabulary=max(len(tokenizer), 1 + max(tokenizer.get_added_vocab().values(), default=0)),
        pad_id=tokenizer.pad_token_id,
        eos_id=tokenizer.eos_token_id,
        masks_pads=isinstance(collator, DataCollatorForLanguageModeling) and not collator.mlm,
        has_chat_template=template is not None,
        has_generation_marks=None if template is None else "{% generation" in template or "{%- generation" in template,
    )


def find_resource_facts(facts: Facts, args: Any, is_sharded: bool) -> Facts:
    """Returns the memory and disk that a run needs, and what is there. The weights of a sharded model are not all here."""
    state = find_optimizer_bytes(facts.optimizer, facts.trainable_bytes)
    saves = _plain(args.save_strategy) != "no"
    checkpoint = None
    if saves and state is not None:
        kept = facts.trainable_bytes if facts.is_adapter else facts.weight_bytes
        checkpoint = kept + (0 if args.save_only_model else state)
    free = _free_disk(args.output_dir) if saves else None
    limit = args.save_total_limit
    return Facts.of(
        is_sharded=is_sharded,
        optimizer_bytes=None if is_sharded else state,
        activation_bytes=find_activation_bytes(facts),
        snapshot_bytes=facts.trainable_bytes + (state or 0) if getattr(args, "nanguard_snapshot_steps", None) else None,
        checkpoint_bytes=checkpoint,
        num_checkpoints=_count_checkpoints(args, limit) if saves else None,
        disk_free=free,
    )


def _plain(value: object) -> str:
    return str(value.value if isinstance(value, Enum) else value)


def _count_checkpoints(args: Any, limit: int | None) -> int:
    """Returns how many checkpoints exist at once; one more than the limit while the newest is written."""
    if limit:
        return int(limit) + 1
    if _plain(args.save_strategy) == "steps" and args.max_steps > 0 and args.save_steps >= 1:
        return max(int(args.max_steps // args.save_steps), 1)
    return 1


def _free_disk(folder: str | None) -> int | None:
    path = Path(folder or ".").absolute()
    existing = next((parent for parent in (path, *path.parents) if parent.exists()), None)
    return None if existing is None else shutil.disk_usage(existing).free
