"""A term of the loss that fails on one of two ranks is dropped there, a redo that fails on one skips the step on both (L4), and a
part of the guard that fails on one changes nothing (L9)."""

from pathlib import Path

import pytest

from .launch import Played, play_suite
from .term_worker import BAD_PLACE, BAD_STEP, BROKEN, CASES, SKIPPED, UNREPEATABLE

# One worker for all of them, so that a suite is played once and never beside another.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600), pytest.mark.xdist_group("distributed")]
WORKER = Path(__file__).with_name("term_worker.py")


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Played:
    return play_suite("terms", list(CASES), tmp_path_factory.mktemp("terms"), 2, worker=WORKER)


@pytest.mark.parametrize("case", ["shift", "value", "slope"])
def test_the_others_go_on_and_all_agree(played: Played, case: str):
    ranks = played.ranks(case)
    expected = played.ranks("absent")[0]["weights"]
    assert [said["weights"] for said in ranks] == [expected, expected]
    event = [BAD_STEP, BAD_PLACE, 1, "dropped", "aux"]
    assert ranks[1]["events"] == [event]
    assert ranks[0]["events"] == ([] if case == "shift" else [event]), "rank 0 hears of every decision taken together"
    assert [said["dropped"] for said in ranks] == [0, 0]


def test_a_healthy_run_is_another_and_silent(played: Played):
    ranks = played.ranks("healthy")
    assert ranks[0]["weights"] == ranks[1]["weights"] != played.ranks("absent")[0]["weights"]
    assert [said["events"] for said in ranks] == [[], []]


def test_a_redo_that_fails_on_one_rank_makes_all_skip(played: Played):
    ranks = played.ranks(UNREPEATABLE)
    expected = played.ranks(SKIPPED)[0]["weights"]
    assert [said["weights"] for said in ranks] == [expected, expected]
    failed, skipped = ranks[1]["signals"]
    assert failed[:3] == ["guard_failed", "observed", 1]
    assert "MemoryError" in failed[3]
    assert skipped[:2] == ["loss_nonfinite", "skipped"]
    assert failed[3] in skipped[3]
    assert ranks[0]["signals"] == [skipped], "rank 0 hears of every decision taken together"


@pytest.mark.parametrize("case", BROKEN)
def test_a_part_of_the_guard_that_fails_on_one_rank_changes_nothing(played: Played, case: str):
    ranks = played.ranks(case)
    expected = played.ranks("healthy")[0]["weights"]
    assert [said["weights"] for said in ranks] == [expected, expected]
    assert ranks[0]["signals"] == []
    assert ranks[1]["signals"]
    assert {(signal, action) for signal, action, *_ in ranks[1]["signals"]} == {("guard_failed", "observed")}
