"""Ranks look at the same steps, see the same, and one rank's NaN is told once, by rank 0."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .launch import find_free_port

WORKER = Path(__file__).with_name("activation_worker.py")
pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("distributed")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_see_the_same(kind, tmp_path):
    launch = ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(find_free_port())]
    done = subprocess.run(
        [sys.executable, "-m", *launch, str(WORKER), kind, str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    assert first["steps"] == second["steps"]
    assert [bool(step["metrics"]) for step in first["steps"]] == [True, True, False, True, False]
    assert [step["messages"] for step in first["steps"]] == [1, 1, 0, 1, 0]
    assert [step["reads"] for step in first["steps"]] == [1, 1, 0, 1, 0]
    [event] = first["events"]
    assert (event["signal"], event["step"], event["culprit"]["module"]) == ("activation_nonfinite", 3, "model.layers.0")
    assert second["events"] == []
