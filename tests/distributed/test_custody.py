"""Checkpoint custody on two ranks: the rank that saves looks, and all do the same."""

from pathlib import Path

import pytest

from .custody_worker import BAD_STARTS, CASES, SHARDED
from .launch import Played, play_suite

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600), pytest.mark.xdist_group("distributed")]
WORKER = Path(__file__).with_name("custody_worker.py")


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Played:
    return play_suite("custody", [*CASES, *BAD_STARTS, SHARDED], tmp_path_factory.mktemp("custody"), 2, worker=WORKER)


@pytest.mark.parametrize(("name", "last_good"), [("poisoned", "checkpoint-2"), ("healthy", "checkpoint-4")])
def test_ranks_agree_about_the_last_good_checkpoint(played: Played, name: str, last_good: str):
    first, second = played.ranks(name)
    assert first["last_good"] == second["last_good"] == last_good
    assert first["events"] == ["checkpoint_nonfinite"] * len(CASES[name])
    assert second["events"] == []
    assert first["weight"] == second["weight"]
    assert first["resumed_steps"] == [1, 2, 3, 4, 5]
    assert first["kept"] == ["checkpoint-5"]


def test_a_bad_start_halts_every_rank_with_the_good_checkpoint_named(played: Played):
    first, second = played.ranks("halt")
    assert first["halt"] == second["halt"]
    assert first["halt"].endswith("checkpoint-1.")
    assert first["events"] == [["checkpoint_nonfinite", "observed"], ["param_nonfinite", "halted"]]
    assert second["events"] == []


def test_a_bad_start_is_repaired_on_every_rank(played: Played):
    first, second = played.ranks("repair")
    assert (first["halt"], first["step"]) == (second["halt"], second["step"]) == (None, 3)
    assert first["events"] == [["checkpoint_nonfinite", "refused"]]


def test_a_bad_start_that_is_only_observed_goes_on_to_the_first_step(played: Played):
    first, second = played.ranks("observe")
    assert first["halt"] == second["halt"]
    assert first["halt"] is not None
    assert [action for _, action in first["events"]] == ["observed", "observed", "skipped", "skipped", "halted"]


def test_a_shard_that_is_cut_short_is_passed_over(played: Played):
    for said in played.ranks(SHARDED):
        resumed, whole = said["losses"]
        assert resumed == whole
    [message] = played.ranks(SHARDED)[0]["events"]  # and nothing about steps that are not guarded
    assert "checkpoint-2. Skipped checkpoint-3: pytorch_model_fsdp_0 is truncated" in message
