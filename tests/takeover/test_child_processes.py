"""Children of a guarded run get its settings, and report to every run that they are part of."""

import json
import os
from pathlib import Path

from hf_nanguard.takeover.child_processes import STARTUP, VARIABLE, guard_children, mark_built


def test_settings_are_passed_on_in_their_types_and_the_environment_is_restored(monkeypatch):
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.setenv("REMOVED", "before")
    before = dict(os.environ)
    settings = {"nanguard_mode": "observe", "nanguard_max_bad_steps": 3, "nanguard_skip_grad_norm": None}
    with guard_children(settings, {"KEPT": "inside", "REMOVED": None}):
        assert json.loads(os.environ[VARIABLE])["settings"] == settings
        assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == STARTUP
        assert (os.environ["KEPT"], "REMOVED" in os.environ) == ("inside", False)
    assert dict(os.environ) == before


def test_a_trainer_of_an_inner_run_counts_for_the_outer_run_too():
    with guard_children({}, {}) as outer, guard_children({}, {}) as inner:
        assert [os.listdir(folder) for folder in inner] == [[], []]
        mark_built(inner)
        assert inner[1:] == outer
        assert [os.listdir(folder) for folder in inner] == [[str(os.getpid())]] * 2
    assert not any(Path(folder).exists() for folder in inner)
    mark_built(inner)  # a process may outlive the run that started it
    assert not any(Path(folder).exists() for folder in inner)
