"""Files as users write them: each mistake is a finding that names it, and documented examples have none above a note."""

from pathlib import Path

import pytest

from hf_nanguard.doctor.config_check import check_config

SFT = "model_name_or_path: Qwen/Qwen2-0.5B\nlearning_rate: 2e-5\npacking: true\n"
AXOLOTL = "base_model: meta-llama/Llama-3.1-8B\nmicro_batch_size: 2\nlearning_rate: 0.0002\nbf16: true\n"
ADAPTER = f"{AXOLOTL}adapter: qlora\nload_in_4bit: true\nlora_r: 32\nlora_alpha: 16\nlora_target_linear: true\n"
FACTORY = "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\nfinetuning_type: lora\ntemplate: qwen3\ncutoff_len: 2048\nlearning_rate: 1.0e-4\nbf16: true\n"
LAUNCHER = "compute_environment: LOCAL_MACHINE\ndistributed_type: {kind}\nmixed_precision: bf16\nnum_processes: 8\n"
FSDP, ENGINE = LAUNCHER.format(kind="FSDP"), LAUNCHER.format(kind="DEEPSPEED")

# file -> (its text, what findings above a note must name)
MISTAKES = {
    "kwargs.yaml": (f"{SFT}gradient_checkpointing_kwargs: use_reentrant=False\n", ["gradient_checkpointing_kwargs"]),
    "best.yaml": (f"{SFT}load_best_model_at_end: true\n", ["load_best_model_at_end"]),
    "attention.yaml": (f"{SFT}attn_implementation: flash_atention_2\noptim: adamw\n", ["attn_implementation", "optim"]),
    "loss.yaml": ("model_name_or_path: m\nloss_type: sigmoidd\nbeta: 0.1\nlearning_rate: 5e-7\nprecompute_ref_log_probs: true\n", ["loss_type"]),
    "steps.yaml": (f"{SFT}save_steps: -5\n", ["save_steps"]),
    "no_steps.yaml": (f"{SFT}save_steps: 0\n", ["save_steps"]),
    "no_eval_steps.yaml": (f"{SFT}eval_strategy: steps\neval_steps: 0\nlogging_strategy: epoch\nlogging_steps: 0\n", ["eval_steps", "logging_steps"]),
    "decay.yaml": (f"{SFT}weight_decay: 10\n", ["weight_decay"]),
    "quantized.yaml": (f"{SFT}load_in_4bit: true\n", ["quantized to 4 bits"]),
    "two_sizes.yaml": (f"{SFT}use_peft: true\nload_in_4bit: true\nload_in_8bit: true\n", ["load_in_8bit"]),
    "adapter.yml": (f"{AXOLOTL}adapter: lroa\noptimizer: adamw_troch\nlr_scheduler: cosin\n", ["adapter", "optimizer", "lr_scheduler"]),
    "eight_bits.yml": (ADAPTER.replace("load_in_4bit", "load_in_8bit"), ["load_in_8bit"]),
    "names.yaml": (f"{FACTORY}lora_ranks: 8\ncutof_len: 2048\n", ["lora_ranks", "cutof_len"]),
    "stage.yaml": (FACTORY.replace("sft", "stf").replace("lora", "lorra").replace("1.0e-4", "1.0e-1"), ["stage", "finetuning_type", "learning_rate"]),
    "bits.yaml": (f"{FACTORY.replace('lora', 'full')}quantization_bit: 4\nwarmup_ratio: 1.5\n", ["quantized to 4 bits", "warmup_ratio"]),
    "preferences.yaml": (f"{FACTORY.replace('sft', 'dpo')}pref_loss: sigmod\n", ["pref_loss"]),
    "kind.yaml": (LAUNCHER.format(kind="MULTI_GPUS"), ["distributed_type"]),
    "fsdp.yaml": (f"{FSDP}fsdp_config:\n  fsdp_autowrap_policy: NO_WRAP\n  fsdp_state_dict_type: FULL\n", ["fsdp_autowrap_policy", "fsdp_state_dict_type"]),
    "zero.yaml": (f"{ENGINE}deepspeed_config:\n  zero_stag: 3\n  gradient_accumulation_steps: eight\n", ["zero_stag", "gradient_accumulation_steps"]),
    "stages.yaml": (f"{ENGINE}deepspeed_config:\n  zero_stage: 5\n  gradient_clipping: -1\n", ["zero_stage", "gradient_clipping"]),
    "engine.json": ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}, "zero_optimization": {"stage": 4}}', ["fp16", "zero_optimization"]),
    "names.json": ('{"zero_optimisation": {"stage": 3}, "bf16": {"enabled": "yes"}}', ["zero_optimisation", "bf16"]),
}  # fmt: skip

