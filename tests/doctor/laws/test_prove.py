"""`prove`: its interface, that it leaves no trace, and that sound set-ups keep every law."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_nanguard import ArgumentError, attach, prove
from hf_nanguard.doctor.laws.prove import LAWS

from ...trainers import build
from .setups import (
    add_adapter,
    answer_rows,
    build_choice,
    build_classifier,
    build_distillation,
    build_encoder,
    build_left_padded,
    build_masked,
    build_model,
    build_pictures,
    build_plain,
    build_prompt_tuning,
    build_resized,
    build_rewarder,
    build_sft,
    build_stacked,
    build_translator,
    build_vision_sft,
    text_rows,
    token_rows,
    turns,
)

NO_ACCUMULATION = {"gradient_accumulation_steps": 1}
SAVES = {"save_strategy": "steps", "save_steps": 1}


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def moments_of(trainer):
    states = trainer.optimizer.state_dict()["state"].values()
    return [value.clone() for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def train_with(kind, folder, proves, **more):
    trainer = build(kind, folder / str(proves), guard=False, **more)
    if proves:
        prove(trainer)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("sft", {"lora": True}),
        ("grpo", {}),
        pytest.param("plain", {"dtype": torch.bfloat16, "gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param("dpo", {}, marks=pytest.mark.slow),
        pytest.param("plain", {}, marks=pytest.mark.slow),
        pytest.param("sft", {"bf16": True}, marks=pytest.mark.slow),
        pytest.param("grpo", {"lora": True}, marks=pytest.mark.slow),
    ],
)
def test_a_run_after_a_proof_is_the_run_without_one(kind, more, tmp_path):
    with_proof, without = (train_with(kind, tmp_path, proves, **more) for proves in (True, False))
    before, after = weights_of(without), weights_of(with_proof)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(a, b) for a, b in zip(moments_of(without), moments_of(with_proof), strict=True))
    logs = [[{k: v for k, v in row.items() if k in ("loss", "grad_norm", "entropy", "num_tokens", "step")}
             for row in t.state.log_history] for t in (without, with_proof)]  # fmt: skip
    assert logs[0] == logs[1]


def state_of(trainer):
    """Everything of a trainer that a proof could touch, as comparable values."""
    modules = list(trainer.model.modules())
    return {
        "random": (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())),
        "modes": [module.training for module in modules],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in modules],
        "names": [sorted(vars(module)) for module in modules],
        "gradients": [p.grad is None for p in trainer.model.parameters()],
        "trainable": [p.requires_grad for p in trainer.model.parameters()],
        "args": {name: repr(value) for name, value in vars(trainer.args).items()},
        "attributes": {name: id(value) for name, value in vars(trainer).items()},
        "callbacks": [type(callback) for callback in trainer.callback_handler.callbacks],
        "log": list(trainer.state.log_history),
        "config": trainer.model.config.to_dict(),
        "files": sorted(os.listdir(trainer.args.output_dir)) if os.path.isdir(trainer.args.output_dir) else [],
    }


@pytest.mark.parametrize("trained", [pytest.param(False, marks=pytest.mark.slow), True])
def test_nothing_of_the_trainer_is_changed(tmp_path, trained):
    trainer = build("sft", tmp_path / "run", guard=False, max_steps=1)
    if trained:
        trainer.train()
    before, weights = state_of(trainer), weights_of(trainer)
    moments = moments_of(trainer) if trained else []
    prove(trainer)
    after = state_of(trainer)
    assert {name for name in before if before[name] != after[name]} == set()
    assert all(torch.equal(weights[name], tensor) for name, tensor in trainer.model.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(moments, moments_of(trainer) if trained else [], strict=True))


def test_a_guarded_trainer_is_proved_without_events(tmp_path):
    trainer = attach(build("sft", tmp_path, guard=False, max_steps=1))
    guard = trainer.nanguard
    results = prove(trainer)
    assert trainer.nanguard is guard
    assert not any("raised" in result.message for result in results)
    assert os.listdir(tmp_path) == []


def test_a_collator_that_counts_is_not_used_up(tmp_path):
    class Counting:
        def __init__(self, collate):
            self.collate, self.calls = collate, 0

        def __call__(self, rows):
            self.calls += 1
            return self.collate(rows)

    trainer = build_plain(tmp_path, build_model("llama"))
    trainer.data_collator = Counting(trainer.data_collator)
    prove(trainer, only=["accumulation"])
    assert trainer.data_collator.calls == 0


# ---- sound set-ups ----

SOUND = {
    "packed": lambda folder: build_sft(folder, build_model("qwen3"), packing=True),
    "adapter": lambda folder: build_sft(folder, add_adapter(build_model("llama")), gradient_checkpointing=True),
    "grpo": lambda folder: build("grpo", folder, guard=False),
}
MORE_SOUND = {
    "sft": lambda folder: build_sft(folder, build_model("llama")),
    "bfloat16": lambda folder: build_sft(folder, build_model("gemma", torch.bfloat16), learning_rate=0.1),
    "classifier": lambda folder: build_classifier(folder, **NO_ACCUMULATION),
    "sft, vision-language": build_vision_sft,
    "stream": lambda folder: build_sft(folder, build_model("llama"), text_rows().to_iterable_dataset()),
    "tensors": lambda folder: build_plain(folder, build_model("llama"), Dataset.from_list(token_rows()).with_format("torch")),
    "reward model": build_rewarder,
    "drop last": lambda folder: build_plain(folder, build_model("llama"), token_rows(25), dataloader_drop_last=True),
    "encoder": lambda folder: build_encoder(folder),
    "one row": lambda folder: build_plain(folder, build_model("llama"), token_rows(1)),
    "label smoothing": lambda folder: build_plain(folder, build_model("llama"), label_smoothing_factor=0.1),
    "embedding noise": lambda folder: build_sft(folder, build_model("llama"), neftune_noise_alpha=5),
    "adafactor": lambda folder: build_plain(folder, build_model("llama"), optim="adafactor"),
    "trained head": lambda folder: build_sft(folder, add_adapter(build_model("llama"), modules_to_save=["lm_head"])),
    "dora": lambda folder: build_sft(folder, add_adapter(build_model("llama"), use_dora=True)),
    **{f"stacked {name}": lambda folder, name=name: build_stacked(folder, name) for name in ("llava", "whisper", "vit", "wav2vec2")},
    **{f"sft {f}": lambda folder, f=f: build_sft(folder, build_model(f)) for f in ("qwen3", "gemma", "gemma3", "mistral", "mixtral", "phi3", "olmo2", "gpt2", "mamba", "mamba2", "qwen3_next")},
    **{f"packed {f}": lambda folder, f=f: build_sft(folder, build_model(f), packing=True) for f in ("llama", "gemma", "gemma3", "mistral", "mixtral", "phi3", "olmo2", "gpt2")},
    **{f"bfloat16 {f}": lambda folder, f=f: build_sft(folder, build_model(f, torch.bfloat16), learning_rate=0.1) for f in ("llama", "qwen3", "gpt2", "mixtral")},
    "padding-free": lambda folder: build_sft(folder, build_model("llama"), padding_free=True, max_length=None),
    "wrapped": lambda folder: build_sft(folder, build_model("llama"), packing=True, packing_strategy="wrapped"),
    "autocast": lambda folder: build_sft(folder, build_model("llama"), bf16=True),
    "completion only": lambda folder: build_sft(folder, build_model("llama"), answer_rows()),
    "conversations": lambda folder: build_sft(folder, build_model("llama"), answer_rows(conversational=True)),
    "tied": lambda folder: build_sft(folder, build_model("llama", tie_word_embeddings=True)),
    "checkpointing": lambda folder: build_sft(folder, build_model("llama"), gradient_checkpointing=True),
    "plain llama": lambda folder: build_plain(folder, build_model("llama")),
    "plain gpt2": lambda folder: build_plain(folder, build_model("gpt2")),
    "seq2seq": lambda folder: build_translator(folder, **NO_ACCUMULATION),
    "dpo": lambda folder: build("dpo", folder, guard=False, dropout=0.0),
    "dpo adapter": lambda folder: build("dpo", folder, guard=False, lora=True),
    "grpo adapter": lambda folder: build("grpo", folder, guard=False, lora=True),
    "grpo temperature": lambda folder: build("grpo", folder, guard=False, temperature=0.7),
    "masked language model": build_masked,
    "batch norm": lambda folder: build_pictures(folder, "ResNet"),
    "saved under other names": lambda folder: build_pictures(folder, "ViT"),
    "experts that are saved under other names": lambda folder: build_plain(folder, build_model("mixtral"), **SAVES),
    "smoothed labels of a decoder": lambda folder: build_translator(folder, **NO_ACCUMULATION, label_smoothing_factor=0.1),
    "pissa": lambda folder: build_sft(folder, add_adapter(build_model("llama"), init_lora_weights="pissa")),
    "prompt tuning": build_prompt_tuning,
    "rows grouped by length": lambda folder: build_plain(folder, build_model("llama"), train_sampling_strategy="group_by_length", **SAVES),
    "bfloat16, usual rate": lambda folder: build_sft(folder, build_model("qwen3", torch.bfloat16), learning_rate=2e-5),
    "reentrant checkpointing": lambda folder: build_sft(
        folder, build_model("llama"), gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    ),
    "packed rows of one document": lambda folder: build_sft(folder, build_model("llama"), turns(), packing=True, max_length=16),
    "new rows of an embedding": build_resized,
    "dpo, several losses": lambda folder: build(
        "dpo", folder, guard=False, dropout=0.0, loss_type=["sigmoid", "sft"], loss_weights=[0.8, 1.0]
    ),
    "grpo, dr_grpo": lambda folder: build("grpo", folder, guard=False, loss_type="dr_grpo", scale_rewards=False, dropout=0.0),
    "grpo, sequence level": lambda folder: build(
        "grpo", folder, guard=False, importance_sampling_level="sequence", loss_type="grpo", dropout=0.0
    ),
    "distillation": build_distillation,
    "multiple choice": build_choice,
    "padded on the left": build_left_padded,
    "grpo, some tokens": lambda folder: build("grpo", folder, guard=False, top_entropy_quantile=0.2, dropout=0.0),
    "grpo top_p": lambda folder: build("grpo", folder, guard=False, top_p=0.8),
}  # fmt: skip


def check_sound(trainer):
    results = prove(trainer)
    assert [f"{r.name}: {r.message}" for r in results if r.status == "broken" and r.severity != "note"] == []
    assert [f"{r.name}: {r.message}" for r in results if "raised" in r.message] == []
    assert sum(r.status == "held" for r in results) >= 5


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_set_up_keeps_every_law(name, tmp_path):
    check_sound(SOUND[name](tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_SOUND)
def test_another_sound_set_up_keeps_every_law(name, tmp_path):
    check_sound(MORE_SOUND[name](tmp_path))


def test_a_resume_that_the_hosts_break_is_a_note_unless_the_run_is_one(tmp_path):
    def prove_resume(**asked):
        (found,) = prove(build_plain(tmp_path, build_model("mixtral"), **SAVES, **asked), only=["resume"])
        return found

    found = prove_resume()
    assert (found.status, found.severity) == ("broken", "note")
    assert "under other names than the model" in found.message
    assert prove_resume(resume_from_checkpoint=str(tmp_path / "checkpoint-1")).severity == "error"


def test_buffers_are_restored_after_each_law(tmp_path):
    trainer = build_pictures(tmp_path, "ResNet")
    trainer.model.save_pretrained(tmp_path / "base")
    trainer.model.name_or_path = str(tmp_path / "base")
    results = {
        result.name: result for result in prove(trainer, only=["accumulation", "saved_weights", "loaded_weights"])
    }
    assert results["saved_weights"].status == results["loaded_weights"].status == "held"


# ---- interface ----


def test_laws_can_be_chosen_and_report_their_progress(tmp_path):
    seen = []
    trainer = build_plain(tmp_path, build_model("llama"))
    results = prove(trainer, only=["padding", "next_token"], skip=["padding"], progress=lambda *args: seen.append(args))
    assert [result.name for result in results] == ["next_token"]
    assert seen == [(0, 1, "next_token")]
    assert results[0].seconds > 0


@pytest.mark.parametrize("given", [{"only": ["gravity"]}, {"skip": ["gravity"]}])
def test_a_name_that_is_no_law_is_refused(given, tmp_path):
    with pytest.raises(ArgumentError, match="gravity"):
        prove(build_plain(tmp_path, build_model("llama")), **given)


def test_something_else_than_a_trainer_is_refused():
    with pytest.raises(ArgumentError, match="must be given a Trainer, got int"):
        prove(3)


def test_a_trainer_that_cannot_train_is_no_error_of_the_proof(tmp_path):
    trainer = build_plain(tmp_path, build_model("llama"))
    trainer.create_optimizer = lambda model=None: 1 / 0
    results = prove(trainer)
    assert {result.status for result in results} == {"could not run"}
    assert all("ZeroDivisionError" in result.message for result in results)


def test_a_law_that_does_not_apply_says_why(tmp_path):
    (result,) = prove(build_plain(tmp_path, build_model("llama")), only=["merged_adapter"])
    assert (result.status, result.message) == ("could not run", "its model has no adapter to merge")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_that_is_only_rounding_is_zero(dtype, tmp_path):
    results = prove(build_rewarder(tmp_path, equal=True, dtype=dtype), only=["accumulation", "attention"])
    assert [each.message for each in results if "is zero" not in each.message] == []


def test_names_are_unique():
    assert len({law.name for law in LAWS}) == len(LAWS)


def test_the_page_of_the_laws_lists_them_all():
    page = (Path(__file__).parents[3] / "docs" / "laws.md").read_text(encoding="utf-8")
    listed = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert listed == [law.name for law in LAWS]
