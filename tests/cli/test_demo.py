"""The demo as a user runs it: in a process of its own, piped, and stopped half-way."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hf_nanguard.examples.demo.scenarios import BATCH_SIZE, SAMPLING_STEPS, UNUSED
from hf_nanguard.examples.tasks.sums import VOCABULARY, build_examples, build_tokenizer
from hf_nanguard.report.run_files import read_jsonl

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


def cells(output: str, number: int) -> tuple[str, str]:
    """Returns what the table says of the stock and of the guarded run of a scenario."""
    table = output[output.index("┡") :].splitlines()[1:]
    rows = "\n".join(table).split("├")[number - 1].splitlines()
    parts = [[cell.strip() for cell in line.strip("│").split("│")] for line in rows if line.startswith("│")]
    _, stock, guarded = (" ".join(column) for column in zip(*parts, strict=True))
    return stock.strip(), guarded.strip()


def events_of(folder: Path, name: str) -> list[dict]:
    return list(read_jsonl(folder / name / "nanguard" / "events.jsonl"))


def acts_of(folder: Path, name: str) -> list[dict]:
    """The events in which the guard acted; a spike that it only observed depends on the CPU's kernels."""
    return [event for event in events_of(folder, name) if event["action"] != "observed"]


def test_only_the_poisoned_stock_run_is_lost(finished):
    stock, guarded = cells(finished[0], 1)
    assert "weights: NOT FINITE: 21 of 21 tensors" in stock
    assert f"steps lost: {STEPS - STEPS // 3} of {STEPS}" in stock
    assert "held-out loss: nan" in stock
    assert re.search(r"logged losses: .* 0 0 0 ", stock)  # the log shows that as a loss
    assert "weights: all finite" in guarded
    assert f"steps lost: 1 of {STEPS}" in guarded
    learned, healthy = re.search(r"held-out loss: ([\d.]+) .*held-out loss on healthy data: ([\d.]+)", guarded).groups()
    assert float(learned) == pytest.approx(float(healthy), rel=0.1)


def test_the_guarded_run_is_bit_identical_to_one_without_that_batch(finished):
    same, total = re.search(r"run without that batch: (\d+) of (\d+) weight", cells(finished[0], 1)[1]).groups()
    assert same == total == "21"


def test_the_planted_batch_and_no_other_is_blamed(finished):
    [event] = acts_of(finished[2], "guarded")
    bad_step = STEPS // 3
    assert (event["step"], event["signal"], event["action"]) == (bad_step, "loss_nonfinite", "skipped")
    assert event["culprit"]["rows"] == [bad_step * BATCH_SIZE]
    assert event["cause"] == "div_by_zero"
    assert f"rows [{bad_step * BATCH_SIZE}]" in cells(finished[0], 1)[1]


def test_stock_grpo_ends_and_the_guarded_one_learns_on(finished):
    bad_step = SAMPLING_STEPS // 3
    stock, guarded = cells(finished[0], 2)
    assert stock.startswith(f"run: {bad_step} steps, ENDED by RuntimeError: probability tensor")
    assert f"step {bad_step:>4}/{SAMPLING_STEPS}  ENDED by RuntimeError" in finished[0]
    first, last = map(
        float,
        re.search(
            rf"run: {SAMPLING_STEPS} steps .*mean reward, first: ([\d.]+) .*mean reward, last: ([\d.]+)", guarded
        ).groups(),
    )
    assert last > first + 0.05
    [event] = acts_of(finished[2], "grpo-guarded")
    assert (event["step"], event["signal"], event["action"]) == (bad_step, "logits_nonfinite", "dropped")


def test_the_silent_nan_is_saved_by_the_stock_run_only(finished):
    stock, guarded = cells(finished[0], 3)
    assert stock.startswith("run: 40 steps weights: NOT FINITE: 1 of 21 tensors")
    losses = re.search(r"logged losses: ([\d. ]+) checkpoints", stock)[1].replace("...", "").split()
    assert all(float(loss) > 0 for loss in losses)  # which looks healthy
    assert "checkpoints: 4 saved, 2 with NaN" in stock
    assert guarded.startswith("run: 40 steps weights: all finite")
    assert "checkpoints: 4 saved, 0 with NaN" in guarded
    [event] = acts_of(finished[2], "silent-guarded")
    assert (event["action"], event["cause"]) == ("rewound", "optimizer_state")
    assert event["culprit"]["parameter"] == "model.embed_tokens.weight"
    assert event["values"]["rows"] == [VOCABULARY.index(UNUSED)]
    assert "model.embed_tokens.weight" in guarded


def test_no_batch_of_the_demo_uses_the_token_of_the_silent_nan():
    texts = [row["prompt"] + row["completion"] for row in build_examples(2000, seed=0)]
    assert VOCABULARY.index(UNUSED) not in {token for ids in build_tokenizer()(texts)["input_ids"] for token in ids}


def test_the_overflow_is_announced_before_it_comes(finished):
    stock, guarded = cells(finished[0], 4)
    assert "weights: NOT FINITE: 21 of 21 tensors" in stock
    assert "weights: all finite" in guarded
    told, foretold, came = map(
        int, re.search(r"predicted: at step (\d+) for step (\d+), .* it happened at step (\d+)", guarded).groups()
    )
    assert told + 10 <= came
    assert abs(foretold - came) <= (came - told) / 2
    signals = [event["signal"] for event in events_of(finished[2], "overflow-guarded")]
    assert signals.index("activation_headroom") < signals.index("loss_nonfinite")
    assert "fp16_overflow" in guarded


def test_the_autopsy_is_the_one_of_the_readme(finished):
    """But for the numbers, and the folder of the run."""
    [shown] = re.findall(
        r"^```\n(---- autopsy .*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    lines = finished[0].splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith("---- autopsy"))
    printed = lines[begin : begin + len(shown.splitlines())]
    printed = [line.replace(str(finished[2]), "runs/demo") for line in printed]
    assert [re.sub(r"[\d.]+", "#", line) for line in printed] == [
        re.sub(r"[\d.]+", "#", line) for line in shown.splitlines()
    ]


def test_it_ends_with_where_the_evidence_is(finished):
    output, _, folder = finished
    named = re.findall(r"^(?:events|autopsies) of failure \d: (.*)$", output, flags=re.MULTILINE)
    assert len(named) >= 5
    assert all(Path(path).exists() and Path(path).is_relative_to(folder) for path in named)
    assert "nanguard run train.py" in output.splitlines()[-1]


def test_a_pipe_gets_plain_text(finished):
    output, errors, _ = finished
    assert "\x1b" not in output
    assert errors == ""
    assert f"step   {STEPS}/{STEPS}" in output


def press_ctrl_c(process):
    """Presses Ctrl-C as a person does: again, if nothing happens. Python drops one that strikes inside a destructor."""
    for _ in range(5):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=10)[1]
    return process.communicate(timeout=10)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "line"), [(["--steps", "300"], "stock, healthy data"), (["--steps", "6"], "guarded float16")]
)
def test_ctrl_c_ends_a_run(options, line, interruptible, tmp_path):
    command = [*COMMAND, *options, "--output-dir", str(tmp_path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            assert any(told.startswith(line) for told in iter(process.stdout.readline, ""))
            errors = press_ctrl_c(process)
        finally:
            process.kill()
    assert process.returncode == 130
    assert errors.endswith("nanguard: stopped by Ctrl-C; all files written so far are complete.\n")
    assert all(list(read_jsonl(file)) for file in tmp_path.rglob("*.jsonl"))
