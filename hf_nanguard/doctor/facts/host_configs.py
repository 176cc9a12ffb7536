"""The argument classes of transformers and TRL by kind of training, for their fields and defaults."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches

from transformers import TrainingArguments

from ...core.settings import PREFIX, SETTINGS

TASKS = ("sft", "dpo", "kto", "grpo", "rloo", "reward", "trainer")
"""Kinds of training. Of several that have the same arguments, the first is taken."""
SCRIPT_NAMES = {
    "reward_funcs": ("grpo", "rloo"),
    "reward_model_name_or_path": ("grpo", "rloo"),
    "reward_model_path": ("rloo",),
}
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


def find_tasks(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the kinds of training whose arguments have most of these names, the likeliest first; `trainer` alone for the plain
    Trainer."""
    given = {RENAMED.get(name, name) for name in names}
    if given.intersection(RECIPE_NAMES) - {"temperature"}:
        return ("trainer",)
    scores = {task: sum(name in _own_names(task) for name in given) for task in TASKS}
    best = max(scores.values())
    return tuple(task for task in TASKS if scores[task] == best) if best else ("trainer",)


def _own_names(task: str) -> set[str]:
    """Returns the arguments of a kind of training that the plain Trainer does not have."""
    if task == "trainer":
        return set()
    script = {name for name, tasks in SCRIPT_NAMES.items() if task in tasks}
    return script.union(read_defaults(task)).difference(read_defaults("trainer"))


def find_config_class(task: str) -> type[TrainingArguments]:
    if task == "trainer":
        return TrainingArguments
    import trl

    return {
        "sft": trl.SFTConfig, "dpo": trl.DPOConfig, "kto": trl.KTOConfig, "reward": trl.RewardConfig, "grpo": trl.GRPOConfig,
        "rloo": trl.RLOOConfig,
    }[task]  # fmt: skip


def read_defaults(task: str) -> dict[str, object]:
    """Returns the arguments of a kind of training with their defaults, those of TRL's scripts about the model included."""
    return {
        f.name: None if f.default is MISSING else f.default for cls in find_argument_classes(task) for f in fields(cls)
    }


def find_argument_classes(task: str) -> list[type]:
    """Returns the classes of the arguments of a kind of training, those of TRL's scripts about the model included."""
    if task == "trainer":
        return [TrainingArguments]
    import trl

    return [find_config_class(task), trl.ModelConfig, trl.ScriptArguments]


def find_unknown(values: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, str]:
    """Returns the names that no argument has, each with the argument that was probably meant, or nothing."""
    known = {
        *defaults,
        *OWN,
        *SCRIPT_NAMES,
        "model_name_or_path",
        "dataset_name",
        *RECIPE_NAMES,
        *(f"{PREFIX}{name}" for name in SETTINGS),
    }
    unknown = [name for name in values if name not in known]
    return {name: RENAMED.get(name) or "".join(get_close_matches(name, known, 1)) for name in unknown}
