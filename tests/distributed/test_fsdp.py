"""Lockstep (L4) where parameters are sharded (FSDP2) over two gloo processes: a micro-batch goes on all ranks or none."""

from pathlib import Path

import pytest

from hf_nanguard.report.run_files import events_path, read_jsonl

from .judge import check_scenario
from .launch import Played, play_suite
from .scenario import SUITES, Scenario
from .shard_worker import BAD_STEP, CASES, Case

# One worker for all of them, so that a suite is played once and never beside another.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600), pytest.mark.xdist_group("distributed")]
SHARD_WORKER = Path(__file__).with_name("shard_worker.py")


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Played:
    return play_suite("shards", list(CASES), tmp_path_factory.mktemp("shards"), 2, worker=SHARD_WORKER)


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_loop_over_shards(shards: Played, case: Case):
    ranks = shards.ranks(case.name)
    for rank, said in enumerate(ranks):
        assert said["outcome"].startswith("NonFiniteError" if case.halts else "finished"), said["outcome"]
        assert not said["bad"]
        assert said["names"] == said["stock_names"]
        assert not said["apart"], f"rank {rank} differs from the stock run in {said['apart']}"
        assert said["full"] == ranks[0]["full"]
        expected = [e for e in case.events if e[3] == rank or (rank == 0 and e[1] != "observed")]
        found = [(e["signal"], e["action"], e["micro_step"], e["rank"]) for e in said["events"]]
        assert sorted(found, key=repr) == sorted(expected, key=repr)
        assert all(e["step"] == BAD_STEP for e in said["events"])


def test_blame_of_shards(shards: Played):
    """A gradient fault names the parameter, no row, and says that nobody knows whose it was."""
    [event] = shards.ranks("gradient-middle-rank1")[0]["events"]
    assert event["culprit"]["parameter"] == "first.bias"
    assert event["culprit"]["rows"] is None
    assert "dropped on every rank" in event["message"]


def test_shards_exit_in_order(shards: Played):
    shards.check_exits()


@pytest.fixture(scope="module")
def trainers(tmp_path_factory) -> Played:
    return play_suite("fsdp", [s.name for s in SUITES["fsdp"]], tmp_path_factory.mktemp("fsdp"), 2)


@pytest.mark.parametrize("scenario", SUITES["fsdp"], ids=lambda s: s.name)
def test_trainer_over_shards(trainers: Played, scenario: Scenario):
    check_scenario(scenario, trainers)


def test_trainers_exit_in_order(trainers: Played):
    trainers.check_exits()


@pytest.fixture(scope="module")
def variants(tmp_path_factory) -> Played:
    names = [s.name for s in SUITES["fsdp_variants"]]
    return play_suite("fsdp_variants", names, tmp_path_factory.mktemp("variants"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SUITES["fsdp_variants"], ids=lambda s: s.name)
def test_variants_of_trainers_over_shards(variants: Played, scenario: Scenario):
    check_scenario(scenario, variants)


@pytest.mark.slow
def test_late_error_is_refused(tmp_path):
    """It is raised as it is, and said so: a second forward would gather shards that no other rank gathers then."""
    played = play_suite("fsdp_refused", ["late-error"], tmp_path, 2)
    assert "RuntimeError: planted error" in played.troubles["late-error"]
    [event] = read_jsonl(events_path(tmp_path / "late-error" / "guarded" / "nanguard", 1))
    assert (event["signal"], event["action"], event["micro_step"]) == ("loss_error", "refused", 1)
    assert "sharded" in event["message"]
