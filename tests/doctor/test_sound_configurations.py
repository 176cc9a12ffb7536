"""Sound configurations give nothing above a note, and a broken variant of each is caught: presets, examples of TRL's documentation
recreated, axolotl, accelerate, and the Trainer's own tasks."""

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
