"""`nanguard sft` and recipes/sft.py: sums are learned, a user's model and data load, a planted failure is survived."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_nanguard.cli.main import main
from hf_nanguard.core.finite import find_nonfinite
from hf_nanguard.examples.tasks import sums as arithmetic
from hf_nanguard.report.run_files import read_jsonl
from recipes import sft

QUIET = ["--disable_tqdm", "true"]


def save_model(folder: Path) -> str:
    """A model and its tokenizer, as a user has them on disk."""
    arithmetic.build_model().save_pretrained(folder)
    arithmetic.build_tokenizer().save_pretrained(folder)
    return str(folder)


def save_rows(folder: Path, rows: list[dict]) -> str:
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder)


def read_section(text: str, name: str) -> dict[str, str]:
    """Returns what was printed about one run of a comparison."""
    lines = text.splitlines()
    start = lines.index(name)
    return dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines[start + 1 :] if line.startswith("  "))


def sections(text: str) -> tuple[dict[str, str], dict[str, str]]:
    before, _, after = text.partition("\nguarded\n")
    return read_section(before, "stock"), read_section("guarded\n" + after, "guarded")


def check_silent(folder: Path, told: str) -> None:
    """Asserts that a long healthy run reported nothing, or gradient spikes only: rounding decides whether one occurs."""
    file = folder / "nanguard" / "events.jsonl"
    events = list(read_jsonl(file)) if file.exists() else []
    assert {(event["signal"], event["action"]) for event in events} <= {("grad_spike", "observed")}
    assert (read_section(told, "guarded")["events"] == "none") == (not events)


def test_sums_are_learned(tmp_path, capsys):
    """The accuracy is about 0.9 with every seed, and that of an untrained model is 0."""
    assert main(["sft", "--max_steps", "120", "--output_dir", str(tmp_path), *QUIET]) == 0
    told = capsys.readouterr().out
    figures = read_section(told, "guarded")
    assert float(figures["accuracy"]) > 0.5
    assert float(figures["answer rate"]) > 0.9
    check_silent(tmp_path, told)


@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_a_program_reads_one_object(task, tmp_path, capsys):
    words = ["--json", "--max_steps", "2", "--logging_steps", "1", "--output_dir", str(tmp_path), *QUIET]
    assert main([task, *words]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    [run] = told["runs"]
    assert (told["task"], told["is_sound"], run["steps"], run["events"]) == (task, True, 2, [])
    assert {"sft": "accuracy", "grpo": "mean reward, last"}[task] in run["figures"]
    assert f"model: {tmp_path}" in err


def test_a_program_reads_both_runs(tmp_path, capsys):
    words = ["--json", "--compare", "--max_steps", "6", "--logging_steps", "1", "--output_dir", str(tmp_path), *QUIET]
    assert main(["sft", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    stock, guarded = told["runs"]
    assert (stock["is_sound"], guarded["is_sound"], told["is_sound"]) == (False, True, True)
    assert guarded["events"][0]["signal"] == "loss_nonfinite"
    assert (stock["figures"]["last gradient norm"], len(stock["bad_weights"])) == ("nan", stock["num_weights"])


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("sft", ["--max_steps", "1"]),
        ("sft", ["--max_steps", "-1", "--num_train_epochs", "0.03"]),
        ("grpo", ["--max_steps", "1"]),
        ("grpo", ["--max_steps", "6", "--num_iterations", "4"]),
    ],
    ids=str,
)
def test_what_is_planted_comes_up(task, words, tmp_path, capsys):
    assert main([task, "--json", "--compare", *words, "--output_dir", str(tmp_path), *QUIET]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["is_sound"] for run in told["runs"]] == [False, True]


def test_a_halt_is_told_and_ends_with_1(tmp_path, capsys):
    words = ["--json", "--learning_rate", "1e38", "--max_steps", "20", "--nanguard_max_rewinds", "0"]
    assert main(["sft", *words, "--output_dir", str(tmp_path), *QUIET]) == 1
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert not told["is_sound"]
    [run] = told["runs"]
    assert run["error"].removeprefix("NonFiniteError: ") in err
    assert [event["action"] for event in run["events"]].count("halted") == 1


def test_the_embedded_model_has_the_dtype_and_the_attention_that_were_asked_for(tmp_path):
    words = ["--dtype", "bfloat16", "--attn_implementation", "eager", "--output_dir", str(tmp_path)]
    _, script, training, model_args, mixture = sft.make_parser().parse(words)
    model = sft.build_trainer(script, model_args, mixture, training).model
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"


def test_events_of_an_earlier_run_are_not_told_again(tmp_path, capsys):
    old = tmp_path / "nanguard" / "events.jsonl"
    old.parent.mkdir()
    old.write_text('{"signal": "loss_nonfinite", "action": "dropped"}\n', encoding="utf-8")
    assert main(["sft", "--max_steps", "2", "--output_dir", str(tmp_path), *QUIET]) == 0
    assert read_section(capsys.readouterr().out, "guarded")["events"] == "none"


def test_an_untrained_model_knows_nothing(tmp_path, capsys):
    """So that the accuracy above is the training's doing."""
    assert main(["sft", "--max_steps", "1", "--learning_rate", "0", "--output_dir", str(tmp_path), *QUIET]) == 0
    assert float(read_section(capsys.readouterr().out, "guarded")["accuracy"]) < 0.2


