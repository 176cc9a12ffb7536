"""The supervisor of `nanguard run --resume`: when it starts a script again, when it gives up, and how it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_nanguard.takeover.run_progress import Progress
from hf_nanguard.takeover.supervised_run import Supervisor, format_end

# Notes its step and why it was started, as a guarded script does, then ends as the plan for this attempt says.
SCRIPT = """
import os, signal, sys, time
plan, folder = eval(sys.argv[1]), os.environ["PROGRESS"]
with open(sys.argv[2], "a+") as file:
    file.seek(0)
    attempt = len(file.readlines())
    file.write(os.environ.get("REASON", "first") + "\\n")
step, end = plan[min(attempt, len(plan) - 1)]
if step is not None:
    open(f"{folder}/step", "w").write(f"{step:020d}")
if end == "wait":
    time.sleep(60)
if isinstance(end, str):
    open(f"{folder}/error", "w").write(end + "\\n")
    sys.exit(1)
if end < 0:
    os.kill(os.getpid(), -end)
sys.exit(end)
"""
PLANS = {
    "sound": ([(5, 0)], 0, ["first"], None),
    "an error once": ([(4, "KeyError"), (9, 0)], 0, ["first", "KeyError at step 4"], None),
    "killed once": ([(4, -9), (9, 0)], 0, ["first", "SIGKILL at step 4"], None),
    "killed before its first step": ([(None, -9), (9, 0)], 0, ["first", "SIGKILL before the first step"], None),
    "an exit code once": ([(4, 3), (9, 0)], 0, ["first", "exit code 3 at step 4"], None),
    "the same failure at the same step": (
        [(4, "KeyError"), (4, "KeyError"), (9, 0)], 1, ["first", "KeyError at step 4"], "the same failure came back",
    ),
    "killed at the same step": ([(4, -9), (4, -9)], -9, ["first", "SIGKILL at step 4"], "the same failure came back"),
    "another failure at the same step": (
        [(4, "KeyError"), (4, -9), (9, 0)], 0, ["first", "KeyError at step 4", "SIGKILL at step 4"], None,
    ),
    "later and later": (
        [(4, "E"), (5, "E"), (6, "E"), (7, "E")], 1, ["first", "E at step 4", "E at step 5"], "it was restarted 2 times",
    ),
    "a mistake before the first step": ([(None, 2)], 2, ["first"], "no step was taken"),
    "an error before the first step": ([(None, "ImportError")], 1, ["first"], "no step was taken"),
}  # fmt: skip


@pytest.fixture
def attempts(tmp_path) -> Path:
    return tmp_path / "attempts"


def command_for(plan, attempts: Path) -> list[str]:
    return [sys.executable, "-c", SCRIPT, repr(plan), str(attempts)]


def build(progress: Progress, reason: str | None) -> dict[str, str]:
    assert (progress.read_step(), progress.read_error()) == (None, None)  # nothing of the attempt before is left
    return {**os.environ, "PROGRESS": progress.folder, **({} if reason is None else {"REASON": reason})}


@pytest.mark.parametrize("name", PLANS)
def test_when_it_starts_again_and_when_it_gives_up(name, attempts):
    plan, code, reasons, why = PLANS[name]
    said: list[str] = []
    supervisor = Supervisor(2, said.append, first_wait=0.01)
    assert supervisor.run(command_for(plan, attempts), build) == code
    assert attempts.read_text().splitlines() == reasons
    assert len(said) == len(reasons) - 1 + (why is not None)
    if why is not None:
        assert why in said[-1]


def test_waits_become_longer(attempts, monkeypatch):
    waits = []
    monkeypatch.setattr(
        Supervisor, "_sleep", lambda self: waits.append(self.wait) or setattr(self, "wait", self.wait * 2)
    )
    Supervisor(3, lambda text: None).run(command_for([(1, "E"), (2, "E"), (3, "E"), (4, 0)], attempts), build)
    assert waits == [1.0, 2.0, 4.0]


DRIVER = f"""
import os, sys
from hf_nanguard.takeover.supervised_run import Supervisor, end_alike
build = lambda progress, reason: {{**os.environ, "PROGRESS": progress.folder}}
say = lambda text: print(text, file=sys.stderr, flush=True)
sys.exit(end_alike(Supervisor(3, say, 30.0).run([sys.executable, "-c", {SCRIPT!r}, *sys.argv[1:]], build)))
"""


def start_driver(plan, attempts: Path) -> subprocess.Popen:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, repr(plan), str(attempts)], cwd=root, stderr=subprocess.PIPE, text=True
    )
    while not (attempts.is_file() and attempts.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_script_and_ends_both_alike(number, attempts):
    with start_driver([(3, "wait")], attempts) as process:
        time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(30) == -number
    assert attempts.read_text().splitlines() == ["first"]


def test_a_signal_while_it_waits_for_the_next_attempt(attempts):
    with start_driver([(3, "KeyError"), (4, 0)], attempts) as process:
        assert "restart 1 of 3 in 30 s" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 1
    assert attempts.read_text().splitlines() == ["first"]


def test_it_ends_by_the_signal_of_its_child(attempts):
    with start_driver([(4, -9), (4, -9)], attempts) as process:
        process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -9


def test_nothing_is_left_behind(attempts, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    Supervisor(0, lambda text: None).run(command_for([(4, 3)], attempts), build)
    assert os.listdir(tmp_path) == ["attempts"]


@pytest.mark.parametrize(
    ("plan", "code", "reasons"),
    [
        ([(None, 0)], 0, ["first"]),
        ([(None, 3)], 3, ["first"]),
        ([(None, -9), (None, 0)], 0, ["first", "SIGKILL before the first step"]),
    ],
)
def test_without_a_temporary_folder_the_script_runs_all_the_same(plan, code, reasons, attempts, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")
    said: list[str] = []
    assert Supervisor(2, said.append, first_wait=0.01).run(command_for(plan, attempts), build) == code
    assert attempts.read_text().splitlines() == reasons
    assert said[0].startswith("no temporary folder can be made")


def test_words_for_an_end():
    ends = {1: "exit code 1", 255: "exit code 255", -9: "SIGKILL", -15: "SIGTERM", -40: "signal 40"}
    assert {code: format_end(code) for code in ends} == ends


def test_progress_survives_a_folder_that_is_gone(tmp_path):
    progress = Progress(str(tmp_path / "gone"))
    progress.write_step(3)
    progress.write_error("KeyError")
    assert (progress.read_step(), progress.read_error()) == (None, None)


def test_progress_is_overwritten_as_a_whole(tmp_path):
    progress = Progress(str(tmp_path))
    for step in (100, 7):
        progress.write_step(step)
        assert progress.read_step() == step
    for error in ("LongErrorName", "E"):
        progress.write_error(error)
        assert progress.read_error() == error
    progress.clear()
    assert (progress.read_step(), progress.read_error()) == (None, None)


RANK = """
import os, sys, time
from hf_nanguard.takeover.run_progress import Progress
progress = Progress(sys.argv[1])
progress.begin_rank(int(sys.argv[2]))
print("begun", flush=True)
if sys.argv[3] == "error":
    progress.write_error("ValueError")
