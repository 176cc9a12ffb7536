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
