"""Sound configurations give nothing above a note, and a broken variant of each is caught: presets, examples of TRL's documentation
recreated, axolotl, LlamaFactory, accelerate, and the Trainer's own tasks."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_nanguard.doctor.config_check import check_config
from hf_nanguard.examples.recipe.presets import find_configs, read_preset

from ..trainers import build

LORA = {"use_peft": True, "lora_r": 32, "lora_alpha": 16}
SFT = {"model_name_or_path": "Qwen/Qwen2-0.5B", "dataset_name": "trl-lib/Capybara", "learning_rate": "2.0e-5", "num_train_epochs": 1,
       "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "packing": True, "eval_strategy": "steps", "eval_steps": 100}  # fmt: skip
PREFERENCE = {"model_name_or_path": "Qwen/Qwen2-0.5B-Instruct", "dataset_name": "trl-lib/ultrafeedback_binarized", "max_steps": 1000,
              "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "logging_steps": 25}  # fmt: skip
GRPO = {"model_name_or_path": "Qwen/Qwen2-0.5B-Instruct", "dataset_name": "trl-lib/DeepMath-103K", "reward_funcs": ["accuracy_reward"],
        "num_generations": 8}  # fmt: skip
AXOLOTL = {"base_model": "NousResearch/Meta-Llama-3-8B", "sequence_len": 4096, "micro_batch_size": 2, "gradient_accumulation_steps": 4,
           "num_epochs": 1, "optimizer": "adamw_bnb_8bit", "lr_scheduler": "cosine", "learning_rate": 0.0002, "bf16": "auto",
           "warmup_ratio": 0.1, "flash_attention": True, "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}]}  # fmt: skip
LLAMAFACTORY = {"model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "trust_remote_code": True, "do_train": True, "lora_target": "all",
                "dataset": "identity", "template": "llama3", "cutoff_len": 2048, "overwrite_output_dir": True, "gradient_accumulation_steps": 8,
                "per_device_train_batch_size": 1, "num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True,
                "resume_from_checkpoint": None}  # fmt: skip
BERT = {
    "learning_rate": 2e-5,
    "weight_decay": 0.01,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 16,
    "eval_strategy": "epoch",
}

# name -> (a sound configuration, what breaks it, the rule that must say so)
CONFIGURATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "sft": (SFT, {"learning_rate": "2e-2"}, "learning-rate"),
    "sft lora": ({**SFT, **LORA, "learning_rate": "2.0e-4"}, {"lora_target_modules": ["q_proj", "lm_head"]}, "head-adapter"),
    "sft qlora": ({**SFT, **LORA, "learning_rate": 2e-4, "load_in_4bit": True, "dtype": "bfloat16"}, {"fp16": True}, "precision-agreement"),
    "sft of a small model": (
        {**SFT, "model_name_or_path": "HuggingFaceTB/SmolLM2-135M", "learning_rate": 1e-3, "warmup_steps": 0.1}, {"warmup_steps": 0}, "warm-up",
    ),
    "sft, bf16 weights": ({**SFT, "dtype": "bfloat16"}, {"learning_rate": 1e-6}, "bf16-rounding"),
    "sft, assistant only": ({**SFT, "packing": False, "assistant_only_loss": True}, {"max_grad_norm": 0}, "clipping"),
    "sft, vision-language": (
        {**SFT, **LORA, "model_name_or_path": "Qwen/Qwen2.5-VL-3B-Instruct", "max_length": None, "bf16": True}, {"fp16": True}, "both-precisions",
    ),
    "sft, mixture of experts": (
        {**SFT, **LORA, "model_name_or_path": "Qwen/Qwen3-30B-A3B", "learning_rate": 1e-4, "router_aux_loss_coef": 0.001},
        {"learning_rate": 1e-1}, "learning-rate",
    ),
    "dpo": ({**PREFERENCE, "beta": 0.1, "learning_rate": "5.0e-7"}, {"beta": 0}, "beta"),
    "dpo lora": ({**PREFERENCE, **LORA, "beta": 0.1, "learning_rate": "5.0e-6"}, {"learning_rate": 5e-2}, "learning-rate"),
    "kto": ({**PREFERENCE, "desirable_weight": 1.0, "learning_rate": 5e-7}, {"learning_rate": 5e-3}, "learning-rate"),
    "kto lora": ({**PREFERENCE, **LORA, "desirable_weight": 1.0, "learning_rate": 5e-6}, {"adam_beta2": 1.0}, "adam-betas"),
    "reward": ({**PREFERENCE, "center_rewards_coefficient": 0.01, "learning_rate": 1e-5}, {"max_grad_norm": 1e6}, "clipping"),
    "reward, TRL's defaults": ({**PREFERENCE, "center_rewards_coefficient": 0.01}, {"learning_rat": 1e-4}, "unknown-arguments"),
    "reward lora": ({**PREFERENCE, **LORA, "center_rewards_coefficient": 0.01, "learning_rate": 1e-4}, {"warmup_steps": 2000}, "long-warm-up"),
    "grpo": (GRPO, {"num_generations": 1}, "group-size"),
    "grpo lora": ({**GRPO, **LORA, "learning_rate": 1e-5, "max_completion_length": 1024}, {"per_device_train_batch_size": 5}, "group-divides"),
    "grpo with a KL term": ({**GRPO, "beta": 0.04, "learning_rate": 5e-6}, {"beta": 4}, "beta"),
    "grpo, several updates": ({**GRPO, "num_iterations": 2, "temperature": 0.9, "loss_type": "dr_grpo"}, {"temperature": 0}, "temperature"),
    "axolotl lora": ({**AXOLOTL, "adapter": "lora", "load_in_8bit": True, "lora_target_linear": True}, {"learning_rate": 0.05}, "learning-rate"),
    "axolotl qlora": ({**AXOLOTL, "adapter": "qlora", "load_in_4bit": True}, {"max_grad_norm": 0}, "clipping"),
    "axolotl full": ({**AXOLOTL, "learning_rate": 2e-5}, {"fp16": True}, "both-precisions"),
    "axolotl dpo": ({**AXOLOTL, "rl": "dpo", "learning_rate": 5e-6}, {"learning_rate": 2e-3}, "learning-rate"),
    "axolotl grpo": (
        {**AXOLOTL, "rl": "grpo", "trl": {"beta": 0.001, "num_generations": 4, "max_completion_length": 256}, "learning_rate": 1e-6},
        {"trl": {"num_generations": 1}}, "group-size",
    ),
    "axolotl kto": (
        {**AXOLOTL, "adapter": "lora", "rl": "kto", "rl_beta": 0.5, "lora_r": 32, "lora_alpha": 16}, {"lora_alpha": 0}, "adapter-scale",
    ),
    "axolotl reward": ({**AXOLOTL, "reward_model": True, "num_labels": 1, "learning_rate": 2e-5}, {"sequence_length": 512}, "unknown-arguments"),
    "axolotl fsdp": (
        {**AXOLOTL, "adapter": "qlora", "load_in_4bit": True, "learning_rate": 1e-5, "fsdp": ["full_shard"], "max_grad_norm": None, "fp16": None},
        {"micro_batch_size": "two"}, "argument-values",
    ),
    "axolotl muon": ({**AXOLOTL, "optimizer": "muon", "adam_beta3": 0.9999, "gradient_checkpointing": "offload"}, {"learning_rate": 0}, "learning-rate"),
    "axolotl pretraining": ({**AXOLOTL, "pretraining_dataset": [{"path": "allenai/c4"}], "max_steps": 200}, {"micro_batch_size": 0}, "argument-values"),
    "llamafactory lora": ({**LLAMAFACTORY, "stage": "sft", "finetuning_type": "lora", "learning_rate": 1e-4}, {"learning_rate": 0.1}, "learning-rate"),
    "llamafactory full": (
        {**LLAMAFACTORY, "stage": "sft", "finetuning_type": "full", "deepspeed": "ds_z3_config.json", "learning_rate": 1e-5},
        {"fp16": True}, "both-precisions",
    ),
    "llamafactory dpo": (
        {**LLAMAFACTORY, "stage": "dpo", "finetuning_type": "lora", "pref_beta": 0.1, "learning_rate": 5e-6}, {"pref_beta": 0}, "beta",
    ),
    "llamafactory reward": ({**LLAMAFACTORY, "stage": "rm", "finetuning_type": "lora", "learning_rate": 1e-4}, {"warmup_ratio": -1}, "argument-values"),
    "llamafactory qlora": (
        {**LLAMAFACTORY, "stage": "sft", "finetuning_type": "lora", "quantization_bit": 4, "learning_rate": 1e-4}, {"lora_alpha": 0}, "adapter-scale",
    ),
    "grpo, sequence level": (
        {**GRPO, **LORA, "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "loss_type": "grpo", "steps_per_generation": 8,
         "use_vllm": True, "vllm_mode": "colocate", "learning_rate": 1e-5}, {"top_p": 1.5}, "argument-values",
    ),
    "grpo, rank one": ({**GRPO, "use_peft": True, "lora_r": 1, "lora_alpha": 32, "learning_rate": 1e-6}, {"use_rslora": True, "lora_alpha": 320}, "adapter-scale"),
    "rloo": (
        {"model_name_or_path": "Qwen/Qwen2-0.5B-Instruct", "reward_funcs": ["accuracy_reward"], "normalize_advantages": True, "num_generations": 2,
         "per_device_train_batch_size": 2, "beta": 0.05}, {"num_generations": 3}, "group-divides",
    ),
    "kto with beta": (
        {**PREFERENCE, "desirable_weight": 1.33, "beta": 0.1, "learning_rate": 5e-7, "lr_scheduler_type": "cosine"}, {"lr_scheduler_type": "cosin"}, "argument-values",
    ),
    "dpo, several losses": ({**PREFERENCE, "loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 1.0], "learning_rate": 5e-7}, {"optim": "adamw_trch"}, "argument-values"),
    "sft, every kind of value": (
        {**SFT, "save_strategy": "epoch", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "lr_scheduler_type": "cosine_with_min_lr", "report_to": ["wandb"],
         "gradient_checkpointing_kwargs": {"use_reentrant": False}, "use_liger_kernel": True, "warmup_steps": "0.03", "logging_steps": 5.0},
        {"save_strategy": False}, "argument-values",
    ),
    "text classification": (BERT, {"adam_epsilon": 0}, "adam-eps"),
    "T5 with Adafactor": ({"learning_rate": 1e-3, "optim": "adafactor", "max_steps": 1000}, {"learning_rate": 0}, "learning-rate"),
    "speech": ({"learning_rate": 1e-5, "warmup_steps": 500, "max_steps": 4000, "fp16": True}, {"use_cpu": True}, "fp16-on-cpu"),
    "vision with SGD": ({"learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0}, {"max_grad_norm": -1.0}, "clipping"),
    "pretraining": (
        {"learning_rate": 6e-4, "warmup_steps": 2000, "max_steps": 100_000, "adam_beta2": 0.95, "weight_decay": 0.1, "bf16": True},
        {"adam_beta1": 0.99}, "adam-betas",
    ),
    **{
        f"preset {kind}/{name}": (read_preset(kind, name), broken, rule)
        for kind, broken, rule in (
            ("sft", {"bf16": True, "fp16": True}, "both-precisions"), ("lora", {"lora_target_modules": "lm_head"}, "head-adapter"),
            ("grpo", {"num_generations": 1}, "group-size"), ("distill", {"adam_epsilon": 1e-8, "optim": "adamw_torch"}, "adam-eps"),
            ("latent", {"learning_rate": 1.0}, "learning-rate"), ("diffusion", {"adam_beta2": 1.5}, "adam-betas"),
        )
        for name in ("balanced", "ultra_conservative")
    },
}  # fmt: skip


# What tells each of two kinds of training apart, or does not.
KINDS_OF_TRAINING = {
    "kto": ({"beta": 0.1, "desirable_weight": 1.0}, "kto", ()),
    "rloo": ({"num_generations": 2, "normalize_advantages": True}, "rloo", ()),
    "grpo": ({"num_generations": 8, "scale_rewards": "group"}, "grpo", ()),
    "grpo or rloo": ({"num_generations": 8, "reward_funcs": ["accuracy_reward"]}, "grpo", ("rloo",)),
    "dpo": (
        {"beta": 0.1, "precompute_ref_log_probs": True, "max_length": 512, "truncation_mode": "keep_end"},
        "dpo",
        (),
    ),
    "reward": ({"center_rewards_coefficient": 0.01}, "reward", ()),
    "sft": ({"packing": True}, "sft", ()),
    "an old name": ({"max_seq_length": 512, "packing": True}, "sft", ()),
    "anything": ({}, "sft", ("dpo", "kto", "grpo", "rloo", "reward")),
}


def write(configuration: dict[str, Any], folder: Path) -> str:
    file = folder / "my.yaml"
    file.write_text(yaml.safe_dump(configuration), encoding="utf-8")
    return str(file)


def test_there_are_enough():
    assert len(CONFIGURATIONS) >= 30


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_sound_configuration_has_nothing_above_a_note(name, tmp_path):
    report = check_config(write(CONFIGURATIONS[name][0], tmp_path))
    assert [found.format_line() for found in report.examination.problems] == []
    assert len(report.examination.sound) >= 8


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_broken_variant_is_caught(name, tmp_path):
    sound, broken, rule = CONFIGURATIONS[name]
    report = check_config(write({**sound, **broken}, tmp_path))
    assert rule in [found.rule for found in report.examination.problems]


@pytest.mark.parametrize("name", KINDS_OF_TRAINING)
def test_the_kind_of_training_is_that_whose_arguments_fit_best(name, tmp_path):
    values, task, others = KINDS_OF_TRAINING[name]
    file = write({"model_name_or_path": "Qwen/Qwen2-0.5B", **values}, tmp_path)
    report = check_config(file)
    assert report.facts.task == task
    remark = (
        f"my.yaml was judged as arguments of {task}; {', '.join(others)} would take them too, and --task says which."
    )
    assert report.remarks == ([remark] if others else [])
    assert check_config(file, task="rloo").facts.task == "rloo"


def test_a_file_of_accelerate_with_a_name_and_values_that_it_refuses(tmp_path):
    launcher = yaml.safe_load((find_configs() / "accelerate" / "ddp.yaml").read_text(encoding="utf-8"))
    sound = {**launcher, "deepspeed_config": {"gradient_clipping": "auto"}}
    assert check_config(write(sound, tmp_path)).is_sound
    report = check_config(write({**sound, "num_processes": 0, "mixed_precision": "fp8x", "num_procesess": 2}, tmp_path))
    assert [(found.severity, found.rule) for found in report.findings] == [
        ("error", "unknown-arguments"), ("error", "argument-values"), ("error", "argument-values"),
    ]  # fmt: skip
    assert "did you mean num_processes?" in report.findings[0].what


def test_each_value_that_cannot_be_is_a_finding_of_its_own(tmp_path):
    report = check_config(
        write({**SFT, "learning_rate": "fast", "max_steps": "ten", "per_device_train_batch_size": 2.5}, tmp_path)
    )
    assert [(found.what, found.change) for found in report.findings] == [
        ("my.yaml sets per_device_train_batch_size to 2.5, which cannot be.", "per_device_train_batch_size must be an integer."),
        ("my.yaml sets max_steps to 'ten', which cannot be.", "max_steps must be an integer."),
        ("my.yaml sets learning_rate to 'fast', which cannot be.", "learning_rate must be a number."),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp2"])
def test_a_launcher_that_leaves_the_precision_to_the_trainer(name, tmp_path):
    launcher = str(find_configs() / "accelerate" / f"{name}.yaml")
    assert check_config(write(SFT, tmp_path), launcher).is_sound
    changed = {**yaml.safe_load(Path(launcher).read_text(encoding="utf-8")), "mixed_precision": "fp16"}
    other = tmp_path / "accelerate.yaml"
    other.write_text(yaml.safe_dump(changed), encoding="utf-8")
    report = check_config(write(SFT, tmp_path), str(other))
    assert [found.rule for found in report.examination.problems] == ["precision-agreement"]
    assert {source.name: source.is_aligned for source in report.precision}["accelerate"] is False


def test_the_environment_variable_of_accelerate_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    report = check_config(write(SFT, tmp_path))
    assert "fp16 is ignored because the training arguments say bf16" in report.findings[0].what


def test_a_deepspeed_file_counts(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"fp16": {"enabled": true}, "bf16": {"enabled": false}}')
    report = check_config(write({**SFT, "deepspeed": str(file)}, tmp_path))
    assert [(found.severity, found.rule) for found in report.findings] == [("error", "precision-agreement")]
    file.write_text('{"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}')
    assert check_config(write({**SFT, "deepspeed": str(file)}, tmp_path)).is_sound


@pytest.mark.parametrize("variant", [{}, {"lora": True}, {"packing": True, "padding_free": True}], ids=str)
def test_trainers_are_sound(variant, tmp_path):
    packing = {name: value for name, value in variant.items() if name != "lora"}
    kinds = ("sft",) if packing else ("plain", "sft", "dpo", "grpo")
    for kind in kinds:
        trainer = build(kind, tmp_path, guard=False, lora=variant.get("lora", False), **packing)
        assert [found.format_line() for found in check_config(trainer).examination.problems] == []


# ---- folders of runs, hostile files ----


def test_the_folder_of_a_run(tmp_path):
    trainer = build("plain", tmp_path, guard=False, save_strategy="steps", save_steps=2, max_steps=2)
    trainer.train()
    report = check_config(tmp_path)
    assert report.facts.model_type == "llama"
    assert report.facts.max_steps == 2
    assert report.is_sound


def test_a_pickle_is_never_loaded(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "config.json").write_text('{"model_type": "llama", "vocab_size": "many"}')
    (tmp_path / "checkpoint-3" / "training_args.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    report = check_config(tmp_path)
    assert (report.facts.model_type, report.facts.embedding_rows) == ("llama", None)


@pytest.mark.parametrize(
    "content",
    ["[]", "nan", '{"log_history": 3}', '{"log_history": [{"learning_rate": "x"}, 4], "max_steps": []}', "{" * 10_000],
    ids=lambda text: text[:20],
)
def test_a_damaged_folder_is_no_traceback(content, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "trainer_state.json").write_text(content)
    assert check_config(tmp_path).facts.model_type == "llama"
