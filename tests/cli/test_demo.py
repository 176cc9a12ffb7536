"""The demo as a user runs it: in a process of its own, piped, and stopped half-way."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hf_nanguard.hf.showcase import BATCH_SIZE, MASKED, build_rows, build_tokenizer, cut_off
from hf_nanguard.report.jsonl import read_jsonl

ROOT = Path(__file__).parent.parent.parent
COMMAND = [sys.executable, "-m", "hf_nanguard.cli.main", "demo"]
STEPS = 12

pytestmark = pytest.mark.xdist_group("demo")  # one worker, so that the demo of the fixture runs once


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[str, str, Path]:
    """Output, errors and folder of one demo run."""
    folder = tmp_path_factory.mktemp("demo")
    command = [*COMMAND, "--steps", str(STEPS), "--output-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr, folder


def cells(output: str, question: str) -> list[str]:
    [line] = [line for line in output.splitlines() if line.startswith(f"│ {question}")]
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_only_the_poisoned_stock_run_is_lost(finished):
    output = finished[0]
    assert cells(output, "weights finite?") == ["yes", "NO: 21 of 21 bad", "yes"]
    lost = STEPS - STEPS // 3
    assert cells(output, "steps lost") == [f"0 of {STEPS}", f"{lost} of {STEPS}", f"1 of {STEPS}"]
    healthy, poisoned, guarded = cells(output, "final loss, held-out")
    assert poisoned == "nan"
    assert float(guarded) == pytest.approx(float(healthy), rel=0.1)


def test_the_guarded_run_is_bit_identical_to_one_without_that_batch(finished):
    same, total = re.search(r"(\d+) of (\d+) weight tensors are bit-identical", finished[0]).groups()
    assert same == total == "21"


def test_the_planted_batch_and_no_other_is_blamed(finished):
    [event] = read_jsonl(finished[2] / "guarded" / "nanguard" / "events.jsonl")
    bad_step = STEPS // 3
    assert (event["step"], event["signal"], event["action"]) == (bad_step, "loss_nonfinite", "skipped")
    assert event["culprit"]["rows"] == [bad_step * BATCH_SIZE + 2]
    assert event["cause"] == "div_by_zero"
    assert str(finished[2] / "guarded" / "nanguard" / "events.jsonl") in finished[0].replace("\n", "")


def test_a_pipe_gets_plain_text(finished):
    output, errors, _ = finished
    assert "\x1b" not in output
    assert errors == ""
    assert f"step   {STEPS}/{STEPS}" in output


def test_a_row_cut_off_has_no_labels():
    row = build_rows(build_tokenizer(), 1, seed=0)[0]
    cut = cut_off(row)
    assert set(cut["labels"]) == {MASKED}
    assert cut["input_ids"] == row["input_ids"][: len(cut["labels"])]
    assert any(label != MASKED for label in row["labels"])


def press_ctrl_c(process):
    """Presses Ctrl-C as a person does: again, if nothing happens. Python drops one that strikes inside a destructor."""
    for _ in range(5):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=10)[1]
    return process.communicate(timeout=10)[1]


def test_ctrl_c_ends_a_run(tmp_path):
    command = [*COMMAND, "--steps", "300", "--output-dir", str(tmp_path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            assert any("step " in line and "logged loss" in line for line in iter(process.stdout.readline, ""))
            errors = press_ctrl_c(process)
        finally:
            process.kill()
    assert process.returncode == 130
    assert errors.endswith("nanguard: stopped by Ctrl-C; what was written so far is whole.\n")
