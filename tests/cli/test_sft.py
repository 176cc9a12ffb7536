"""`nanguard sft` at the command line: help, one sentence for what cannot be, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hf_nanguard.cli.main import main
from hf_nanguard.examples import load_rows
from hf_nanguard.examples.tasks.sums import build_model
from hf_nanguard.hf.guarded_sft import GuardedSFTTrainer

from ..recipes.test_sft import save_model, save_rows

ROOT = Path(__file__).parent.parent.parent


def refuse(words: list[str], capsys) -> str:
    """Returns the one sentence that a command line is refused with."""
    assert main(["sft", *words]) == 2
    output = capsys.readouterr()
    assert all(line.startswith("note: ") for line in output.out.splitlines()), output.out
    assert output.err.count("\n") == 1, output.err
    assert "Traceback" not in output.err
    return output.err


def test_help_all_lists_the_flags_of_trl(capsys):
    assert main(["sft", "--help_all"]) == 0
    told = capsys.readouterr().out
    for flag in ("--dataset_name", "--lora_alpha", "--packing", "--nanguard_on_spike", "--preset", "--compare"):
        assert flag in told


def test_help_shows_flags_that_are(capsys):
    """What the short help shows is taken by the parser that reads it."""
    from hf_nanguard.cli.main import build_parser
    from recipes import grpo, sft

    [subparsers] = [action for action in build_parser()._actions if action.dest == "command"]
    for name, recipe in {"sft": sft, "grpo": grpo}.items():
        shown = {flag for action in subparsers.choices[name]._actions for flag in action.option_strings}
        taken = {flag for action in recipe.make_parser()._actions for flag in action.option_strings}
        assert shown - taken == {"--help_all"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--learning_rte", "1"], ["--learning_rte", "did you mean --learning_rate? Run"]),
        (["--learning_rat", "1"], ["--learning_rat", "did you mean --learning_rate? Run"]),
        (["--learning_rate", "fast"], ["--learning_rate", "'fast'"]),
        (["--learning_rate"], ["--learning_rate"]),
        (["--preset", "bold"], ["--preset", "'bold'", "balanced"]),
        (["--config"], ["--config"]),
        (["--config", "no-such.yaml"], ["--config", "'no-such.yaml'", "No such file"]),
        (["--nanguard_mode", "asleep"], ["nanguard_mode", "'asleep'"]),
        (["--dataset_name", "my-data"], ["--model_name_or_path", "my-data"]),
        (["--model_name_or_path", "no-such-model"], ["--model_name_or_path", "'no-such-model'"]),
        (["--resume_from_checkpoint", "no-such"], ["--resume_from_checkpoint", "'no-such'"]),
        (["--fp16", "true", "--bf16", "true"], ["fp16", "bf16"]),
        (["--output_dir", ""], ["--output_dir", "''", "no name"]),
        (["--bf16", "maybe"], ["--bf16", "(case insensitive). Run"]),
        (["--deepspeed", "no-such.json"], ["deepspeed"]),
        (["--per_device_train_batch_size", "0"], ["--per_device_train_batch_size", "0"]),
        (["--gradient_accumulation_steps", "0"], ["--gradient_accumulation_steps", "0"]),
        (["--learning_rate", "-1"], ["--learning_rate", "-1.0"]),
        (["--load_in_4bit", "--model_name_or_path", "MODEL"], ["bitsandbytes"]),
        (["--report_to", "no-such"], ["no-such"]),
        (["--max_length", "2"], ["--max_length"]),
        (["--model_name_or_path", "MODEL", "--dataset_name", ""], ["--dataset_name", "''"]),
        (["word"], ["word"]),
    ],
    ids=" ".join,
)
def test_bad_arguments(words, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "MODEL" in words:
        save_model(tmp_path / "MODEL")
    error = refuse([*words, "--disable_tqdm", "true"], capsys)
    assert [part for part in told if part not in error] == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("learning_rate: [", ["--config", "mine.yaml"]),
        ("just words", ["--config", "mine.yaml", "names and values"]),
        ("learning_rte: 1", ["mine.yaml", "learning_rte", "learning_rate"]),
        ("learning_rate: fast", ["mine.yaml", "learning_rate", "'fast'"]),
        ("learning-rate: 1.0e-5", ["learning-rate", "did you mean learning_rate?\n"]),
        ("learning_rate:", ["mine.yaml", "learning_rate", "None"]),
        ("learning_rate: [1, 2]", ["mine.yaml", "learning_rate", "[1, 2]"]),
        ("max_steps: true", ["mine.yaml", "max_steps", "True"]),
        ("output_dir: [a]", ["mine.yaml", "output_dir", "['a']"]),
        ("lr_scheduler_type: bogus", ["mine.yaml", "lr_scheduler_type", "'bogus'", "cosine"]),
        ("datasets: [{path: mine}]", ["--model_name_or_path", "got datasets alone"]),
        ("resume_from_checkpoint: true", ["checkpoint", "runs/sft"]),
        ("env: 3", ["mine.yaml", "env", "3"]),
        ("preset: bold", ["--preset", "'bold'"]),
        (b"\xff\xfe\x00", ["--config", "mine.yaml", "not text"]),
    ],
)
def test_a_bad_file(text, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    error = refuse(["--config", "mine.yaml", "--disable_tqdm", "true"], capsys)
    assert [part for part in told if part not in error] == []


def test_bad_data(tmp_path, capsys):
    model = save_model(tmp_path / "model")
    data = save_rows(tmp_path / "data", [{"question": "1+1=", "reply": "2"}])
    words = ["--model_name_or_path", model, "--output_dir", str(tmp_path / "out"), "--dataset_name"]
    error = refuse([*words, data], capsys)
    assert [part for part in ("prompt and completion", "question, reply", repr(data)) if part not in error] == []
    error = refuse([*words, data, "--dataset_train_split", "half"], capsys)
    assert "--dataset_train_split must be one of train" in error
    assert "'half'" in error
    missing = str(tmp_path / "missing")
    assert repr(missing) in refuse([*words, missing], capsys)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "train.jsonl").write_text('{"text": "a"\n', encoding="utf-8")
    assert repr(str(broken)) in refuse([*words, str(broken)], capsys)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"text": "a"}, {"text": None}, {"text": None}], ["a text in every row", "2 of 3"]),
        (
            [{"prompt": "a", "completion": None}, {"prompt": "a", "completion": "b"}],
            ["a completion in every", "1 of 2"],
        ),
        ([{"text": 5}], ["'int'"]),
        ([{"messages": []}], ["data"]),
        ([{"messages": [{"from": "human", "value": "a"}]}], ["the training data", "got none"]),
        ([], ["--dataset_name"]),
    ],
    ids=str,
)
def test_bad_rows(rows, told, tmp_path, capsys):
    data = save_rows(tmp_path / "data", rows)
    words = ["--model_name_or_path", save_model(tmp_path / "model"), "--dataset_name", data]
    error = refuse([*words, "--output_dir", str(tmp_path / "out"), "--disable_tqdm", "true"], capsys)
    assert [part for part in told if part not in error] == []


def test_a_column_that_is_not_used_may_be_empty(tmp_path):
    from recipes import sft

    data = save_rows(tmp_path / "data", [{"text": None, "prompt": "1+1=", "completion": "2"}])
    words = ["--model_name_or_path", save_model(tmp_path / "model"), "--dataset_name", data]
    _, script, training, _, mixture = sft.make_parser().parse([*words, "--output_dir", str(tmp_path / "out")])
    forms = (["text"], ["prompt", "completion"])
    assert len(load_rows(script, mixture, training, forms)["train_dataset"]) == 1


def test_a_model_without_a_tokenizer(tmp_path, capsys):
    model = tmp_path / "model"
    build_model().save_pretrained(model)
    error = refuse(["--model_name_or_path", str(model), "--output_dir", str(tmp_path / "out")], capsys)
    assert f"--model_name_or_path must come with a tokenizer, got {str(model)!r}" in error


def test_a_hub_that_is_not_there(tmp_path, capsys, monkeypatch):
    """A model is not trained first and lost then."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://localhost:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    words = ["--push_to_hub", "true", "--hub_model_id", "me/mine", "--output_dir", str(tmp_path)]
    assert "the hub: " in refuse([*words, "--disable_tqdm", "true"], capsys)


