"""The recipe runs, and its guard leaves out the one micro-batch that was planted."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run_recipe(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "recipes" / "plain_loop.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_the_guarded_loop_survives():
    done = run_recipe("--steps", "30")
    assert done.returncode == 0, done.stderr
    plain, guarded, event = done.stdout.splitlines()
    assert plain == "plain loop: weights 4 of 4 tensors not finite, relative error nan"
    assert guarded.startswith("guarded loop: weights all finite, relative error 0.")
    assert event == "  event: loss_nonfinite, dropped: loss is inf in micro-batch 2 of step 15"


def test_help():
    done = run_recipe("--help")
    assert done.returncode == 0
    assert "python recipes/plain_loop.py --steps 50" in done.stdout


@pytest.mark.parametrize("value", ["1", "x"])
def test_bad_steps(value):
    done = run_recipe("--steps", value)
    assert done.returncode == 2
    assert "--steps" in done.stderr
    assert value in done.stderr
