"""Settings, decisions and the ladder."""

import dataclasses
import re

import pytest

from hf_nanguard import ArgumentError, NanGuardError
from hf_nanguard.core.settings import CHOICES, Policy, check_settings
from tests.faults import INF, NAN

BAD = {
    "mode": ["on", "", None, True, 1],
    "on_nonfinite": ["ignore", "clip", None],
    "on_loss_error": ["skip", None],
    "on_bad_input": ["observe", None],
    "on_spike": ["halt", None],
    "on_halt": ["exit", None],
    "skip_grad_norm": [0, -1.0, NAN, INF, "2.0x", True, [2.0]],
    "loss_floor": [0.0, -1e-6, NAN, INF, "low", True, None],
    "max_bad_steps": [0, -1, 1.5, "10", True, None],
    "autopsy": ["on", None, 1],
    "max_autopsies": [0, -1, 1.5, "5", True, None],
    "autopsy_seconds": [0, -1.0, NAN, INF, "long", True, None],
    "bundle_weights": ["some", None, True],
    "bundle_text": ["no", None, 0],
    "logits_mode": ["clip", None],
    "logits_clip_value": [0, -1.0, NAN, INF, "x", True, None],
    "logits_min_prob": [0.0, -1e-8, NAN, INF, "x", True, None],
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
    assert repr(value) in message
    way_out = ", ".join(CHOICES[name]) if name in CHOICES else "number|integer|True or False|patterns"
    assert re.search(way_out, message)
    assert "\n" not in message
    assert message.endswith(".")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, NanGuardError)


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_every_choice_is_taken(name):
    for value in CHOICES[name]:
        assert getattr(Policy(**{name: value}), name) == value


def test_the_documented_choices_and_defaults():
    assert CHOICES["mode"] == ("act", "observe", "off")
    assert CHOICES["on_nonfinite"] == ("drop", "skip", "repair", "floor", "halt")
    assert dataclasses.asdict(Policy()) == {
        "mode": "act", "on_nonfinite": "drop", "on_loss_error": "raise", "on_bad_input": "drop", "on_spike": "observe",
        "on_halt": "raise", "skip_grad_norm": None, "loss_floor": 1e-6, "max_bad_steps": 10,
        "autopsy": True, "max_autopsies": 5, "autopsy_seconds": 60.0, "bundle_weights": "none", "bundle_text": True,
        "logits_mode": "repair", "logits_clip_value": 30.0, "logits_min_prob": 1e-8, "min_temperature": 0.1,
        "on_bad_reward": "unscorable", "ratio_bound": 20.0, "stall_steps": 20, "activation_steps": 50,
        "activation_modules": None, "attention_steps": 0, "weight_check_steps": 100, "full_metrics": False,
    }  # fmt: skip


def test_rewind_says_why_not():
    with pytest.raises(ArgumentError, match=r"on_spike must be one of .* got 'rewind'\. .*snapshots"):
        Policy(on_spike="rewind")


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