SOUND = {
    "sft.yaml": f"{SFT}attn_implementation: kernels-community/flash-attn2\nload_best_model_at_end: true\neval_strategy: steps\nweight_decay: 0.1\n",
    "best.yaml": f"{SFT}load_best_model_at_end: true\nsave_strategy: best\neval_strategy: steps\neval_steps: 0\n",
    "no_steps.yaml": f"{SFT}save_strategy: epoch\nsave_steps: 0\nlogging_strategy: epoch\nlogging_steps: 0\neval_steps: 0\n",
    "texts.yaml": f'{SFT}attn_implementation: flash_attention_4\ngradient_checkpointing_kwargs: ""\n',
    "paged.yaml": f"{SFT}attn_implementation: paged|flash_attention_2\n",
    "lora.yaml": f"{SFT}use_peft: true\nload_in_4bit: true\ngradient_checkpointing_kwargs: {{use_reentrant: false}}\n",
    "dpo.yaml": "model_name_or_path: m\nloss_type: [sigmoid, sft]\nloss_weights: [0.8, 1.0]\nbeta: 0.1\nlearning_rate: 5e-7\n",
    "qlora.yml": f"{ADAPTER}optimizer: adamw_bnb_8bit\nlr_scheduler: cosine\nsample_packing: true\nflash_attention: true\n",
    "muon.yml": f"{AXOLOTL}optimizer: ao_adamw_8bit\nlr_scheduler: rex\n".replace("0.0002", "0.00002"),
    "lora_sft.yaml": f"{FACTORY}lora_rank: 8\nlora_target: all\ndataset: identity\nmax_samples: 1000\nwarmup_ratio: 0.1\npreprocessing_num_workers: 16\n",
    "lora_dpo.yaml": f"{FACTORY.replace('sft', 'dpo').replace('e-4', 'e-6')}pref_beta: 0.1\npref_loss: orpo\n",
    "fsdp2.yaml": f"{FSDP}fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
    "  fsdp_reshard_after_forward: true\n  fsdp_activation_checkpointing: false\n",
    "zero3.yaml": f"{ENGINE}deepspeed_config:\n  zero_stage: 3\n  zero3_init_flag: true\n  offload_optimizer_device: none\n  gradient_clipping: auto\n",
    "no_clipping.yaml": f"{ENGINE}deepspeed_config:\n  zero_stage: 1\n  gradient_clipping: 0.0\n",
    "single.yaml": LAUNCHER.format(kind="NO"),
    "zero2.json": '{"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 2, "overlap_comm": true}, '
    '"fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"}}',
}  # fmt: skip


def check(name: str, text: str, folder: Path):
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return check_config(str(file)).examination.problems


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_named(name, tmp_path):
    text, wanted = MISTAKES[name]
    found = check(name, text, tmp_path)
    assert [each for each in wanted if not any(each in problem.what for problem in found)] == []
    assert all(problem.change for problem in found)


@pytest.mark.parametrize("name", SOUND)
def test_a_documented_example_has_nothing_above_a_note(name, tmp_path):
    assert [problem.format_line() for problem in check(name, SOUND[name], tmp_path)] == []