if sys.argv[3] == "leave":
    os._exit(0)
if sys.argv[3] != "hang":
    progress.end_rank(int(sys.argv[2]))
    sys.exit()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("error", "ValueError"),
        ("kill", "the sudden end of rank 1"),
        ("end", "RuntimeError"),
        ("leave", "RuntimeError"),
    ],
)
def test_the_reason_is_that_of_the_rank_that_failed_first(how, reason, tmp_path):
    """A rank that waits for one that failed fails as well, with an error of its own."""
    command = [sys.executable, "-c", RANK, str(tmp_path), "1", "hang" if how == "kill" else how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "begun\n"
        if how in ("kill", "leave"):
            if how == "kill":
                child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its parent has not noticed yet
        else:
            child.wait()
        survivor = Progress(str(tmp_path))
        survivor.begin_rank(0)
        survivor.write_error("RuntimeError")
        assert survivor.read_error() == reason
        survivor.clear()
        assert survivor.read_error() is None
        assert not list(tmp_path.glob("rank-*"))


def run_rank(folder, rank, how, error="ValueError"):
    """Runs the process of a rank to its end; its parent has noticed."""
    command = [sys.executable, "-c", RANK.replace("ValueError", error), str(folder), str(rank), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "begun\n"
        if how == "hang":
            child.kill()


@pytest.mark.parametrize("before", [["error"], ["error", "hang"], ["hang"]])
def test_workers_that_are_started_again_replace_those_before(before, tmp_path):
    """A launcher may start all ranks again within one attempt, those before ended in any way."""
    for rank, how in enumerate(before):
        run_rank(tmp_path, rank, how)
    for rank in reversed(range(len(before))):
        run_rank(tmp_path, rank, "end" if rank else "error", "KeyError")
    assert Progress(str(tmp_path)).read_error() == "KeyError"


def test_a_process_that_a_rank_starts_does_not_replace_it(tmp_path):
    progress = Progress(str(tmp_path))
    progress.begin_rank(0)
    progress.write_error("ValueError")
    run_rank(tmp_path, 0, "end")
    assert (tmp_path / "rank-0").read_text() == f"{os.getpid()}\n"
    assert progress.read_error() == "ValueError"


def test_a_rank_that_ended_unseen_is_named_beside_the_error(tmp_path):
    progress = Progress(str(tmp_path))
    progress.begin_rank(0)
    run_rank(tmp_path, 1, "leave")
    progress.write_error("KeyError")
    assert progress.read_error() == "KeyError; rank 1 had ended before"
