"""Every replanted silent bug is caught by its law, and its fixed arm keeps that law."""

import pytest

from hf_nanguard import prove
from hf_nanguard.doctor.laws.prove import LAWS

from .silent_bugs import BUGS

SERIOUS = ("warning", "error")
FIRST = {
    bug.law: bug for bug in reversed(BUGS)
}  # one of each law in every run of the tests, the others in the slow ones


def name(bug):
    return bug.name.replace(" ", "-")


def check_both_arms(bug, folder):
    (found,) = prove(bug.build(folder / "buggy", True), only=[bug.law])
    assert found.status == "broken", found.message
    assert found.severity in SERIOUS
    (sound,) = prove(bug.build(folder / "fixed", False), only=[bug.law])
    assert sound.status == "held", sound.message


@pytest.mark.parametrize("bug", FIRST.values(), ids=name)
def test_a_silent_bug_is_caught_and_its_fix_is_not(bug, tmp_path):
    check_both_arms(bug, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug not in FIRST.values()], ids=name)
def test_another_silent_bug_is_caught_and_its_fix_is_not(bug, tmp_path):
    check_both_arms(bug, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=name)
def test_the_fixed_arm_of_a_silent_bug_keeps_every_law(bug, tmp_path):
    results = prove(bug.build(tmp_path, False))
    assert [r for r in results if r.status == "broken" and r.severity in SERIOUS] == []


def test_every_law_has_a_bug_that_it_catches():
    assert {law.name for law in LAWS} == FIRST.keys()


def test_enough_bugs_are_from_public_reports():
    assert len([bug for bug in BUGS if bug.report]) >= 35
