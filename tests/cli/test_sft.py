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

from ..recipes.test_sft import save_model, save_rows

ROOT = Path(__file__).parent.parent.parent


def refuse(words: list[str], capsys) -> str:
    """Returns the one sentence that a command line is refused with."""
    assert main(["sft", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
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
    from hf_nanguard.hf.bundled import grpo, sft
    from hf_nanguard.hf.bundled.dialect import build_parser as build_trl_parser

    [subparsers] = [action for action in build_parser()._actions if action.dest == "command"]
    for kind in (sft.RECIPE.kind, grpo.RECIPE.kind):
        shown = {name for action in subparsers.choices[kind.name]._actions for name in action.option_strings}
        taken = {name for action in build_trl_parser(kind)._actions for name in action.option_strings}
        assert shown - taken == {"--config", "--help_all"}


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
        (["word"], ["word"]),
    ],
    ids=" ".join,
)
def test_bad_arguments(words, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refuse(words, capsys)
    assert [part for part in told if part not in error] == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("learning_rate: [", ["--config", "mine.yaml"]),
        ("just words", ["--config", "mine.yaml", "names and values"]),
        ("learning_rte: 1", ["mine.yaml", "learning_rte", "learning_rate"]),
        ("learning_rate: fast", ["mine.yaml", "learning_rate", "'fast'"]),
        ("env: 3", ["mine.yaml", "env", "3"]),
        ("preset: bold", ["--preset", "'bold'"]),
        (b"\xff\xfe\x00", ["--config", "mine.yaml", "not text"]),
    ],
)
def test_a_bad_file(text, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    error = refuse(["--config", "mine.yaml"], capsys)
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


def test_an_output_folder_that_cannot_be(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    assert f"--output_dir must be a folder that can be made, got {str(file)!r}" in refuse(
        ["--output_dir", str(file)], capsys
    )


def test_environment_of_the_file(tmp_path, monkeypatch):
    from hf_nanguard.hf.bundled import sft
    from hf_nanguard.hf.bundled.dialect import parse

    monkeypatch.delenv("MY_SETTING", raising=False)
    (tmp_path / "mine.yaml").write_text("env:\n  MY_SETTING: 3\nmax_steps: 4\n", encoding="utf-8")
    plan = parse(["--config", str(tmp_path / "mine.yaml"), "--output_dir", str(tmp_path)], sft.RECIPE.kind)
    assert (plan.training.max_steps, os.environ["MY_SETTING"]) == (4, "3")
    monkeypatch.delenv("MY_SETTING")


def test_ctrl_c(tmp_path):
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
