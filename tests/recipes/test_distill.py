"""The distillation recipe: a failing kd is dropped and ce goes on, the router has its own rate, the best model is kept."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_nanguard import bounded_loss
from hf_nanguard.examples.tasks.calendar_words import (
    BAD_WORD,
    build_student,
    build_teacher,
    build_texts,
    build_tokenizers,
)
from recipes import distill

from .running import find_exit_code, find_outcomes

TENSORS, NUM_ROWS = 37, 24
FEW = ("--num_rows", str(NUM_ROWS), "--teacher_steps", "3", "--num_train_epochs", "2", "--logging_steps", "1")


def run(tmp_path, *words: str):
    return find_outcomes(distill, *FEW, "--output_dir", str(tmp_path), *words)


def build(tmp_path, *words: str):
    """Builds the guarded trainer of a command line."""
    _, *parsed = distill.make_parser().parse([*FEW, "--output_dir", str(tmp_path), *words])
    return distill.build_trainer(*parsed)


def test_a_failing_kd_is_dropped_and_ce_goes_on(tmp_path):
    stock, guarded = run(tmp_path)
    assert len(stock.bad_weights) == stock.num_weights == TENSORS
    assert guarded.is_sound
    assert len(guarded.events) == 2  # one an epoch
    for event in guarded.events:
        assert (event["signal"], event["action"]) == ("loss_nonfinite", "dropped")
        assert event["culprit"]["term"] == "kd"
        assert event["values"]["terms"]["kd"] == "nan"
        assert math.isfinite(event["values"]["terms"]["ce"])
        assert event["cause"] == "uninitialised_weight"
        assert event["culprit"]["parameter"] == "LlamaForCausalLM.model.embed_tokens.weight"
    assert guarded.events[0]["culprit"]["rows"] == [NUM_ROWS // 2]
    assert BAD_WORD in build_texts(NUM_ROWS, 1, NUM_ROWS // 2)[NUM_ROWS // 2]
    assert (guarded.figures["success rate"], guarded.figures["kd dropped"]) == (1.0, "2 times")
    assert all(isinstance(guarded.figures[f"average logged {name}"], float) for name in ("loss", "kd", "ce"))
    assert guarded.figures["best perplexity"] < 30 < len(build_tokenizers()[0]) * 2
    assert list(Path(guarded.figures["best model"]).glob("*.safetensors"))


def test_the_usual_eps_is_named(tmp_path):
    stock, guarded = run(tmp_path, "--plant", "eps")
    assert len(stock.bad_weights) == TENSORS
    assert stock.error is None
    assert (guarded.error, guarded.bad_weights) == (None, {})
    assert guarded.events[0]["cause"] == "adam_eps_underflow"  # before the first step
    [event] = [event for event in guarded.events if event["action"] == "rewound"]
    assert (event["cause"], event["values"]["applied"]) == ("adam_eps_underflow", "larger_eps")
    works = [remedy["name"] for remedy in event["remedies"] if remedy["works"]]
    assert {"larger_eps", "fused"} <= set(works)  # what the recipe's defaults are


def test_healthy_data_is_silent(tmp_path):
    stock, guarded = run(tmp_path, "--plant", "none")
    assert guarded.losses == stock.losses
    assert (guarded.events, guarded.bad_weights) == ([], {})
    assert guarded.figures["best perplexity"] == stock.figures["best perplexity"]


def test_the_best_model_is_the_one_at_the_end(tmp_path):
    # a higher loss counts as better here, so that the best is not the last
    trainer = build(tmp_path, "--plant", "none", "--greater_is_better", "true", "--save_total_limit", "2")
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best == str(tmp_path / "checkpoint-3")
    kept = AutoModelForCausalLM.from_pretrained(best, dtype=torch.float16).state_dict()
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6", dtype=torch.float16).state_dict()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in trainer.model.state_dict().items())
    assert not all(torch.equal(tensor, kept[name]) for name, tensor in last.items())


def test_arguments_reach_the_trainer(tmp_path):
    trainer = build(tmp_path, "--student_lr", "1e-3", "--router_lr", "2e-3", "--model_dtype", "float32")
    optimizer = trainer.create_optimizer()
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    named = dict(trainer.model.named_parameters())
    assert len(rates) == len(named)
    assert {name for name, p in named.items() if rates[id(p)] == 2e-3} == {
        f"model.layers.{layer}.mlp.router.{kind}" for layer in (0, 1) for kind in ("weight", "bias")
    }
    assert {rates[id(p)] for p in named.values()} == {1e-3, 2e-3}
    assert {p.dtype for p in named.values()} == {torch.float32}


def test_defaults_are_those_of_the_field_report(tmp_path):
    script = build(tmp_path).script
    assert (script.temperature, script.alpha_kd, script.alpha_ce, script.model_dtype) == (2.0, 0.1, 0.9, "float16")
    named = distill.ScriptArguments(plant="none", model_name_or_path="a", teacher_name_or_path="b", train_file="c")
    assert (named.student_lr, named.router_lr) == (1e-5, 1e-5)


@pytest.mark.parametrize("preset", ["balanced", "ultra_conservative"])
def test_a_preset_is_for_pretrained_students(tmp_path, preset):
    temperature = {"balanced": 2.0, "ultra_conservative": 1.5}[preset]
    made = build(tmp_path, "--preset", preset)
    assert (made.script.temperature, made.script.student_lr, made.args.nanguard_skip_grad_norm) == (
        temperature,
        5e-3,
        None,
    )
    named = build(tmp_path, "--preset", preset, "--plant", "none", *save_models(tmp_path))
    assert (named.script.temperature, named.args.nanguard_skip_grad_norm) == (temperature, 2.0)
    assert named.script.student_lr <= 1e-5


def test_the_whole_loss_can_be_bounded_and_keeps_a_gradient(tmp_path):
    options = ["--plant", "none", "--model_dtype", "float32"]
    free, bounded = build(tmp_path, *options), build(tmp_path, *options, "--total_loss_bound", "0.5")
    batch = free.data_collator([{"text": "after monday come tuesday wednesday"}])
    losses = [each.compute_loss(each.model.train(), dict(batch)) for each in (free, bounded)]
    assert losses[0] > 0.5
    assert losses[1] == bounded_loss(losses[0], 0.5) < losses[0]
    losses[1].backward()
    assert bounded.model.lm_head.weight.grad.abs().sum() > 0


def test_terms_are_weighed_over_pairs_and_shared_tokens(tmp_path):
    trainer = build(tmp_path, "--plant", "none", "--model_dtype", "float32")
    texts = ["after july come august september october", "after monday come tuesday wednesday"]
    batch = trainer.data_collator([{"text": text} for text in texts])
    loss = trainer.compute_loss(trainer.model.train(), dict(batch))
    with torch.no_grad():
        logits = trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        theirs = trainer.teacher(
            input_ids=batch["teacher_input_ids"], attention_mask=batch["teacher_attention_mask"]
        ).logits
    ce = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    ours, others = trainer.shared
    divergences = []
    for i, j in (batch["teacher_positions"] >= 0).nonzero().tolist():
        p = (theirs[i, batch["teacher_positions"][i, j]][others] / 2).softmax(-1)
        q = (logits[i, j][ours] / 2).softmax(-1)
        divergences.append(4 * (p * (p / q).log()).sum())
    # july, come, august, october; monday, come, tuesday: september and wednesday are cut differently
    assert len(divergences) == 7
    torch.testing.assert_close(loss, 0.9 * ce + 0.1 * torch.stack(divergences).mean(), rtol=1e-4, atol=1e-5)


def save_models(tmp_path):
    """Saves a student, a teacher and texts as a user would have them."""
    ours, theirs = build_tokenizers()
    for name, model, tokenizer in (
        ("student", build_student(len(ours), 0), ours),
        ("teacher", build_teacher(theirs, 2, 0), theirs),
    ):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "texts.txt").write_text("\n".join(build_texts(20, 3)))
    flags = {"model_name_or_path": "student", "teacher_name_or_path": "teacher", "train_file": "texts.txt"}
    return [word for name, path in flags.items() for word in (f"--{name}", str(tmp_path / path))]


def test_models_and_texts_by_name(tmp_path):
    words = ["--plant", "none", "--compare", "false", "--max_steps", "2", *save_models(tmp_path)]
    [guarded] = run(tmp_path / "out", *words)
    assert guarded.is_sound
    assert guarded.events == []
    AutoModelForCausalLM.from_pretrained(guarded.figures["best model"])


def test_a_missing_file_is_one_sentence(tmp_path, capsys):
    words = [
        "--plant",
        "none",
        "--model_name_or_path",
        "a",
        "--teacher_name_or_path",
        "b",
        "--train_file",
        str(tmp_path / "no.txt"),
    ]
    assert find_exit_code(distill, *words) == 2
    error = capsys.readouterr().err
    assert "no.txt" in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_the_recipe_as_it_comes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert find_exit_code(distill) == 0
    printed = capsys.readouterr().out
    assert f"NOT FINITE: {TENSORS} of {TENSORS} tensors" in printed
    assert "events of the guarded run: runs/distill/guarded/nanguard/events.jsonl" in printed
