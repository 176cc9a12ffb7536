"""What every recipe of a field report on the plain `Trainer` does alike."""

import pytest

from hf_nanguard.examples import run_script
from hf_nanguard.hf.named_terms import watch_tensor, weigh_term
from recipes import diffusion, distill, latent

from ...recipes.running import find_exit_code, find_outcomes
from ...trainers import build

RECIPES = {
    "latent": (latent, 41, ["--num_rows", "24", "--max_steps", "4"]),
    "diffusion": (diffusion, 14, ["--num_rows", "40", "--max_steps", "4"]),
}


@pytest.mark.parametrize("name", RECIPES)
def test_healthy_data_is_silent(name, tmp_path):
    recipe, _, words = RECIPES[name]
    common = ["--plant", "none", "--logging_steps", "1", "--output_dir", str(tmp_path)]
    stock, guarded = find_outcomes(recipe, *words, *common)
    assert guarded.losses == stock.losses
    assert (guarded.events, guarded.bad_weights) == ([], {})


@pytest.mark.parametrize(
    ("recipe", "words", "sentence"),
    [
        (latent, ["--num_rows", "3"], "--num_rows must be more than 21, got 3."),
        (diffusion, ["--num_levels", "1"], "--num_levels must be at least 2, got 1."),
        (latent, ["--learning_rate", "-1"], "--learning_rate must be finite and not negative, got -1.0."),
        (
            diffusion,
            ["--gradient_accumulation_steps", "0"],
            "--gradient_accumulation_steps must be at least 1, got 0.",
        ),
        (latent, ["--max_steps", "-5"], "--max_steps must be at least 1, or -1 to train --num_train_epochs, got -5."),
        (latent, ["--max_steps", "0"], "--max_steps must be at least 1, or -1 to train --num_train_epochs, got 0."),
        (latent, ["--num_train_epochs", "0"], "--num_train_epochs must be more than 0 and finite, got 0.0."),
        (distill, ["--temperature", "0"], "--temperature must be positive and finite, got 0.0."),
        (distill, ["--learning_rate", "1e-3"], "Use --student_lr instead of --learning_rate here, got 0.001."),
        (
            distill,
            ["--train_file", "x"],
            "--model_name_or_path, --teacher_name_or_path and --train_file must be given together.",
        ),
        (
            distill,
            [
                "--plant",
                "none",
                "--compare",
                "false",
                "--model_name_or_path",
                "a",
                "--teacher_name_or_path",
                "b",
                "--train_file",
                "nothing.txt",
            ],
            "--train_file must be a text file, got 'nothing.txt'. There is no such file.",
        ),
    ],
)
def test_a_bad_value_is_one_sentence(recipe, words, sentence, capsys):
    assert find_exit_code(recipe, *words) == 2
    assert capsys.readouterr().err == f"nanguard: {sentence}\n"


def test_an_output_folder_that_cannot_be(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    assert find_exit_code(latent, "--output_dir", str(file / "below")) == 2
    assert "--output_dir must be a writable folder" in capsys.readouterr().err


def test_a_run_is_resumed(tmp_path, capsys):
    words = [*RECIPES["latent"][2], "--compare", "false", "--plant", "none", "--logging_steps", "1"]
    [whole] = find_outcomes(
        latent, *words, "--save_strategy", "steps", "--save_steps", "2", "--output_dir", str(tmp_path)
    )
    checkpoint = ["--resume_from_checkpoint", str(tmp_path / "checkpoint-2"), "--output_dir", str(tmp_path / "resumed")]
    [resumed] = find_outcomes(latent, *words, *checkpoint)
    assert (resumed.losses, resumed.figures) == (whole.losses, whole.figures)
    assert capsys.readouterr().out.count("'loss': ") == 4 + 2  # the first two are those of the checkpoint


def test_ctrl_c_is_told_without_a_traceback(tmp_path, capsys):
    def main(*parsed):
        raise KeyboardInterrupt

    assert run_script(latent.make_parser, main, ["--output_dir", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "nanguard: stopped by Ctrl-C; all files written so far are complete.\n"


def test_an_unknown_flag_or_name_in_a_file_comes_with_the_nearest(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("learning_rat: 1.0e-3\n", encoding="utf-8")
    for words in (["--learning_rat", "1"], ["--config", str(tmp_path / "mine.yaml")]):
        assert find_exit_code(latent, *words) == 2
        error = capsys.readouterr().err
        assert "did you mean" in error
        assert "learning_rate?" in error
        assert error.count("\n") == 1


def test_a_value_in_a_file_is_checked_like_a_flag(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("max_steps: many\n", encoding="utf-8")
    assert find_exit_code(latent, "--config", str(tmp_path / "mine.yaml")) == 2
    assert "max_steps cannot be 'many'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_as_it_comes(name, tmp_path, monkeypatch, capsys):
    recipe, num_tensors, _ = RECIPES[name]
    monkeypatch.chdir(tmp_path)
    assert find_exit_code(recipe) == 0
    printed = capsys.readouterr().out
    assert f"NOT FINITE: {num_tensors} of {num_tensors} tensors" in printed
    assert f"events of the guarded run: runs/{name}/guarded/nanguard/events.jsonl" in printed


def test_terms_are_named_only_under_guard(tmp_path):
    class TwoTerms(latent.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs)
            watch_tensor(self, "loss as it is", loss)
            return weigh_term(self, "whole", loss, 0.5) + weigh_term(self, "half", loss / 2)

    rows = {}
    for guard in (False, True):
        trainer = build("plain", tmp_path / str(guard), trainer_class=TwoTerms, guard=guard)
        trainer.train()
        rows[guard] = [row for row in trainer.state.log_history if "loss" in row]
    named = {guard: {key for row in mine for key in row if "/term/" in key} for guard, mine in rows.items()}
    assert named == {False: set(), True: {"nanguard/term/whole", "nanguard/term/half"}}
    assert [row["loss"] for row in rows[False]] == [row["loss"] for row in rows[True]]
