"""One builder for every kind of trainer the laws are proved on, stock or guarded, on the same tiny data."""

from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from hf_nanguard import guarded

from .models import text_rows, tiny_llama, tiny_tokenizer, token_dataset

KINDS = ("plain", "sft", "dpo", "grpo")


def reward_length(completions: list, **kwargs: Any) -> list[float]:
    """A reward that differs between completions."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def stock_class(kind: str) -> type[Trainer]:
    """Returns the stock class of a kind."""
    if kind == "plain":
        return Trainer
    import trl

    return getattr(trl, {"sft": "SFTTrainer", "dpo": "DPOTrainer", "grpo": "GRPOTrainer"}[kind])


def common_arguments(output_dir: Path, **overrides: Any) -> dict[str, Any]:
    """Arguments for a short, deterministic run whose schedule does not depend on its length."""
    arguments = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 6,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }
    return {**arguments, **overrides}


def build(
    kind: str,
    output_dir: Path,
    trainer_class: type | None = None,
    guard: bool = True,
    lora: bool = False,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.1,
    extra: dict[str, Any] | None = None,
    **overrides: Any,
) -> Any:
    """Builds a trainer.

    Args:
        kind: one of `KINDS`.
        trainer_class: the class to use in place of the stock one.
        guard: guard that class.
        extra: more arguments for the constructor.
        overrides: training arguments.
    """
    base = trainer_class or stock_class(kind)
    cls = guarded(base) if guard else base
    arguments = common_arguments(output_dir, **overrides)
    model = tiny_llama(dropout=dropout, dtype=dtype)
    extra = dict(extra or {})
    if lora:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(3)
        model = get_peft_model(model, config)
    if kind == "plain":
        dataset = extra.pop("train_dataset", None) or token_dataset(48)
        return cls(model, TrainingArguments(**arguments), train_dataset=dataset, **extra)
    import trl

    extra.setdefault("processing_class", tiny_tokenizer())
    if kind == "sft":
        dataset = extra.pop("train_dataset", None) or Dataset.from_list(text_rows(48))
        args = trl.SFTConfig(**{"max_length": 16, **arguments})
    elif kind == "dpo":
        rows = text_rows(96)
        dataset = Dataset.from_list(
            [
                {"prompt": "w1 w2", "chosen": " " + rows[2 * i]["text"], "rejected": " " + rows[2 * i + 1]["text"]}
                for i in range(48)
            ]
        )
        args = trl.DPOConfig(**{"max_length": 24, **arguments})
        if not lora:
            extra["ref_model"] = tiny_llama(dropout=dropout, dtype=dtype)
    else:
        dataset = Dataset.from_list([{"prompt": row["text"]} for row in text_rows(48)])
        args = trl.GRPOConfig(**{"num_generations": 2, "max_completion_length": 4, **arguments})
        extra.setdefault("reward_funcs", reward_length)
    return cls(model, args=args, train_dataset=dataset, **extra)


def events_besides_spikes(trainer: Any) -> list[dict]:
    """Returns the events of a long run other than gradient spikes, after checking that each spike is real.

    Whether a gradient ever rises far above the median is decided by rounding, which differs between CPUs. That the guard
    observes such a step and reports nothing else does not depend on it. The run must log every step.
    """
    rows = [row for row in trainer.state.log_history if row.get("grad_norm")]
    events = events_of(trainer)
    for event in events:
        if event["signal"] == "grad_spike":
            before = [row["grad_norm"] for row in rows if row["step"] <= event["step"]]
            assert event["action"] == "observed"
            assert event["values"]["grad_norm"] > 10 * median(before)
    return [event for event in events if event["signal"] != "grad_spike"]


def events_of(trainer: Any, rank: int = 0, trained: bool = True) -> list[dict]:
    """Returns the events a run has written. That there are none proves something only of a run that has `trained`."""
    from hf_nanguard.report.run_files import events_path, read_jsonl

    path = events_path(Path(trainer.args.output_dir) / "nanguard", rank)
    events = list(read_jsonl(path)) if path.exists() else []
    assert events or not trained or trainer.state.global_step > 0, "no step was run"
    return events


def metric_rows_of(trainer: Any) -> list[dict]:
    """Returns the rows of training losses in `metrics.jsonl`, which have every metric of the guard."""
    from hf_nanguard.report.run_files import read_jsonl

    rows = read_jsonl(Path(trainer.args.output_dir) / "nanguard" / "metrics.jsonl")
    return [row for row in rows if "loss" in row]
