"""`nanguard grpo` and recipes/grpo.py: the reward rises, rewards are found by name, a planted failure is survived."""

import pytest

from hf_nanguard.cli.main import main
from hf_nanguard.examples.tasks.sums import build_reward, build_tokenizer

from .test_sft import QUIET, check_silent, read_section, save_model, save_rows, sections


def test_the_reward_rises(tmp_path, capsys):
    assert main(["grpo", "--max_steps", "60", "--output_dir", str(tmp_path), *QUIET]) == 0
    told = capsys.readouterr().out
    figures = read_section(told, "guarded")
    assert float(figures["mean reward, last"]) > 2 * float(figures["mean reward, first"])
    check_silent(tmp_path, told)


def test_stock_and_guarded_when_scores_are_nan(tmp_path, capsys):
    assert main(["grpo", "--compare", "--max_steps", "12", "--output_dir", str(tmp_path), *QUIET]) == 0
    stock, guarded = sections(capsys.readouterr().out)
    assert "ENDED by RuntimeError: probability tensor" in stock["run"]
    assert "4 steps" in stock["run"]
    assert "ENDED" not in guarded["run"]
    assert "12 steps" in guarded["run"]
    assert guarded["weights"] == "all finite"
    assert guarded["events"] == "1 logits_nonfinite dropped"


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_prompts_and_a_reward_of_the_user(lora, tmp_path, capsys, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def score(completions, **kwargs):\n    return [float(len(text)) for text in completions]\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = save_model(tmp_path / "model")
    data = save_rows(tmp_path / "data", [{"prompt": f"{i % 5}+1="} for i in range(16)])
    words = [
        "--model_name_or_path", model, "--dataset_name", data, "--reward_funcs", "my_rewards.score", "--max_steps", "2",
        "--max_completion_length", "3", "--dataloader_pin_memory", "false", "--logging_steps", "1", *QUIET,
    ]  # fmt: skip
    assert main(["grpo", *words, *(["--use_peft"] if lora else []), "--output_dir", str(tmp_path / "out")]) == 0
    assert "mean reward, first " in capsys.readouterr().out
    assert (tmp_path / "out" / ("adapter_model.safetensors" if lora else "model.safetensors")).is_file()


def test_a_model_that_says_more_than_a_number_is_scored_by_its_last():
    tokenizer = build_tokenizer()
    said = ["7", "3+4=7", "3+4=8", "+", "7"]
    ids = [[tokenizer.eos_token_id]] * 4 + [[tokenizer.pad_token_id]]
    rewards = build_reward(tokenizer)(completions=said, completion_ids=ids, answer=["7"] * 5)
    assert rewards[:2] == [1.0, 1.0]
    assert rewards[3] == 0.0
    assert 1.0 > rewards[4] > rewards[2] > 0.0


def test_rewards_need_data_and_data_need_rewards(tmp_path, capsys):
    data = save_rows(tmp_path / "data", [{"prompt": "1+1="}] * 8)
    model = save_model(tmp_path / "model")
    out = ["--output_dir", str(tmp_path / "out")]
    assert main(["grpo", "--model_name_or_path", model, "--dataset_name", data, *out]) == 2
    assert "--reward_funcs must be given with a dataset" in capsys.readouterr().err
    assert main(["grpo", "--reward_funcs", "think_format_reward", *out]) == 2
    assert "--reward_funcs must come with --dataset_name" in capsys.readouterr().err
    words = ["--model_name_or_path", model, "--dataset_name", data, "--reward_funcs", "no_such.score", *out]
    assert main(["grpo", *words]) == 2
    assert "'no_such.score'" in capsys.readouterr().err
