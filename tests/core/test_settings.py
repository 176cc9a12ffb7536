"""The settings: what is allowed, and what a bad value is refused with."""

import dataclasses
import re
import subprocess
import sys

import pytest

from hf_nanguard import ArgumentError, NanGuardError
from hf_nanguard.core.settings import SETTINGS, Policy, check_settings
from hf_nanguard.plain_text import format_value
from hf_nanguard.testing import INF, NAN

BAD = {
    "mode": ["on", "", None, True, 1],
    "doctor": ["on", "raise", None, True],
    "precision": ["bf16", "off", None],
    "on_nonfinite": ["ignore", "clip", None],
    "on_loss_error": ["skip", None],
    "on_bad_input": ["observe", None],
    "on_spike": ["halt", None],
    "quarantine": ["drop", None, True],
    "on_halt": ["exit", None],
    "skip_grad_norm": [0, -1.0, NAN, INF, "2.0x", True, [2.0]],
    "loss_floor": [0.0, -1e-6, NAN, INF, 10**400, "low", True, None],
    "max_bad_steps": [0, -1, 1.5, "10", True, None],
    "max_rewinds": [-1, 1.5, "3", True, None],
    "rewind_lr_factor": [0.0, -1.0, 1.5, NAN, INF, "x", True, None],
    "snapshot_steps": [-1, 1.5, "100", True],
    "on_param_nonfinite": ["skip", None],
    "on_bad_start": ["rewind", None],
    "autopsy": ["on", None, 1],
    "max_autopsies": [0, -1, 1.5, "5", True, None],
    "autopsy_seconds": [0, -1.0, NAN, INF, "long", True, None],
    "bundle": ["no", None, 0],
    "bundle_weights": ["some", None, True],
    "bundle_text": ["no", None, 0],
    "push_to_hub": ["no", None, 0],
    "logits_mode": ["clip", None],
    "logits_clip_value": [0, -1.0, NAN, INF, "x", True, None],
    "logits_min_prob": [0.0, -1e-8, 1.5, 2, NAN, INF, "x", True, None],
    "min_temperature": [0.0, -0.1, NAN, INF, "x", True, None],
    "on_bad_reward": ["drop", None],
    "ratio_bound": [0.0, -20.0, NAN, INF, 41.0, "x", True],
    "stall_steps": [-1, 1.5, "20", True, None],
    "activation_steps": [-1, 1.5, "50", True, None],
    "activation_modules": ["", " ", "a,,b", 3, True],
    "attention_steps": [-1, 1.5, "0", True, None],
    "weight_check_steps": [-1, 1.5, "100", True, None],
    "full_metrics": ["yes", None, 1],
}


def test_every_field_is_checked():
    assert BAD.keys() == {field.name for field in dataclasses.fields(Policy)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_with_name_value_and_way_out(name, value):
    with pytest.raises(ArgumentError) as caught:
        Policy(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert format_value(value) in message
    way_out = (
        ", ".join(SETTINGS[name].choices)
        or "number above 0|integer of at least|True or False|names separated by commas"
    )
    assert re.search(way_out, message)
    assert "\n" not in message
    assert message.endswith(".")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, NanGuardError)


@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.choices])
def test_every_choice_is_taken(name):
    for value in SETTINGS[name].choices:
        assert getattr(Policy(**{name: value}), name) == value


def test_the_documented_choices_and_defaults():
    assert SETTINGS["mode"].choices == ("act", "observe", "off")
    assert SETTINGS["on_nonfinite"].choices == ("drop", "skip", "repair", "floor", "halt")
    assert dataclasses.asdict(Policy()) == {
        "mode": "act", "doctor": "warn", "precision": "keep", "on_nonfinite": "drop", "on_loss_error": "raise", "on_bad_input": "drop", "on_spike": "observe",
        "on_halt": "raise", "skip_grad_norm": None, "loss_floor": 1e-6, "max_bad_steps": 10,
        "max_rewinds": 3, "rewind_lr_factor": 1.0, "snapshot_steps": None, "on_param_nonfinite": "rewind", "on_bad_start": "halt",
        "autopsy": True, "max_autopsies": 5, "autopsy_seconds": 60.0, "quarantine": "skip", "bundle": True, "bundle_weights": "none",
        "bundle_text": True, "push_to_hub": False,
        "logits_mode": "repair", "logits_clip_value": 30.0, "logits_min_prob": 1e-8, "min_temperature": 0.1,
        "on_bad_reward": "unscorable", "ratio_bound": 20.0, "stall_steps": 20, "activation_steps": 50,
        "activation_modules": None, "attention_steps": 0, "weight_check_steps": 100, "full_metrics": False,
    }  # fmt: skip


def test_the_user_s_spelling_is_used():
    with pytest.raises(ArgumentError, match=r"^nanguard_mode must be"):
        check_settings({"mode": "on"}, "nanguard_")
    with pytest.raises(ArgumentError, match=r"nanguard_skip_grad_norm .* nanguard_mode"):
        check_settings({"mode": "observe", "skip_grad_norm": 2.0}, "nanguard_")


def test_a_threshold_that_can_never_act_is_refused():
    with pytest.raises(ArgumentError, match=r"skip_grad_norm was set to 2.0 while mode is 'observe'.*Set mode='act'"):
        Policy(mode="observe", skip_grad_norm=2.0)
    assert Policy(mode="act", skip_grad_norm=2.0).skip_grad_norm == 2.0


def test_only_act_acts():
    assert [Policy(mode=mode).acts for mode in ("act", "observe", "off")] == [True, False, False]


def test_bounds_belong_to_what_is_allowed():
    allowed = {
        "logits_min_prob": 1.0,
        "ratio_bound": 40,
        "max_bad_steps": 1,
        "stall_steps": 0,
        "skip_grad_norm": 1e-300,
    }
    assert {name: getattr(Policy(**{name: value}), name) for name, value in allowed.items()} == allowed


def test_every_number_has_a_lower_bound():
    """What is above or below it is refused with a sentence, not found out in the middle of a run."""
    numbers = [setting for setting in SETTINGS.values() if setting.value_type in (int, float)]
    assert len(numbers) > 10
    assert [setting.name for setting in numbers if not setting.bounds] == []


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("autopsy", "off", False),
        ("autopsy", " Yes ", True),
        ("autopsy", "maybe", "maybe"),
        ("max_bad_steps", "7", 7),
        ("max_bad_steps", "7.5", "7.5"),
        ("loss_floor", "1e-5", 1e-5),
        ("ratio_bound", "None", None),
        ("loss_floor", "None", "None"),
        ("mode", False, "off"),
        ("logits_mode", False, "off"),
        ("on_spike", False, False),
        ("activation_modules", "null", None),
        ("activation_modules", "*.mlp", "*.mlp"),
    ],
)
def test_text_is_read_in_the_type_of_the_setting(name, text, value):
    assert SETTINGS[name].convert(text) == value


def test_the_docstring_has_every_setting_with_its_default():
    for name, setting in SETTINGS.items():
        assert re.search(
            rf"^        {name} \(`{setting.value_type.__name__}`, \*optional\*", Policy.__doc__, flags=re.MULTILINE
        )
    assert "ratio_bound (`float`, *optional*, defaults to `20.0`):" in Policy.__doc__


def test_settings_need_only_the_standard_library():
    code = "import sys, hf_nanguard.core.settings; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
