"""recipes/grpo_vlm.py: a broken picture ends the stock run and costs the guarded one its completions."""

import importlib.util
import sys
from pathlib import Path

import pytest

from hf_nanguard.examples.tasks import pictures as picture
from hf_nanguard.report.run_files import read_jsonl

from .running import find_exit_code
from .test_sft import sections

ROOT = Path(__file__).parent.parent.parent
SHORT = ["--num_rows", "8", "--max_steps", "5", "--per_device_train_batch_size", "16", "--disable_tqdm", "true"]


@pytest.fixture
def recipe(monkeypatch):
    spec = importlib.util.spec_from_file_location("grpo_vlm", ROOT / "recipes" / "grpo_vlm.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "grpo_vlm", module)  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_stock_and_guarded_on_a_broken_picture(recipe, tmp_path, capsys):
    assert find_exit_code(recipe, *SHORT, "--output_dir", str(tmp_path)) == 0
    stock, guarded = sections(capsys.readouterr().out)
    assert "ENDED by RuntimeError: probability tensor" in stock["run"]
    assert "ENDED" not in guarded["run"]
    assert "5 steps" in guarded["run"]
    assert guarded["weights"] == "all finite"
    events = list(read_jsonl(tmp_path / "guarded" / "nanguard" / "events.jsonl"))
    assert {(event["signal"], event["action"]) for event in events} == {("logits_nonfinite", "dropped")}
    assert {row for event in events for row in event["culprit"]["rows"]} == {recipe.BAD_ROW}


def test_no_comparison_among_several_processes(recipe, tmp_path, capsys, monkeypatch):
    """The stock run would die on one of them and leave the others waiting."""
    monkeypatch.setattr(recipe.GuardedGRPOConfig, "world_size", 2)
    assert find_exit_code(recipe, *SHORT, "--output_dir", str(tmp_path)) == 2
    assert "--compare must be false on several processes, got 2" in capsys.readouterr().err


def test_whole_pictures_are_silent(recipe, tmp_path, capsys):
    words = [*SHORT, "--plant", "none", "--compare", "false", "--preset", "balanced", "--max_steps", "2"]
    assert find_exit_code(recipe, *words, "--output_dir", str(tmp_path)) == 0
    assert not (tmp_path / "nanguard" / "events.jsonl").exists()
    assert "none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--num_rows", "3"], "--num_rows"), (["--plant", "pixel"], "'pixel'"), (["--bogus", "1"], "--bogus")],
)
def test_bad_arguments(recipe, words, told, capsys):
    assert find_exit_code(recipe, *words) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_answers_are_graded():
    said = ["bright", "bright dark", "dark", "it", ""]
    completions = [[{"role": "assistant", "content": text}] for text in said]
    rewards = picture.reward_answer(completions, ["bright"] * len(said))
    assert rewards[0] == 1.0
    assert rewards[0] > rewards[1] > rewards[2] > rewards[3] == rewards[4] == 0.0
