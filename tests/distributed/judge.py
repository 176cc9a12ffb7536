"""What must be true of every scenario, whichever way its ranks were started."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hf_nanguard.report.run_files import events_path, read_jsonl

from .launch import Played
from .scenario import GRPO, SFT, Expected, Scenario

# Once a run: whether the guard could begin on all ranks (a reduction), and could build its runner (a reduction); the quarantined rows of rank 0 (their size by a reduction,
# then the rows), whether all ranks have them (a reduction);
# whether all states are finite (a reduction); how many snapshots fit into the memory of each (a size, then the values), whether to
# take one (a reduction), whether all have it (a reduction).
START = Counter({"all_reduce": 8, "all_gather": 2})
PROFILED_START = Counter({"c10d::allreduce_": 8, "c10d::allgather_": 2})


def check_scenario(scenario: Scenario, played: Played) -> None:
    """Asserts L4 and, by the stock run beside it, L1, L2 and L3."""
    ranks = played.ranks(scenario.name)
    check_outcome(scenario, ranks)
    check_lockstep(scenario, ranks)
    if scenario.compared:
        check_stock(scenario, ranks)
    check_events(scenario, ranks, played.folder / scenario.name / "guarded" / "nanguard")


def check_outcome(scenario: Scenario, ranks: list[dict[str, Any]]) -> None:
    """Every rank finishes, or every rank halts; and the faults did come to pass."""
    for rank, said in enumerate(ranks):
        planted = sum(1 for fault in scenario.faults if fault.rank == rank)
        assert said["struck"] == planted, f"rank {rank}: {said['struck']} of {planted} faults struck"
        if scenario.stops_at is None:
            assert said["outcome"] == "finished"
        else:
            assert said["outcome"].startswith("NonFiniteError"), said["outcome"]


def check_lockstep(scenario: Scenario, ranks: list[dict[str, Any]]) -> None:
    """Weights, optimizer and schedule are the same on all ranks, and finite but for a parameter that was made bad."""
    ruined = {f"model.{fault.parameter}" for fault in scenario.faults if fault.kind == "policy"}
    for said in ranks:
        assert set(said["bad"]) == ruined
        assert said["schedule"] == ranks[0]["schedule"]
        assert said["global_step"] == ranks[0]["global_step"]
        different = [
            n
            for n in said["tensors"]
            if not n.startswith("model.norm.") and said["tensors"][n] != ranks[0]["tensors"][n]
        ]
        assert not different, f"differ between ranks: {different}"


def check_stock(scenario: Scenario, ranks: list[dict[str, Any]]) -> None:
    """Every rank ended bit-identical to the stock run that never had what was dropped."""
    for rank, said in enumerate(ranks):
        stock = said["stock"]
        assert said["tensors"].keys() == stock["tensors"].keys()
        assert not said["apart"], f"rank {rank} differs from the stock run by {said['apart']}"
        assert said["rng"] == stock["rng"], f"rank {rank}: random state differs from the stock run's"
        assert said["schedule"] == stock["schedule"]
        if scenario.host == SFT:
            assert said["tokens"] == stock["tokens"]
        if scenario.host == GRPO:  # which logs what it has generated, and counts nothing in its losses
            assert said["logged_tokens"]
            assert said["logged_tokens"].items() <= stock["logged_tokens"].items()
        if not scenario.faults:
            assert said["losses"] == stock["losses"]
        if scenario.silent:
            # An online trainer asks once a generation, here once a step, whether anybody's completions were bad.
            asked = Counter({"all_reduce": said["global_step"]} if scenario.host == GRPO else {}) + START
            asked += PROFILED_START if scenario.profiled else Counter()
            beyond = Counter(said["messages"]) - Counter(stock["messages"])
            assert beyond == asked, f"messages beyond those of stock: {dict(beyond)}, not {dict(asked)}"
            assert Counter(stock["messages"]) <= Counter(said["messages"])
            assert sum(said["messages"].values()) > 0


def check_events(scenario: Scenario, ranks: list[dict[str, Any]], folder: Path) -> None:
    """Rank 0 has every decision, every rank has its own, and nobody has anything else."""
    for rank in range(len(ranks)):
        file = events_path(folder, rank)
        expected = [e for e in scenario.events if e.rank == rank or (rank == 0 and e.action != "observed")]
        assert file.is_file() == bool(expected), f"{file.name}: {'missing' if expected else file.read_text()}"
        events = list(read_jsonl(file)) if expected else []
        found = [(e["signal"], e["action"], e["step"], e["micro_step"], e["rank"]) for e in events]
        wanted = [(e.signal, e.action, e.step, e.micro_step, e.rank) for e in expected]
        assert sorted(found, key=repr) == sorted(wanted, key=repr)
        for event in events:
            is_planted = not any(fault.kind == "weight" for fault in scenario.faults)
            if is_planted and event["signal"] == "loss_nonfinite" and event["action"] in ("dropped", "skipped"):
                is_added = any(fault.kind == "constant" for fault in scenario.faults)
                check_autopsy(event, "aten.add" if is_added else "aten.mul")
            check_event(
                event,
                expected[
                    wanted.index((event["signal"], event["action"], event["step"], event["micro_step"], event["rank"]))
                ],
                ranks,
            )


def check_autopsy(event: dict[str, Any], op: str) -> None:
    """The rank to blame has found the line and operator that made its loss NaN, while the others waited."""
    assert event["culprit"]["op"].startswith(op)
    assert event["culprit"]["source"].startswith("fault_injector.py:")
    assert event["culprit"]["phase"] == "loss"


def check_event(event: dict[str, Any], expected: Expected, ranks: list[dict[str, Any]]) -> None:
    """The rows are those of that micro-batch on that rank, the parameter is the planted one."""
    json.dumps(event, allow_nan=False)
    if expected.rows:
        rows = ranks[expected.rank]["rows"][f"{expected.step},{expected.micro_step}"]
        samples = event["culprit"]["samples"]
        assert event["culprit"]["rows"] == (rows if samples is None else [rows[sample] for sample in samples])
    assert (event["culprit"] or {}).get("parameter") == expected.parameter