def test_stock_and_guarded_on_a_missing_answer(tmp_path, capsys):
    assert main(["sft", "--compare", "--max_steps", "90", "--output_dir", str(tmp_path), *QUIET]) == 0
    stock, guarded = sections(capsys.readouterr().out)
    assert stock["weights"] == "NOT FINITE: 21 of 21 tensors"
    assert stock["logged losses"].endswith(" 0 0 0")
    assert (stock["last gradient norm"], stock["accuracy"], stock["answer rate"]) == ("nan", "0", "0")
    assert guarded["weights"] == "all finite"
    assert float(guarded["last gradient norm"]) > 0
    assert float(guarded["accuracy"]) > 0.3
    assert float(guarded["answer rate"]) > 0.9
    assert re.fullmatch(r"1 loss_nonfinite skipped(, \d+ grad_spike observed)?", guarded["events"])
    assert "step 30" in guarded["first culprit"]
    assert "div_by_zero" in guarded["first culprit"]


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_and_data_of_the_user(lora, tmp_path, capsys):
    model = save_model(tmp_path / "model")
    data = save_rows(tmp_path / "data", [{"prompt": f"{i % 5}+1=", "completion": str(i % 5 + 1)} for i in range(16)])
    out = tmp_path / "out"
    words = ["--model_name_or_path", model, "--dataset_name", data, "--output_dir", str(out), "--max_steps", "3"]
    more = ["--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj"] if lora else []
    # TRL's own defaults, a warning of torch about memory that cannot be pinned aside
    assert main(["sft", *words, *more, *QUIET, "--dataloader_pin_memory", "false", "--learning_rate", "1e-3"]) == 0
    told = capsys.readouterr().out
    assert "answer rate" not in told
    weights = load_file(out / ("adapter_model.safetensors" if lora else "model.safetensors"))
    assert find_nonfinite(weights.items()) == {}
    if lora:
        assert {name.split(".")[-2] for name in weights} == {"lora_A", "lora_B"}
        assert next(value for name, value in weights.items() if "lora_A" in name).shape[0] == 4
    else:
        before = load_file(Path(model) / "model.safetensors")
        assert any(not value.equal(before[name]) for name, value in weights.items())


def test_a_model_of_the_user_learns_sums(tmp_path, capsys):
    model = save_model(tmp_path / "model")
    words = ["--model_name_or_path", model, "--output_dir", str(tmp_path / "out"), "--max_steps", "2", *QUIET]
    assert main(["sft", *words]) == 0
    assert float(read_section(capsys.readouterr().out, "guarded")["accuracy"]) >= 0
