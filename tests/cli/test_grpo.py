"""`nanguard grpo` at the command line: help, and one sentence for what cannot be."""

import pytest

from hf_nanguard.cli.main import main

from ..recipes.test_sft import save_model, save_rows


def refuse(words: list[str], capsys) -> str:
    """Returns the one sentence that a command line is refused with."""
    assert main(["grpo", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1, output.err
    return output.err


def test_help_all_lists_the_flags_of_trl(capsys):
    assert main(["grpo", "--help_all"]) == 0
    told = capsys.readouterr().out
    for flag in ("--reward_funcs", "--num_generations", "--nanguard_on_bad_reward", "--preset", "--compare"):
        assert flag in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--num_generatons", "4"], ["--num_generatons", "did you mean --num_generations?"]),
        (["--num_generations", "7"], ["num_generations", "7"]),
        (["--preset", "bold"], ["--preset", "'bold'", "balanced"]),
        (["--max_length", "3"], ["--max_length"]),
        (["--reward_funcs", "bogus"], ["--reward_funcs", "'bogus'", "think_format_reward"]),
    ],
    ids=" ".join,
)
def test_bad_arguments(words, told, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refuse(words, capsys)
    assert [part for part in told if part not in error] == []


def test_data_without_prompts(tmp_path, capsys):
    model = save_model(tmp_path / "model")
    data = save_rows(tmp_path / "data", [{"text": "1+1="}])
    words = ["--model_name_or_path", model, "--dataset_name", data, "--reward_funcs", "think_format_reward"]
    error = refuse([*words, "--output_dir", str(tmp_path / "out")], capsys)
    assert "must have the column prompt" in error
    assert "has text" in error


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--loss_type", "bogus"], ["bogus"]),
        (["--use_vllm", "true"], ["vLLM"]),
        (["--per_device_train_batch_size", "64"], ["no step was taken", "--per_device_train_batch_size"]),
        (["--reward_funcs", "mine.value"], ["--reward_funcs", "'mine.value'", "3 cannot be called"]),
        (["--reward_funcs", "torn.score"], ["--reward_funcs", "'torn.score'", "torn.py, line 1"]),
        (["--reward_model_name_or_path", "/no/such"], ["/no/such"]),
    ],
    ids=" ".join,
)
def test_bad_arguments_for_data(words, told, tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text("value = 3\n", encoding="utf-8")
    (tmp_path / "torn.py").write_text("def score(:\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = save_rows(tmp_path / "data", [{"prompt": "1+1="}] * 4)
    task = ["--model_name_or_path", save_model(tmp_path / "model"), "--dataset_name", data]
    common = ["--reward_funcs", "think_format_reward", "--max_completion_length", "2", "--report_to", "none"]
    common += [
        "--max_steps",
        "2",
        "--per_device_train_batch_size",
        "8",
        "--dataloader_pin_memory",
        "false",
        "--disable_tqdm",
        "true",
    ]
    assert main(["grpo", *task, *common, *words, "--output_dir", str(tmp_path / "out")]) == 2
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("nanguard: ")
    assert [part for part in told if part not in error] == []


def test_rewards_alone_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refuse(["--reward_funcs", "think_format_reward"], capsys)
    assert "--reward_funcs must come with --dataset_name, got 'think_format_reward' alone" in error
    error = refuse(["--reward_model_name_or_path", "judge"], capsys)
    assert "--reward_model_name_or_path must come with --dataset_name, got 'judge' alone" in error
