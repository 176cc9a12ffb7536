"""Weights of a user's model: pickles are refused with a sentence and never opened, unless a flag allows them."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_nanguard.cli.main import main
from recipes import distill
from tests.recipes.running import find_exit_code
from tests.recipes.test_sft import save_model, save_rows


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def as_pickle(model: Path, content: object = None) -> str:
    """Replaces the safetensors of a model by a pickle, of the same weights by default."""
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    file = model / "pytorch_model.bin"
    torch.save(weights, file) if content is None else file.write_bytes(pickle.dumps(content))
    return str(model)


def words_for(command: str, tmp_path: Path, flag: str, pickled: str) -> list[str]:
    sound = save_model(tmp_path / "sound")
    rows = [{"prompt": "1+1=", "completion": "2"}] * 4
    named = {
        "--model_name_or_path": sound, "--dataset_name": save_rows(tmp_path / "data", rows),
        "--output_dir": str(tmp_path / "out"), "--disable_tqdm": "true", flag: pickled,
    }  # fmt: skip
    return [command, *(word for item in named.items() for word in item)]


@pytest.mark.parametrize(
    ("command", "flag"),
    [("sft", "--model_name_or_path"), ("grpo", "--model_name_or_path"), ("grpo", "--reward_model_name_or_path")],
)
def test_a_pickle_is_refused_and_not_opened(command, flag, tmp_path, capsys):
    save_model(tmp_path / "model")
    pickled = as_pickle(tmp_path / "model", Payload(tmp_path / "executed"))
    words = words_for(command, tmp_path, flag, pickled)
    assert main(words) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    expected = f"{flag} must contain safetensors, got {pickled!r}, where pytorch_model.bin is a pickle, which can run any code."
    assert expected in output.err
    assert "--allow_pickle" in output.err
    assert not (tmp_path / "executed").exists()


def test_safetensors_beside_a_pickle_do_not_make_it_load(tmp_path, capsys):
    """Only the name of the pickle is one that transformers looks for."""
    save_model(tmp_path / "model")
    pickled = as_pickle(tmp_path / "model", Payload(tmp_path / "executed"))
    (tmp_path / "model" / "other.safetensors").touch()
    assert main(words_for("sft", tmp_path, "--model_name_or_path", pickled)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "model.safetensors" in error
    assert not (tmp_path / "executed").exists()


def test_a_flag_allows_pickles(tmp_path):
    save_model(tmp_path / "model")
    words = words_for("sft", tmp_path, "--model_name_or_path", as_pickle(tmp_path / "model"))
    few = ["--max_steps", "1", "--per_device_train_batch_size", "2", "--bf16", "false", "--save_strategy", "no"]
    assert main([*words, *few, "--report_to", "none", "--allow_pickle"]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_recipe_of_distillation_refuses_them_too(tmp_path, capsys):
    save_model(tmp_path / "model")
    sound, pickled = save_model(tmp_path / "sound"), as_pickle(tmp_path / "model", Payload(tmp_path / "executed"))
    (tmp_path / "texts.txt").write_text("a\nb\n")
    for student, teacher, flag in ((pickled, sound, "--model"), (sound, pickled, "--teacher")):
        words = ["--plant", "none", "--model_name_or_path", student, "--teacher_name_or_path", teacher]
        words += ["--train_file", str(tmp_path / "texts.txt"), "--output_dir", str(tmp_path / "out")]
        assert find_exit_code(distill, *words) == 2
        assert f"{flag}_name_or_path must contain safetensors" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()
