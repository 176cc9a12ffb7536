"""Weights, optimizer state and movement on two ranks: what is bad in one rank's part is known to all and told once."""

from pathlib import Path

import pytest

from .launch import Played, play_suite
from .state_worker import BAD_STEP, CASES, CULPRIT, NUM_STEPS, Case

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600), pytest.mark.xdist_group("distributed")]
WORKER = Path(__file__).with_name("state_worker.py")


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Played:
    return play_suite("state", list(CASES), tmp_path_factory.mktemp("state"), 2, worker=WORKER)


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_ranks_agree_and_rank_0_tells(played: Played, case: Case):
    first, second = played.ranks(case.name)
    assert first["reason"] == second["reason"]
    assert (first["reason"] is not None) == (case.plant is not None)
    assert first["rows"] == second["rows"]
    assert len(first["rows"]) == (BAD_STEP + 1 if case.plant else NUM_STEPS)
    assert second["events"] == []
    step = BAD_STEP if case.plant else 0  # rounding is there from the first step on
    assert [(e["signal"], e["step"]) for e in first["events"]] == ([(case.signal, step)] if case.signal else [])


@pytest.mark.parametrize(("name", "row"), [("weight", 1), ("moment", 3), ("weight-replicated", 1)])
def test_the_bad_rank_is_named(played: Played, name: str, row: int):
    said = played.ranks(name)[0]
    (event,) = said["events"]
    assert event["rank"] == CULPRIT
    assert event["culprit"]["parameter"] == "0.weight"
    assert event["values"]["rows"] == [row]
    assert event["values"]["num_entries"] == (24 if CASES[name].sharded else 48)
    assert (f"of the shard on rank {CULPRIT}" in said["reason"]) == CASES[name].sharded


def test_remedies_are_tried_on_a_shard(played: Played):
    (event,) = played.ranks("rounding")[0]["events"]
    assert {remedy["name"]: remedy["works"] for remedy in event["remedies"]} == {
        "float32_weights": True,
        "stochastic_rounding": True,
        "larger_lr": True,
    }


def test_exit_in_order(played: Played):
    played.check_exits()
