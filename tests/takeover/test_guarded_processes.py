"""The environment that makes Python processes guard their trainers, and what is read from it."""

import json
import os

import pytest

from hf_nanguard import ArgumentError
from hf_nanguard.takeover.guarded_processes import STARTUP, VARIABLE, build_environment, read_passed, say


def test_settings_are_passed_on_in_their_types():
    settings = {"nanguard_mode": "observe", "nanguard_max_bad_steps": 3, "nanguard_skip_grad_norm": None}
    environment = build_environment({"A": "1"}, settings, True)
    assert environment.keys() == {"A", "PYTHONPATH", VARIABLE}
    assert environment["PYTHONPATH"] == STARTUP
    assert read_passed(environment[VARIABLE]) == {"settings": settings, "full_traceback": True}
    assert environment[VARIABLE].split(" ")[0] == str(os.getpid())


def test_a_run_inside_a_run_has_one_startup_folder():
    outer = build_environment({"PYTHONPATH": os.pathsep.join(["a", "", "b"])}, {"nanguard_mode": "off"}, False)
    inner = build_environment(outer, {"nanguard_mode": "act"}, False)
    assert inner["PYTHONPATH"].split(os.pathsep) == [STARTUP, "a", "", "b"]
    assert read_passed(inner[VARIABLE])["settings"] == {"nanguard_mode": "act"}


@pytest.mark.parametrize(
    "passed", ["", "1", "1 {", "1 []", "1 7", '1 {"settings": 7}', '1 {"settings": {"other": 1}}', '1 {"settings": {}}']
)
def test_a_damaged_variable(passed):
    with pytest.raises(ArgumentError, match=f"^{VARIABLE} is not what"):
        read_passed(passed)


def test_settings_are_checked_again():
    with pytest.raises(ArgumentError, match="nanguard_logits_min_prob must be"):
        read_passed(f"1 {json.dumps({'settings': {'nanguard_logits_min_prob': 2}, 'full_traceback': False})}")


def test_messages_cannot_steer_a_terminal(capsys):
    say("a\x1b[2Jb\rc")
    assert capsys.readouterr().err == "nanguard: a [2Jb c\n"
