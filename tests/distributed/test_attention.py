"""Attention that only one rank sees collapse is told by rank 0, and all ranks see the same numbers."""

from pathlib import Path

import pytest

from .attention_worker import CASES, FAILS
from .launch import Played, play_suite

pytestmark = [
    pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("distributed"),
]  # fmt: skip
WORKER = Path(__file__).with_name("attention_worker.py")


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Played:
    return play_suite("attention", list(CASES), tmp_path_factory.mktemp("attention"), 2, worker=WORKER)


@pytest.mark.parametrize("case", ["ddp", "fsdp", "fsdp-fused"])
def test_what_one_rank_sees_is_told_once_for_all(played: Played, case: str):
    first, second = played.ranks(case)
    assert first["rows"] == second["rows"]
    assert second["events"] == []
    assert [event["values"]["kind"] for event in first["events"]] == ["attention_entropy", "attention_score"]
    assert {event["culprit"]["module"] for event in first["events"]} == {"model.layers.1.self_attn"}


def test_healthy_ranks_are_silent(played: Played):
    for said in played.ranks("ddp-healthy"):
        assert said["events"] == []
        assert said["rows"]
        assert all("nanguard/attention_entropy_min" in row for row in said["rows"])


def test_a_sharded_head_is_seen_where_it_is_called(played: Played):
    for said in played.ranks("fsdp"):
        assert said["rows"]
        assert all("nanguard/logsumexp_max" in row for row in said["rows"])
        assert said["said"] == []


def test_a_sharded_head_that_is_not_called_is_left_out_and_that_is_said(played: Played):
    for said in played.ranks("fsdp-fused"):
        assert said["rows"]
        assert not any("nanguard/logsumexp_max" in row for row in said["rows"])
        assert ["sharded" in text for text in said["said"]] == [True]


@pytest.mark.parametrize("case", FAILS)
def test_a_monitor_that_fails_on_one_rank_is_turned_off_on_all(played: Played, case: str):
    """At once, if the others wait for its share; else at the next check."""
    first, second = played.ranks(case)
    after = case == "ddp-fails-after"
    assert first["left"] == [1, 1, 1, int(after), int(after), 0]
    assert second["left"] == [1, 1, 1, 0, 0, 0]
    assert [event["signal"] for event in second["events"]] == ["guard_failed"]
    assert first["events"] == []
