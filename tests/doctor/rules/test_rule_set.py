"""Every rule on real configurations: one that it must find, alone, and one that it must find sound."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_nanguard.doctor.config_check import ConfigReport, check_config, judge_files
from hf_nanguard.doctor.facts.config_file import read_arguments
from hf_nanguard.doctor.facts.trainer_inspection import find_trainer_facts
from hf_nanguard.doctor.rules.finding import DOCS
from hf_nanguard.doctor.rules.memory_estimate import find_activation_bytes
from hf_nanguard.doctor.rules.rule_set import RULES, TOPICS, judge
from hf_nanguard.doctor.rules.run_facts import Facts

from ...models import CHAT_TEMPLATE, tiny_llama, tiny_t5, tiny_tokenizer, token_dataset
from ...trainers import build

LORA = {"model_name_or_path": "org/model-1B", "use_peft": True, "warmup_steps": 10}
FULL = {"model_name_or_path": "org/model-1B", "warmup_steps": 10}
GROUPS = {"model_name_or_path": "org/model-1B", "num_generations": 8}

# rule -> (arguments in which it finds something, arguments in which it does not)
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "both-precisions": ({**FULL, "bf16": True, "fp16": True}, {**FULL, "bf16": True}),
    "fp16-on-cpu": ({**FULL, "fp16": True, "use_cpu": True}, {**FULL, "bf16": True, "use_cpu": True}),
    "fp16-weights": ({**FULL, "fp16": True, "dtype": "float16", "adam_epsilon": 1e-4}, {**FULL, "fp16": True, "dtype": "float32"}),
    "bf16-rounding": ({**FULL, "dtype": "bfloat16", "learning_rate": 1e-6}, {**FULL, "dtype": "float32", "learning_rate": 1e-6}),
    "adam-eps": ({**FULL, "adam_epsilon": 0.0}, {**FULL, "adam_epsilon": 1e-8}),
    "precision-agreement": ({**LORA, "fp16": True, "dtype": "bfloat16"}, {**LORA, "bf16": True, "dtype": "bfloat16"}),
    "learning-rate": ({**FULL, "learning_rate": "5e-4"}, {**FULL, "learning_rate": "5e-5"}),
    "low-learning-rate": ({**LORA, "learning_rate": 1e-6}, {**LORA, "learning_rate": 2e-4}),
    "clipping": ({**FULL, "max_grad_norm": 0}, {**FULL, "max_grad_norm": 0.5}),
    "warm-up": ({"model_name_or_path": "org/model-100m", "learning_rate": 3e-4}, {**FULL, "learning_rate": 2e-5, "warmup_steps": 0}),
    "long-warm-up": ({**FULL, "warmup_steps": 500, "max_steps": 200}, {**FULL, "warmup_steps": 20, "max_steps": 200}),
    "adam-betas": ({**FULL, "adam_beta1": 0.999, "adam_beta2": 0.9}, {**FULL, "adam_beta1": 0.9, "adam_beta2": 0.95}),
    "weight-decay": ({**FULL, "weight_decay": 10}, {**FULL, "weight_decay": 0.1}),
    "quantized-weights": ({**FULL, "load_in_4bit": True, "dtype": "bfloat16"}, {**LORA, "load_in_4bit": True, "dtype": "bfloat16"}),
    "temperature": ({**GROUPS, "temperature": 0.01}, {**GROUPS, "temperature": 0.9}),
    "group-size": ({**GROUPS, "num_generations": 1}, GROUPS),
    "group-divides": ({**GROUPS, "per_device_train_batch_size": 3}, {**GROUPS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    "beta": ({**GROUPS, "beta": 5.0}, {**GROUPS, "beta": 0.04}),
    "kl-term": ({**GROUPS, "beta": 0.0, "num_iterations": 8}, {**GROUPS, "beta": 0.0, "num_iterations": 1}),
    "adapter-scale": ({**LORA, "lora_alpha": 0}, {**LORA, "lora_r": 1, "lora_alpha": 32}),
    "head-adapter": ({**LORA, "lora_target_modules": ["q_proj", "lm_head"]}, {**LORA, "lora_target_modules": ["q_proj"]}),
}  # fmt: skip


def plain(model=None, **extra: Any) -> Trainer:
    """A plain Trainer of a tiny model, whose arguments `extra` may contain besides parts of the constructor."""
    parts = {name: extra.pop(name) for name in ("processing_class", "data_collator") if name in extra}
    args = TrainingArguments(
        **{"output_dir": "unused", "use_cpu": True, "report_to": [], "save_strategy": "no", **extra}
    )
    return Trainer(model or tiny_llama(), args, train_dataset=token_dataset(4), **parts)


def gpt2(positions: int) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=positions))


def saved(config_dtype: torch.dtype, model: Any, folder, **extra: Any) -> ConfigReport:
    """Checks arguments that name a model on disk."""
    model.to(config_dtype).save_pretrained(folder)
    return check_config({"model_name_or_path": str(folder), "warmup_steps": 5, "learning_rate": 2e-5, **extra})


def checkpoint(folder, rate: float) -> str:
    """Writes what a checkpoint says about the learning rate of its run, and returns its path."""
    history = [{"step": 10, "learning_rate": rate / 2}, {"step": 20, "learning_rate": rate}]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 20, "log_history": history}))
    (folder / "scheduler.pt").write_bytes(b"never read")
    return str(folder)


def frozen() -> Any:
    model = tiny_llama()
    model.requires_grad_(False)
    return model


def lora(model: Any = None, targets: Sequence[str] = ("q_proj",)) -> Any:
    return get_peft_model(model or tiny_llama(), LoraConfig(r=2, target_modules=list(targets), task_type="CAUSAL_LM"))


def masking(pad: str) -> Trainer:
    """A Trainer whose collator masks pads."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = pad
    return plain(processing_class=tokenizer, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False))


