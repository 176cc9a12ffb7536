"""Healthy runs that contain numbers which look bad: 200 steps with every monitor on, and no event.

Masks of -inf, T5's log(0), float16's x**3 in gelu, CTC's second output, TRL's uninitialised buffers, a clip coefficient of
inf, a scaler that finds its scale, GRPO's loss of 0.0, a first gradient that dwarfs all later ones.
"""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_nanguard import GuardArguments, guarded

from ..architectures import BY_NAME
from ..models import tiny_llama, token_dataset
from ..trainers import KINDS, build, common_arguments, events_besides_spikes, events_of

WATCHFUL = {"activation_steps": 10, "attention_steps": 10, "weight_check_steps": 10}


def watchful() -> GuardArguments:
    return GuardArguments(**{f"nanguard_{name}": period for name, period in WATCHFUL.items()})


def train(tmp_path, name: str, dtype: torch.dtype, num_steps: int):
    """Trains an architecture on samples of its own kind, ever new ones in turn."""
    architecture = BY_NAME[name]
    samples = []
    for seed in range(16):
        torch.manual_seed(seed)
        batch = architecture.batch()
        for index in range(len(batch["labels"])):
            sample = {key: value[index] for key, value in batch.items()}
            samples.append({key: v.to(dtype) if v.is_floating_point() else v for key, v in sample.items()})
    # Adam's second moment of small gradients is 0 in float16: that would be no healthy run.
    optimizer = {"optim": "sgd", "learning_rate": 1e-2} if dtype == torch.float16 else {"learning_rate": 1e-3}
    arguments = {
        "max_steps": num_steps, "gradient_accumulation_steps": 1, "weight_decay": 0.0, **optimizer,
    }  # fmt: skip
    trainer = guarded(Trainer)(
        architecture.build(dtype), TrainingArguments(**common_arguments(tmp_path, **arguments)),
        train_dataset=samples, guard=watchful(),
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("name", "dtype"), [("t5", torch.float32), ("gpt2", torch.float16), ("wav2vec2", torch.float32)]
)
def test_short_runs_are_silent(name, dtype, tmp_path):
    assert events_of(train(tmp_path, name, dtype, 40)) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_architectures_are_silent(name, dtype, tmp_path):
    trainer = train(tmp_path, name, dtype, 200)
    assert events_besides_spikes(trainer) == []
    assert not trainer.nanguard.guard.spikes.blamed


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", [{}, {"lora": True}, {"max_grad_norm": 0.0}, {"gradient_checkpointing": True}], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_trainers_are_silent(kind, variant, tmp_path):
    trainer = build(
        kind, tmp_path, max_steps=200, gradient_accumulation_steps=1, learning_rate=1e-3,
        extra={"guard": watchful()}, **variant,
    )  # fmt: skip
    trainer.train()
    assert events_besides_spikes(trainer) == []
    assert not trainer.nanguard.guard.spikes.blamed


@pytest.mark.slow
def test_a_first_gradient_that_dwarfs_all_later_ones(tmp_path):
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(200)
    arguments = common_arguments(tmp_path, max_steps=200, gradient_accumulation_steps=1, warmup_steps=0)
    trainer = guarded(Trainer)(model, TrainingArguments(**arguments), train_dataset=token_dataset(48), guard=watchful())
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert norms[0] > 5 * norms[-1]
    assert events_besides_spikes(trainer) == []