def test_an_error_after_the_first_step_is_not_about_arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(GuardedSFTTrainer, "training_step", break_at(1, GuardedSFTTrainer.training_step))
    with pytest.raises(ValueError, match=r"^broken$"):
        main(["sft", "--max_steps", "3", "--output_dir", str(tmp_path), "--disable_tqdm", "true"])


def break_at(step: int, training_step):
    """Returns a `training_step` that raises in one step."""

    def broken(self, *args, **kwargs):
        if self.state.global_step == step:
            raise ValueError("broken")
        return training_step(self, *args, **kwargs)

    return broken


def test_an_output_folder_that_cannot_be(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    assert f"--output_dir must be a writable folder, got {str(file)!r}" in refuse(["--output_dir", str(file)], capsys)


def test_environment_of_the_file(tmp_path, monkeypatch):
    from recipes import sft

    monkeypatch.delenv("MY_SETTING", raising=False)
    (tmp_path / "mine.yaml").write_text("env:\n  MY_SETTING: 3\nmax_steps: 4\n", encoding="utf-8")
    words = ["--config", str(tmp_path / "mine.yaml"), "--output_dir", str(tmp_path)]
    _, _, training, *_ = sft.make_parser().parse(words)
    assert (training.max_steps, os.environ["MY_SETTING"]) == (4, "3")
    monkeypatch.delenv("MY_SETTING")


def test_ctrl_c_twice_does_not_claim_that_files_are_whole(tmp_path, capsys, monkeypatch):
    def press(self, *args, **kwargs):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(GuardedSFTTrainer, "training_step", press)
    assert main(["sft", "--max_steps", "3", "--output_dir", str(tmp_path), "--disable_tqdm", "true"]) == 130
    error = capsys.readouterr().err
    assert "stopped by Ctrl-C; at once, so a file may be half written." in error
    assert "whole" not in error


def test_ctrl_c(interruptible, tmp_path):
    """Pressed in the middle of training: exit code 130, no traceback, and every file is whole."""
    words = ["sft", "--max_steps", "100000", "--logging_steps", "1", "--save_steps", "20", "--save_total_limit", "2"]
    command = [sys.executable, "-m", "hf_nanguard.cli.main", *words, "--output_dir", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=tmp_path)
        try:
            deadline = time.monotonic() + 120
            while not list((tmp_path / "out").glob("checkpoint-*")):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
    told = (tmp_path / "log").read_text()
    assert "Traceback" not in told
    assert "stopped by Ctrl-C" in told
    checkpoints = list((tmp_path / "out").glob("checkpoint-*"))
    assert checkpoints
    for folder in checkpoints:
        assert load_file(folder / "model.safetensors")
        assert json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["global_step"] % 20 == 0
    for file in (tmp_path / "out" / "nanguard").rglob("*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            json.loads(line)
