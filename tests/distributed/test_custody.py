"""Checkpoint custody on two ranks: the rank that saves looks, and all do the same."""

from pathlib import Path

import pytest

from .custody_worker import CASES
from .launch import Played, play_suite

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600), pytest.mark.xdist_group("distributed")]
WORKER = Path(__file__).with_name("custody_worker.py")


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Played:
    return play_suite("custody", list(CASES), tmp_path_factory.mktemp("custody"), 2, worker=WORKER)


@pytest.mark.parametrize(("name", "last_good"), [("poisoned", "checkpoint-2"), ("healthy", "checkpoint-4")])
def test_ranks_agree_about_the_last_good_checkpoint(played: Played, name: str, last_good: str):
    first, second = played.ranks(name)
    assert first["last_good"] == second["last_good"] == last_good
    assert first["events"] == ["checkpoint_nonfinite"] * len(CASES[name])
    assert second["events"] == []
    assert first["weight"] == second["weight"]
    assert first["resumed_steps"] == [1, 2, 3, 4, 5]
    assert first["kept"] == ["checkpoint-5"]
