"""L1: guard on, nothing wrong: the run is bit-identical to the stock trainer with the same arguments."""

from typing import Any

import pytest
import torch

from hf_nanguard import GuardArguments

from ..reference import assert_same, losses_of, tensors_of
from ..trainers import KINDS, build, events_of

VARIANTS = {
    "default": {},
    "one micro-batch": {"gradient_accumulation_steps": 1},
    "no clipping": {"max_grad_norm": 0.0},
    "tight clipping": {"max_grad_norm": 0.05},
    "fused": {"optim": "adamw_torch_fused"},
    "sgd": {"optim": "sgd"},
    "adafactor": {"optim": "adafactor"},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "float16 weights": {"dtype": torch.float16, "optim": "sgd", "learning_rate": 1e-3},
    "bf16 weights": {"dtype": torch.bfloat16},
    "lora": {"lora": True},
    "sparse log": {"logging_steps": 3},
}


def _compare(kind: str, tmp_path, monitors: GuardArguments | None = None, **settings) -> Any:
    stock = build(kind, tmp_path / "stock", guard=False, **settings)
    stock.train()
    expected = tensors_of(stock)
    extra = {**settings.pop("extra", {}), **({} if monitors is None else {"guard": monitors})}
    ours = build(kind, tmp_path / "guarded", extra=extra, **settings)
    ours.train()
    assert_same(tensors_of(ours), expected)
    assert losses_of(ours) == losses_of(stock)
    for mine, theirs in zip(ours.state.log_history, stock.state.log_history, strict=True):
        timed = {key for key in theirs if "runtime" in key or "per_second" in key or "time" in key}
        assert {key: mine.get(key) for key in theirs.keys() - timed} == {
            key: theirs[key] for key in theirs.keys() - timed
        }
        assert all(key in theirs or key.startswith("nanguard/") for key in mine)
    assert events_of(ours) == []
    return ours


@pytest.mark.parametrize("variant", VARIANTS)
def test_plain_trainer_is_identical(variant, tmp_path):
    _compare("plain", tmp_path, **VARIANTS[variant])


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("variant", ["default", "one micro-batch", "lora", "checkpointing", "bf16"])
def test_trl_trainers_are_identical(kind, variant, tmp_path):
    _compare(kind, tmp_path, **VARIANTS[variant])


EVERY_STEP = {
    f"nanguard_{name}": 1 for name in ("activation_steps", "attention_steps", "weight_check_steps")
} | {"nanguard_full_metrics": True}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        pytest.param(kind, variant, marks=() if variant == "default" or kind == "grpo" else pytest.mark.slow)
        for kind in KINDS
        for variant in ("default", "lora", "checkpointing", "bf16")
    ],
)
def test_every_monitor_at_every_step_changes_nothing(kind, variant, tmp_path):
    ours = _compare(kind, tmp_path, monitors=GuardArguments(**EVERY_STEP), **VARIANTS[variant])
    rows = [row for row in ours.state.log_history if "loss" in row]
    assert rows
    assert all(
        {"nanguard/headroom_bits", "nanguard/update_share", "nanguard/logsumexp_max"} <= row.keys() for row in rows
    )


def test_evaluation_during_training_is_identical(tmp_path):
    from ..models import token_dataset

    settings = {"eval_strategy": "steps", "eval_steps": 1, "extra": {"eval_dataset": token_dataset(8, seed=5)}}
    _compare("plain", tmp_path, **settings)


def test_shuffled_epochs_with_workers_are_identical(tmp_path):
    _compare("plain", tmp_path, max_steps=-1, num_train_epochs=2, dataloader_num_workers=2)
