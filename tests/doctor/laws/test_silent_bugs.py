"""Every replanted silent bug is caught by its law, and its fixed arm keeps that law."""

import pytest

from hf_nanguard import prove

from .silent_bugs import BUGS

SERIOUS = ("warning", "error")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_silent_bug_is_caught_and_its_fix_is_not(bug, tmp_path):
    (found,) = prove(bug.build(tmp_path / "buggy", True), only=[bug.law])
    assert found.status == "broken", found.message
    assert found.severity in SERIOUS
    (sound,) = prove(bug.build(tmp_path / "fixed", False), only=[bug.law])
    assert sound.status == "held", sound.message


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_the_fixed_arm_of_a_silent_bug_keeps_every_law(bug, tmp_path):
    results = prove(bug.build(tmp_path, False))
    assert [r for r in results if r.status == "broken" and r.severity in SERIOUS] == []