def enlarged(num_tokens: int, head: bool = True) -> Trainer:
    """A Trainer whose tokenizer has more tokens, and whose model may have rows for them."""
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    tokenizer.add_tokens([f"new{i}" for i in range(num_tokens)])
    if head:
        model.resize_token_embeddings(len(tokenizer))
    return plain(model, processing_class=tokenizer)


def half_resized() -> Trainer:
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    tokenizer.add_tokens(["new"])
    model.model.embed_tokens = torch.nn.Embedding(65, 16)
    return plain(model, processing_class=tokenizer)


def marked(template: str, tmp_path) -> Trainer:
    """An SFT trainer that learns from what the assistant says."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    trainer = build("sft", tmp_path, guard=False, warmup_steps=1)
    trainer.processing_class, trainer.args.assistant_only_loss = tokenizer, True
    return trainer


MARKED = CHAT_TEMPLATE.replace("{{ m['content'] }}", "{% generation %}{{ m['content'] }}{% endgeneration %}")

# rule -> the same with trainers and models built here, given a folder
BUILT: dict[str, tuple[Any, Any]] = {
    "fp16-family": (
        lambda folder: saved(torch.float32, tiny_t5(), folder, fp16=True),
        lambda folder: saved(torch.float32, tiny_t5(), folder, bf16=True),
    ),
    "fp16-checkpoint": (
        lambda folder: saved(torch.bfloat16, tiny_llama(), folder, fp16=True, max_length=64),
        lambda folder: saved(torch.bfloat16, tiny_llama(), folder, bf16=True, max_length=64),
    ),
    "bf16-support": (
        lambda folder: judge(Facts(mixed_precision="bf16", bf16_support="emulated", device_type="cuda")),
        lambda folder: judge(Facts(mixed_precision="bf16", bf16_support="native", device_type="cuda")),
    ),
    "compute-dtype": (
        lambda folder: judge(Facts(quantization_bits=4, compute_dtype="float16", checkpoint_dtype="bfloat16")),
        lambda folder: judge(Facts(quantization_bits=4, compute_dtype="bfloat16", checkpoint_dtype="bfloat16")),
    ),
    "resumed-rate": (
        lambda folder: check_config({**FULL, "learning_rate": 2e-5, "resume_from_checkpoint": checkpoint(folder, 2e-4)}),
        lambda folder: check_config({**FULL, "learning_rate": 2e-5, "resume_from_checkpoint": checkpoint(folder, 2e-5)}),
    ),
    "completion-length": (
        lambda folder: saved(torch.float32, tiny_llama(), folder, num_generations=8, max_completion_length=64, learning_rate=1e-6),
        lambda folder: saved(torch.float32, tiny_llama(), folder, num_generations=8, max_completion_length=32, learning_rate=1e-6),
    ),
    "positions": (
        lambda folder: saved(torch.float32, gpt2(16), folder, max_length=32),
        lambda folder: saved(torch.float32, gpt2(32), folder, max_length=32),
    ),
    "nothing-trainable": (lambda folder: check_config(plain(frozen())), lambda folder: check_config(plain())),
    "adapter-targets": (
        lambda folder: check_config(plain(lora(targets=["q_proj", "gate_projection"]), label_names=["labels"])),
        lambda folder: check_config(plain(lora(targets=["q_proj", "gate_proj"]), label_names=["labels"])),
    ),
    "label-names": (
        lambda folder: check_config(plain(lora(), label_names=[])),
        lambda folder: check_config(plain(lora(), label_names=["labels"])),
    ),
    "pad-is-eos": (lambda folder: check_config(masking("<eos>")), lambda folder: check_config(masking("<pad>"))),
    "vocabulary": (lambda folder: check_config(enlarged(3, head=False)), lambda folder: check_config(enlarged(3))),
    "head-rows": (lambda folder: check_config(half_resized(), skip=["vocabulary"]), lambda folder: check_config(enlarged(1))),
    "generation-marks": (
        lambda folder: check_config(marked(CHAT_TEMPLATE, folder)),
        lambda folder: check_config(marked(MARKED, folder)),
    ),
    "memory": (
        lambda folder: judge(check_config(plain()).facts.update(Facts(device_memory=50_000))),
        lambda folder: check_config(plain()),
    ),
    "disk": (
        lambda folder: judge(check_config(plain(output_dir=str(folder), save_strategy="steps")).facts.update(Facts(disk_free=10))),
        lambda folder: check_config(plain(output_dir=str(folder), save_strategy="steps")),
    ),
}  # fmt: skip


def examine(rule: str, which: int, folder: Any) -> Any:
    if rule in ARGUMENTS:
        return check_config(ARGUMENTS[rule][which]).examination
    result = BUILT[rule][which](folder)
    return result.examination if isinstance(result, ConfigReport) else result


def test_every_rule_has_both_cases():
    assert sorted([*ARGUMENTS, *BUILT]) == sorted(rule.name for rule in RULES)


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_a_rule_finds_its_own_fault_and_no_other(rule, tmp_path):
    found = examine(rule, 0, tmp_path).findings
    assert [each.rule for each in found] == [rule]
    [finding] = found
    assert all(part.endswith((".", "%.")) for part in (finding.what, finding.why, finding.change))
    assert finding.reference.startswith(("https://", DOCS))


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_a_rule_is_silent_where_all_is_well(rule, tmp_path):
    result = examine(rule, 1, tmp_path)
    assert rule in result.sound
    assert result.problems == []


# A model of 8 billion parameters by its name, on a device of so many GB: whether it can be trained there.
SIZED = {"model_name_or_path": "org/model-8B", "warmup_steps": 10, "learning_rate": 2e-5}


@pytest.mark.parametrize(
    ("arguments", "gigabytes", "fits"),
    [
        ({}, 80, False),  # float32: 32 GB of weights, as much of gradients, twice as much of Adam's moments
        ({}, 140, True),
        ({"dtype": "bfloat16", "optim": "adamw_8bit"}, 80, True),  # 16 + 16 + 8
        ({"use_peft": True, "dtype": "bfloat16"}, 24, True),
        ({"use_peft": True, "dtype": "bfloat16"}, 15, False),
        ({"use_peft": True, "load_in_4bit": True}, 15, True),
    ],
)
def test_memory_of_a_model_that_is_known_by_its_name(arguments, gigabytes, fits):
    file = read_arguments("my.yaml", {**SIZED, **arguments})
    found = judge_files([file], memory=int(gigabytes * 1e9)).examination
    assert ("memory" in found.sound, "memory" in [each.rule for each in found.findings]) == (fits, not fits)


def test_the_estimate_of_activations_is_a_lower_bound_near_what_autograd_keeps():
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    facts = find_trainer_facts(plain(model)).update(Facts(batch_size=4, max_length=32, task="sft"))
    kept: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=torch.randint(7, 64, (4, 32))).logits.sum()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    measured = sum(tensor.untyped_storage().nbytes() for storage, tensor in kept.items() if storage not in weights)
    assert loss.requires_grad
    assert 0.3 * measured < find_activation_bytes(facts) < measured
    checkpointed = facts.update(Facts(gradient_checkpointing=True))
    assert find_activation_bytes(checkpointed) == 4 * (4 * 32) * 64 * 4  # the input of each of four layers, in float32


def test_a_rule_whose_facts_are_not_known_is_not_applied():
    result = judge(Facts())
    assert (result.findings, result.sound) == ([], [])
    assert result.unchecked == [rule.name for rule in RULES]


@pytest.mark.parametrize("name", ["clipping", *TOPICS])
def test_rules_and_topics_can_be_left_out(name):
    skipped = {rule.name for rule in RULES if name in (rule.name, rule.topic)}
    result = check_config({**FULL, "max_grad_norm": 0}, skip=[name]).examination
    assert skipped.isdisjoint([*result.sound, *result.unchecked, *(found.rule for found in result.findings)])
    assert bool(result.findings) == ("clipping" not in skipped)


def test_an_adapter_that_transformers_has_added_is_one():
    model = tiny_llama()
    model.config.quantization_config = {"load_in_4bit": True, "quant_method": "bitsandbytes"}
    without = [each.rule for each in check_config(plain(model)).findings]
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    found = [each.rule for each in check_config(plain(model)).findings]
    assert "quantized-weights" in without
    assert not {"quantized-weights", "adapter-targets"} & set(found)
