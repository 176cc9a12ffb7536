"""The parser of recipes: which value holds, and one sentence for what cannot be."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from hf_nanguard import ArgumentError, GuardedTrainingArguments
from hf_nanguard.examples.recipe import presets as preset
from hf_nanguard.examples.recipe.guarded_run import run_script
from hf_nanguard.examples.recipe.recipe_parser import RecipeParser


@dataclass
class Script:
    """Arguments of a recipe."""

    plant: Literal["this", "none"] = field(default="this", metadata={"help": "What to plant."})
    weight: float = field(default=1.0, metadata={"help": "A weight."})

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"--weight must not be negative, got {self.weight}.")


TYPES = [Script, GuardedTrainingArguments]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The output folder is made, so it must be below the test's own."""
    monkeypatch.chdir(tmp_path)


DEFAULTS = {"output_dir": "runs/x", "max_steps": 7}


def make_parser(kind: str = "sft", kept: tuple[str, ...] = ()) -> RecipeParser:
    return RecipeParser(TYPES, kind, DEFAULTS, kept=kept, description="A recipe.")


def parse(*words: str, kind: str = "sft"):
    """Returns what the recipe's own dataclass and the training arguments hold."""
    _, *parsed = make_parser(kind).parse(words)
    return parsed


def test_which_value_holds(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "careful.yaml").write_text("max_steps: 8\nweight: 2.0\nlearning_rate: 1e-6\nseed: 1\n")
    monkeypatch.setattr(preset, "find_configs", lambda: tmp_path)
    file = tmp_path / "own.yaml"
    file.write_text("weight: 3.0\nseed: 2\nnanguard_mode: off\n")
    script, args = parse("--preset", "careful", "--config", str(file), "--seed", "3", kind="mine")
    assert (args.output_dir, args.max_steps, args.learning_rate) == ("runs/x", 8, 1e-6)
    assert (script.weight, args.seed, args.nanguard_mode, script.plant) == (3.0, 3, "off", "this")


def test_a_preset_leaves_alone_what_it_should_and_says_so(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "careful.yaml").write_text("max_steps: 8\nweight: 2.0\n")
    monkeypatch.setattr(preset, "find_configs", lambda: tmp_path)
    parser = make_parser("mine", kept=("weight", "seed"))
    _, script, args = parser.parse(["--preset", "careful"])
    assert (script.weight, args.max_steps) == (1.0, 8)
    [note] = parser.notes
    assert "so it keeps its weight of 1.0; the preset's 2.0 is for pretrained models" in note


def test_defaults_of_the_recipe():
    script, args = parse()
    assert (script, args.max_steps, args.learning_rate) == (Script(), 7, 5e-5)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--no_such", "1"], "--no_such"),
        (["--max_step", "1"], "--max_step"),  # no abbreviations: a new flag would change what they mean
        (["--plant", "that"], "'that'"),
        (["--weight", "heavy"], "'heavy'"),
        (["--weight", "-1"], "-1.0"),
        (["--nanguard_mode", "maybe"], "'maybe'"),
        (["--eval_strategy", "sometimes"], "sometimes"),
        (["--config"], "--config"),
        (["--config", "no_such.yaml"], "no_such.yaml"),
        (["--preset", "bold"], "--preset"),
    ],
)
def test_one_sentence_for_what_cannot_be(words, named, capsys):
    assert run_script(make_parser, lambda *parsed: [], words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert named in printed.err
    assert printed.err.count("\n") == 1


def test_a_file_with_a_name_nobody_knows(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("wieght: 3.0\n")
    with pytest.raises(ArgumentError, match="wieght is no argument"):
        parse("--config", str(file))


def test_a_file_is_read_as_flags_are(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(
        "output_dir: 3\nsave_strategy: no\neval_strategy: off\nwarmup_steps: 2\nlabel_names: mine\nseed: '5'\n"
        "hub_model_id:\nlr_scheduler_kwargs: {a: 1}\nresume_from_checkpoint: true\nfp16: 0\n"
    )
    _, args = parse("--config", str(file))
    assert (args.output_dir, args.save_strategy, args.eval_strategy, args.label_names) == ("3", "no", "no", ["mine"])
    assert (args.seed, args.hub_model_id, args.lr_scheduler_kwargs) == (5, None, {"a": 1})
    assert (args.resume_from_checkpoint, args.fp16) == (True, False)


@pytest.mark.parametrize(
    "line",
    ["weight:", "weight: [1.0]", "weight: true", "weight: {a: 1}", "seed: 1.5", "plant: that", "fp16: maybe"],
)
def test_a_file_with_a_value_that_cannot_be(line, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(line)
    with pytest.raises(ArgumentError, match=rf"own\.yaml: {line.split(':')[0]} cannot be "):
        parse("--config", str(file))


@pytest.mark.parametrize("variables", ["[1]", "{A=B: 1}", '{"A\\0": 1}', '{A: "\\0"}', "{'': 1}"])
def test_variables_that_cannot_be_set(variables, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(f"env: {variables}\n")
    with pytest.raises(ArgumentError, match=r"own\.yaml: env (must contain|cannot set) ") as error:
        parse("--config", str(file))
    assert str(error.value).isprintable()


def test_a_long_value_is_cut(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(f"seed: [{'1, ' * 3000}]\n")
    with pytest.raises(ArgumentError, match="seed cannot be") as error:
        parse("--config", str(file))
    assert len(str(error.value)) < 400


def test_other_ranks_of_a_launcher_are_silent(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_script(make_parser, lambda *parsed: [], ["--no_such"]) == 2
    assert capsys.readouterr().err == ""


def test_help_tells_of_script_and_guard(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "A recipe." in printed
    assert all(flag in printed for flag in ("--plant", "--nanguard_mode", "--config", "What to plant."))
