"""A child process with limits: it ends as it would alone, or it is stopped and that is said in a sentence."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_nanguard import ArgumentError
from hf_nanguard.bundle_replay.limited_process import RESERVED, Limits, find_usable_memory, run_limited

GIB = 2**30
ROOT = Path(__file__).parents[2]
# Scripts run by `nanguard run`, which starts at once; each writes its process id first.
ENDLESS = "while True: pass"
SCRIPTS = {
    "exit code": ("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)", 7),
    "memory": (f"bytearray({8 * GIB})", 1),
    "much memory in parts": (f"parts = [bytearray({GIB // 16}) for _ in range(16)]", 1),
    "enough memory": (f"bytearray({GIB // 8})", 0),
}


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "scripts" / "script.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n{text}\n")
        return str(path)

    return write


def limited(script: str, seconds: int = 60) -> int:
    return run_limited(["run", script], Limits(GIB // 2, seconds), pytest.fail)


def is_gone(tmp_path: Path) -> bool:
    pid = int((tmp_path / "pid").read_text())
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_child_that_ends_by_itself(name, script, tmp_path, capfd):
    text, code = SCRIPTS[name]
    assert limited(script(text)) == code
    output = capfd.readouterr()
    assert ("MemoryError" in output.err) == ("memory" in name and code == 1)
    if name == "exit code":
        assert (output.out, output.err.splitlines()[0]) == ("out\n", "err")
    assert is_gone(tmp_path)


def test_a_child_that_never_ends(script, tmp_path):
    with pytest.raises(ArgumentError, match=r"stopped after 3 seconds.*--time-limit"):
        limited(script(ENDLESS), seconds=3)
    assert is_gone(tmp_path)


def test_a_child_that_is_killed(script):
    with pytest.raises(ArgumentError, match=r"ended by SIGKILL.*--memory-limit"):
        limited(script("os.kill(os.getpid(), 9)"))


def test_processor_time_is_a_second_limit(script):
    with pytest.raises(ArgumentError, match="of all processors"):
        limited(script("import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 60))\nwhile True: pass"))


def test_nothing_is_imported_from_the_current_folder(script, tmp_path, monkeypatch):
    for name in ("argparse", "json", "torch", "hf_nanguard"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    assert limited(script("")) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_end_both(number, code, script, tmp_path, interruptible):
    driver = f"""
import sys
from hf_nanguard.bundle_replay.limited_process import Limits, run_limited
try:
    run_limited(["run", {script(ENDLESS)!r}], Limits({2 * GIB}, 60), print)
except KeyboardInterrupt:
    sys.exit(130)
"""
    parent = subprocess.Popen([sys.executable, "-c", driver], cwd=ROOT)
    pid_file = tmp_path / "pid"
    while not (pid_file.is_file() and pid_file.read_text()):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(number)
    assert parent.wait(60) == code
    assert is_gone(tmp_path)


def test_the_default_is_most_of_the_free_memory():
    limits = Limits.default(5)
    assert RESERVED < limits.num_bytes < find_usable_memory() * 1.1 + RESERVED
    assert limits.seconds == 5
    assert Limits.default(5, 3).num_bytes == 3 * GIB + RESERVED


def test_all_memory_counts_where_it_is_not_known_what_is_free(monkeypatch):
    monkeypatch.setattr("hf_nanguard.bundle_replay.limited_process.find_free_memory", lambda: None)
    assert find_usable_memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
