"""The argument classes of transformers and TRL by kind of training, for their fields and defaults."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any

from transformers import TrainingArguments

from ...core.settings import PREFIX, SETTINGS

TASKS = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "trainer")
# Fields that occur in one kind of training only, by which a file without a name of its own is recognised. The first match wins.
MARKS = {
    "grpo": ("reward_funcs", "reward_weights", "scale_rewards", "num_generations", "max_completion_length", "epsilon_high"),
    "dpo": ("precompute_ref_log_probs", "ld_alpha", "f_divergence_type", "beta"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "sft": ("packing", "dataset_text_field", "assistant_only_loss", "completion_only_loss", "max_length", "dataset_name",
            "model_name_or_path", "use_peft", "lora_r", "lora_alpha", "load_in_4bit", "load_in_8bit"),
}  # fmt: skip
OWN = ("preset", "compare", "json", "config", "env", "datasets", "streaming", "test_split_size")
# Arguments of our recipes on the plain Trainer, with the training argument that each stands for, if any.
RECIPE_NAMES = {
    "student_lr": "learning_rate", "model_dtype": "dtype", "router_lr": "", "alpha_kd": "", "alpha_ce": "", "teacher_steps": "",
    "logits_cap": "", "loss_bound": "", "total_loss_bound": "", "text_loss_weight": "", "latent_loss_weight": "", "max_weight": "",
    "on_bad_term": "", "stable_losses": "", "num_levels": "", "num_rows": "", "plant": "", "temperature": "",
}  # fmt: skip
# Names that earlier versions of the hosts had.
RENAMED = {
    "warmup_ratio": "warmup_steps", "max_seq_length": "max_length", "torch_dtype": "dtype", "evaluation_strategy": "eval_strategy",
    "tokenizer": "processing_class", "no_cuda": "use_cpu", "per_gpu_train_batch_size": "per_device_train_batch_size",
}  # fmt: skip


def find_task(names: Iterable[str]) -> str:
    """Returns the kind of training whose arguments have these names: `sft` if any could, `trainer` for the plain Trainer."""
    given = set(names)
    if given.intersection(RECIPE_NAMES) - {"temperature"}:
        return "trainer"
    return next((task for task, marks in MARKS.items() if given.intersection(marks)), "trainer")


def find_config_class(task: str) -> type[TrainingArguments]:
    """Returns the class of the arguments of a kind of training."""
    if task == "trainer":
        return TrainingArguments
    import trl

    return {
        "sft": trl.SFTConfig, "dpo": trl.DPOConfig, "kto": trl.KTOConfig, "reward": trl.RewardConfig, "grpo": trl.GRPOConfig,
        "rloo": trl.RLOOConfig,
    }[task]  # fmt: skip


def read_defaults(task: str) -> dict[str, Any]:
    """Returns the arguments of a kind of training with their defaults, those of TRL's scripts about the model included."""
    classes: list[type] = [find_config_class(task)]
    if task != "trainer":
        import trl

        classes += [trl.ModelConfig, trl.ScriptArguments]
    return {f.name: None if f.default is MISSING else f.default for cls in classes for f in fields(cls)}


def find_unknown(values: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, str]:
    """Returns the names that no argument has, each with the argument that was probably meant, or nothing."""
    script = ("reward_funcs", "reward_model_name_or_path", "reward_model_path", "model_name_or_path", "dataset_name")
    known = {*defaults, *OWN, *script, *RECIPE_NAMES, *(f"{PREFIX}{name}" for name in SETTINGS)}
    unknown = [name for name in values if name not in known]
    return {name: RENAMED.get(name) or "".join(get_close_matches(name, known, 1)) for name in unknown}
