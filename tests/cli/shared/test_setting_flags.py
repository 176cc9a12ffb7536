"""Settings of the guard by flag, environment and YAML: what they are, which wins, and what a bad one is told."""

import argparse
import subprocess
import sys
from dataclasses import fields

import pytest

from hf_nanguard import ArgumentError, GuardArguments
from hf_nanguard.cli.main import main
from hf_nanguard.cli.shared.setting_flags import add_flags, as_environment, gather


def test_every_setting_has_a_flag_with_its_choices_and_default():
    parser = argparse.ArgumentParser()
    add_flags(parser.add_argument_group())
    flags = {action.dest: action for action in parser._actions if action.dest != "help"}
    assert list(flags) == [field.name for field in fields(GuardArguments)]
    assert list(flags["nanguard_on_spike"].choices) == ["observe", "clip", "skip", "rewind"]
    assert "(default: observe)" in flags["nanguard_on_spike"].help
    assert vars(parser.parse_args(["--nanguard_on_spike", "clip"])) == {"nanguard_on_spike": "clip"}


def test_reading_them_imports_nothing_heavy():
    code = (
        "import sys\nfrom hf_nanguard.cli.shared.setting_flags import gather\ngather({}, {'NANGUARD_MODE': 'observe'})\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_flag_wins_over_the_environment_and_that_over_yaml(tmp_path):
    config = tmp_path / "guard.yaml"
    config.write_text("nanguard_on_spike: clip\nnanguard_max_bad_steps: 3\nnanguard_loss_floor: 1e-5\n")
    environment = {"NANGUARD_MAX_BAD_STEPS": "4", "NANGUARD_LOSS_FLOOR": "1e-4", "HOME": "elsewhere"}
    found = gather({"nanguard_loss_floor": "1e-3", "config": "x", "command": "run"}, environment, str(config))
    assert found == {"nanguard_on_spike": "clip", "nanguard_max_bad_steps": 4, "nanguard_loss_floor": 1e-3}


def test_the_environment_can_name_the_yaml(tmp_path):
    config = tmp_path / "guard.yaml"
    config.write_text("nanguard_mode: off\n")
    assert gather({}, {"NANGUARD_CONFIG": str(config)}) == {"nanguard_mode": "off"}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("nanguard_autopsy", "false", False),
        ("nanguard_autopsy", "1", True),
        ("nanguard_max_bad_steps", "7", 7),
        ("nanguard_skip_grad_norm", "2", 2.0),
        ("nanguard_ratio_bound", "None", None),
        ("nanguard_activation_modules", "*.mlp", "*.mlp"),
    ],
)
def test_values_have_the_type_of_the_field(name, text, value):
    assert gather({name: text}, {}) == {name: value}


def test_settings_pass_through_the_environment_as_they_are():
    given = {
        "nanguard_autopsy": False,
        "nanguard_ratio_bound": None,
        "nanguard_loss_floor": 1e-7,
        "nanguard_mode": "off",
    }
    assert gather({}, as_environment(given)) == given


@pytest.mark.parametrize(
    ("flags", "environment", "told"),
    [
        ({"nanguard_on_spike": "jump"}, {}, ["--nanguard_on_spike", "'jump'", "observe, clip, skip"]),
        ({"nanguard_autopsy": "maybe"}, {}, ["--nanguard_autopsy", "'maybe'", "True or False"]),
        ({"nanguard_max_bad_steps": "2.5"}, {}, ["--nanguard_max_bad_steps", "'2.5'", "integer"]),
        ({"nanguard_loss_floor": "tiny"}, {}, ["--nanguard_loss_floor", "'tiny'", "number"]),
        (
            {},
            {"NANGUARD_ON_SPIKE": "jump"},
            ["environment variable NANGUARD_ON_SPIKE", "'jump'", "observe, clip, skip"],
        ),
        ({"nanguard_logits_min_prob": "2"}, {}, ["--nanguard_logits_min_prob", "2.0", "at most 1"]),
        ({}, {"NANGUARD_LOGITS_MIN_PROB": "2"}, ["environment variable NANGUARD_LOGITS_MIN_PROB", "2.0", "at most 1"]),
        ({}, {"NANGUARD_LOSS_FLOOR": "1e999"}, ["environment variable NANGUARD_LOSS_FLOOR", "inf", "a finite number"]),
        ({}, {"NANGUARD_MIN_TEMPERATURE": "nan"}, ["environment variable NANGUARD_MIN_TEMPERATURE", "nan", "finite"]),
        (
            {},
            {"NANGUARD_MAX_BAD_STEPS": "9" * 5000},
            ["environment variable NANGUARD_MAX_BAD_STEPS", "999...", "integer"],
        ),
        ({}, {"NANGUARD_RATIO_BOUND": "41"}, ["environment variable NANGUARD_RATIO_BOUND", "41.0", "at most 40"]),
        ({}, {"NANGUARD_ON_SPIEK": "skip"}, ["NANGUARD_ON_SPIEK", "Did you mean NANGUARD_ON_SPIKE?"]),
        ({"nanguard_skip_grad_norm": "2"}, {"NANGUARD_MODE": "observe"}, ["nanguard_skip_grad_norm", "nanguard_mode"]),
    ],
)
def test_bad_settings(flags, environment, told):
    with pytest.raises(ArgumentError) as error:
        gather(flags, environment)
    assert [part for part in told if part not in str(error.value)] == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nanguard_on_spike: jump\n", ["guard.yaml: nanguard_on_spike", "'jump'"]),
        ("nanguard_logits_min_prob: 2\n", ["guard.yaml: nanguard_logits_min_prob", "2.", "at most 1"]),
        ("nanguard_on_spiek: skip\n", ["nanguard_on_spiek in", "Did you mean nanguard_on_spike?"]),
        ("NANGUARD_MODE: act\n", ["NANGUARD_MODE in", "Did you mean nanguard_mode?"]),
        ("NANGUARD_MODE: act\n", ["NANGUARD_MODE in", "guard.yaml is not a setting of the guard"]),
        ("3: 4\n", ["3 in", "guard.yaml is not a setting of the guard"]),
        ("learning_rate: 1\n", ["learning_rate in", "guard.yaml is not a setting of the guard"]),
        ("- a\n- b\n", ["names and values"]),
        ("nanguard_mode: [act\n", ["must be a YAML file"]),
        (b"\xff\xfe\x00", ["readable"]),
        (None, ["readable", "No such file"]),
    ],
)
def test_bad_yaml(tmp_path, text, told):
    config = tmp_path / "guard.yaml"
    if text is not None:
        config.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ArgumentError) as error:
        gather({}, {}, str(config))
    assert "\n" not in str(error.value)
    assert [part for part in told if part not in str(error.value)] == []


def test_a_file_that_the_environment_names_is_complained_of_in_its_name():
    with pytest.raises(ArgumentError, match=r"^NANGUARD_CONFIG must be a readable YAML file.* 'missing\.yaml'"):
        gather({}, {"NANGUARD_CONFIG": "missing.yaml"})


def test_a_value_out_of_bounds_ends_the_command_with_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("NANGUARD_LOGITS_MIN_PROB", "2")
    assert main(["run", "train.py"]) == 2
    expected = "environment variable NANGUARD_LOGITS_MIN_PROB must be a finite number above 0 and at most 1, got 2.0."
    assert capsys.readouterr().err == f"nanguard: {expected}\n"
