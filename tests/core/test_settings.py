"""Settings, decisions and the ladder."""

import dataclasses
import re

import pytest

from hf_nanguard import ArgumentError, NanGuardError
from hf_nanguard.core.robust_window import RobustWindow
from hf_nanguard.core.settings import CHOICES, HEALTHY, Decision, Escalation, Policy, StepAction, check_settings, decide
from hf_nanguard.core.vocabulary import Signal
from hf_nanguard.testing import INF, NAN

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


def seen(value=1.0, count=60):
    window = RobustWindow()
    for _ in range(count):
        window.add(value)
    return window


STEP, REDO, SKIP, CLIP = StepAction.STEP, StepAction.REDO, StepAction.SKIP, StepAction.CLIP
GRAD, LOSS, SPIKE = Signal.GRAD_NONFINITE, Signal.LOSS_NONFINITE, Signal.GRAD_SPIKE


@pytest.mark.parametrize(
    ("losses", "norm", "settings", "course", "signal"),
    [
        ([1.0], 1.0, {}, STEP, None),
        ([], 1.0, {}, STEP, None),
        ([0.0], 0.0, {}, STEP, None),
        ([1.0], NAN, {}, REDO, GRAD),
        ([1.0], INF, {}, REDO, GRAD),
        ([], NAN, {}, REDO, GRAD),
        ([NAN], NAN, {}, REDO, LOSS),
        ([1.0, INF], INF, {}, REDO, LOSS),
        ([NAN], NAN, {"on_nonfinite": "floor"}, REDO, LOSS),
        ([NAN], NAN, {"on_nonfinite": "skip"}, SKIP, LOSS),
        ([1.0], NAN, {"on_nonfinite": "repair"}, StepAction.REPAIR, GRAD),
        ([1.0], NAN, {"on_nonfinite": "halt"}, StepAction.HALT, GRAD),
        ([NAN], NAN, {"mode": "observe"}, STEP, LOSS),
        ([1.0], NAN, {"mode": "observe", "on_nonfinite": "halt"}, STEP, GRAD),
        # news of one rank only: never more than observed
        ([NAN], 1.0, {}, STEP, LOSS),
        ([NAN], 1.0, {"on_nonfinite": "halt"}, STEP, LOSS),
        # and never less than what the norm, which all ranks share, says
        ([NAN], 1e6, {"skip_grad_norm": 2.0}, SKIP, SPIKE),
        ([NAN], 99.0, {"on_spike": "clip"}, CLIP, SPIKE),
        ([NAN], 99.0, {"on_spike": "skip"}, SKIP, SPIKE),
        ([1.0], 2.0, {"skip_grad_norm": 2.0}, STEP, None),
        ([1.0], 2.1, {"skip_grad_norm": 2.0}, SKIP, SPIKE),
        ([1.0], NAN, {"skip_grad_norm": 2.0}, REDO, GRAD),
        ([1.0], 99.0, {}, STEP, SPIKE),
        ([1.0], 99.0, {"on_spike": "clip"}, CLIP, SPIKE),
        ([1.0], 99.0, {"on_spike": "skip"}, SKIP, SPIKE),
        ([1.0], 99.0, {"on_spike": "skip", "mode": "observe"}, STEP, SPIKE),
        ([1.0], 99.0, {"on_spike": "clip", "skip_grad_norm": 50.0}, SKIP, SPIKE),
        ([1.0], 4.0, {"on_spike": "skip"}, STEP, None),
    ],
)  # fmt: skip
def test_the_decision_table(losses, norm, settings, course, signal):
    assert decide(losses, norm, Policy(**settings), seen()) == Decision(course, signal)


def test_healthy_is_step_without_a_signal():
    assert Decision(StepAction.STEP, None) == HEALTHY


def test_nothing_but_step_depends_on_this_rank_s_losses():
    """Ranks see different losses and the same norm: they must take the same course."""
    for norm in (0.0, 1.0, 99.0, NAN, INF):
        for settings in ({}, {"on_nonfinite": "skip"}, {"on_spike": "skip"}, {"skip_grad_norm": 0.5}):
            seen_here = ([1.0], [NAN], [INF, 1.0])
            courses = {decide(losses, norm, Policy(**settings), seen()).course for losses in seen_here}
            assert len(courses) == 1, (norm, settings, courses)


def test_the_ladder_counts_only_bad_steps_in_a_row():
    escalation = Escalation(3)
    assert [escalation.bad(), escalation.bad()] == [False, False]
    escalation.healthy()
    assert [escalation.bad(), escalation.bad(), escalation.bad()] == [False, False, True]


def test_a_ladder_of_one_halts_at_once():
    assert Escalation(1).bad()
