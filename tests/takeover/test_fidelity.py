"""`nanguard run` compared with Python itself: small scripts print what they see, end in every way, and must not differ."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_nanguard.takeover.guarded_processes import VARIABLE, build_environment

ADDRESS = re.compile(r"0x[0-9a-f]+|\b\d{12,}\b")  # of objects and threads
SEE = """
import sys
def see(*names):
    main = sys.modules["__main__"]
    print(names, sys.argv, sys.path, main is not None and vars(main).get("__name__"), sys.flags, sys.executable, sys.orig_argv[1:])
"""
# Everything a script can see of its process, except what must differ: three environment variables and a finder.
SCRIPTS = {
    "argv, path, flags": f"{SEE}\nsee('main')",
    "names of the module": "print({name: str(value) for name, value in globals().items()})",
    "modules": "import sys\nprint(sorted(set(sys.modules) - set(sys.builtin_module_names)))",
    "own main": "import sys, __main__\nprint(vars(__main__) is globals(), sys.modules['__main__'] is __main__)",
    "pickled class": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A, A.__module__)",
    "after the last line": f"{SEE}\nimport atexit\natexit.register(see, 'atexit')\nsee('last')",
    "thread after the last line": f"{SEE}\nimport threading, time\n"
    "def late():\n    time.sleep(0.3)\n    see('thread')\n    import local\n    print(local.name)\n"
    "threading.Thread(target=late).start()",
    "order at the end": "import atexit, threading\natexit.register(print, 'first')\natexit.register(print, 'second')\n"
    "threading.Thread(target=print, args=('thread',)).start()",
    "modules of its own": "\n".join(
        f"import {name}\nprint({name}.name)"
        for name in ("rich", "yaml", "report", "local", "json", "argparse", "tempfile", "dataclasses", "shutil", "logging")
    ),
    "module found again": "import importlib, rich\nprint(importlib.reload(rich).name)",
    "environment": "import os\nours = ('PYTHONPATH', 'HF_NANGUARD_RUN')\n"
    "print(sorted(set(os.environ.items()) - {(name, os.environ.get(name)) for name in ours}))",
    "no sitecustomize": "import sitecustomize",
    "output without a newline": "import sys\nsys.stdout.write('a')",
    "closed output": "import sys\nsys.stdout.close()",
    "closed error output": "import sys\nsys.stderr.close()\nprint(1)",
    "exit code": "raise SystemExit(7)",
    "exit without a code": "import sys\nsys.exit()",
    "exit by a text": "import sys\nsys.exit('gone')",
    "exit by a large number": "import sys\nsys.exit(300)",
    "exit at once": "import os\nprint('lost')\nos._exit(5)",
    "exit in atexit": "import atexit, sys\natexit.register(sys.exit, 4)",
    "error": "def inner():\n    raise KeyError('gone')\ntry:\n    inner()\nexcept KeyError as error:\n    raise RuntimeError('failed') from error",
    "error of several lines": "raise ValueError('one\\ntwo')",
    "error group": "raise ExceptionGroup('many', [ValueError(1), KeyError('a')])",
    "error in atexit": "import atexit\natexit.register(lambda: 1 / 0)",
    "error in a thread": "import threading\nthreading.Thread(target=lambda: 1 / 0, name='mine').start()",
    "recursion": "import sys\nsys.setrecursionlimit(100)\ndef f(): f()\nf()",
    "syntax error": "x = (\n",
    "import error": "import no_such_module_at_all",
    "own excepthook": "import sys\nsys.excepthook = lambda *error: print('mine', error[1])\n1 / 0",
    "default excepthook": "import sys\nprint(sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__)",
    "assertions": "assert False, 'on'",
    "interrupted": "raise KeyboardInterrupt",
    "killed": "import os\nos.kill(os.getpid(), 9)",
    "terminated": "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(5)",
    "own handler": "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\nos.kill(os.getpid(), signal.SIGTERM)",
    "aborted": "import os\nos.abort()",
    "handlers": "import signal\nprint([str(signal.getsignal(number)) for number in sorted(signal.valid_signals())])",
    "files": "import os\nprint(sorted(os.listdir('/proc/self/fd')), os.getcwd())",
    "threads": "import threading\nprint(threading.enumerate(), threading.current_thread() is threading.main_thread())",
    "parents": "import os\nprint(os.getppid(), os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid())",
    "forked": "import os, sys\nchild = os.fork()\nif child == 0:\n    print('child', flush=True)\n    sys.exit(5)\n"
    "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
    "executed": "import os, sys\nprint('before', flush=True)\nos.execv(sys.executable, [sys.executable, '-c', 'import sys; print(sys.argv, sys.path)'])",
    "child": "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'import sys; print(sys.argv, sys.path)'],"
    " capture_output=True, text=True))",
    "spawned": "import multiprocessing, sys\ndef work(): print('work', __name__, sys.argv, sys.path, flush=True)\n"
    "if __name__ == '__main__':\n    process = multiprocessing.get_context('spawn').Process(target=work)\n    process.start()\n"
    "    process.join()\n    print(process.exitcode)",
    "forkserver": "import multiprocessing\ndef work(): print('work', __name__, flush=True)\n"
    "if __name__ == '__main__':\n    process = multiprocessing.get_context('forkserver').Process(target=work)\n    process.start()\n"
    "    process.join()\n    print(process.exitcode)",
}  # fmt: skip


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with a script's own modules; their names are those of modules that our command imports."""
    for name in (
        "rich", "yaml", "report", "local", "json", "argparse", "tempfile", "dataclasses", "shutil", "difflib", "textwrap",
        "hf_transfer", "cli", "core",
    ):  # fmt: skip
        (tmp_path / f"{name}.py").write_text(f"name = 'own {name}'\n")
    return tmp_path


def run(words: list[str], folder: Path, guard: bool, flags: tuple[str, ...] = (), **variables: str):
    """Runs Python in a folder and returns what came of it, without messages of the guard."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NANGUARD", "PYTHON", "PYTEST"))}
    command = [sys.executable, *flags, *(["-m", "hf_nanguard.run", "--"] if guard else []), *words]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
        env={**kept, **variables},
        start_new_session=True,
    )
    told = [ADDRESS.sub("", line) for line in done.stderr.splitlines() if not line.startswith("nanguard: ")]
    return done.returncode, ADDRESS.sub("", done.stdout), told


def write(folder: Path, text: str, name: str = "script.py") -> str:
    (folder / name).write_text(text)
    return name


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_sees_and_ends_as_without_us(name, place, interruptible):
    script = write(place, SCRIPTS[name])
    stock = run([script, "-x", "--", "b"], place, guard=False)
    assert run([script, "-x", "--", "b"], place, guard=True) == stock


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["sub/script.py", "a"], ()),
        (["./sub/../sub/script.py"], ()),
        (["-m", "sub.script", "-m", "x"], ()),
        (["-m", "sub"], ()),
        (["sub"], ()),
        (["-m", "no_such_module"], ()),
        (["-m", "sub.missing"], ()),
        (["-m", "torn"], ()),
        (["script"], ()),
        (["sub/script.py"], ("-O", "-B", "-W", "error", "-X", "utf8", "-u")),
        (["sub/script.py"], ("-P",)),
        (["-m", "sub.script"], ("-P",)),
        (["sub/script.py"], ("-X", "importtime", "-s")),
    ],
    ids=str,
)
def test_ways_to_name_it_and_flags_of_python(words, flags, place):
    text = f"{SEE}\nsee(__name__, __file__, __package__, str(__spec__), type(__loader__).__name__, __debug__)\n"
    (place / "sub").mkdir()
    for name in ("script.py", "__main__.py"):
        (place / "sub" / name).write_text(text)
    (place / "torn").mkdir()
    (place / "torn" / "__init__.py").write_text("raise ValueError('of the package')")
    (place / "script").write_text(f"#!/usr/bin/env python3\n{text}")
    stock = run(words, place, guard=False, flags=flags)
    guarded = run(words, place, guard=True, flags=flags)
    if "importtime" in flags:  # lines about the time of imports
        stock, guarded = stock[:2], guarded[:2]
    assert guarded == stock


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_from_outside(number, place, interruptible):
    script = write(place, "import time\nprint('ready', flush=True)\ntime.sleep(60)")
    ended = []
    for command in ([sys.executable], [sys.executable, "-m", "hf_nanguard.run"]):
        process = subprocess.Popen(
            [*command, script], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(number)
        _, error = process.communicate(timeout=30)
        ended.append((process.returncode, [line for line in error.splitlines() if not line.startswith("nanguard: ")]))
    assert ended[0] == ended[1]
    assert ended[0][0] == -number


OUTSIDE = {  # what a shell or the user's environment does; {} is the command
    "standard error closed": ("{} 2>&-", {}),
    "standard output closed": ("{} >&-", {}),
    "everything closed": ("{} <&- >&- 2>&-; cat seen", {}),
    "script from standard input": ("{} < script.py", {}),
    "script from a pipe": ("cat script.py | {}", {}),
    "current folder in PYTHONPATH": ("{}", {"PYTHONPATH": "sub::/usr:"}),
    "only empty items in PYTHONPATH": ("{}", {"PYTHONPATH": ":"}),
    "empty PYTHONPATH": ("{}", {"PYTHONPATH": ""}),
    "no home, no temporary folder": ("unset HOME; {}", {"TMPDIR": "/nonexistent"}),
    "few files": ("ulimit -n 12; {}", {}),
    "ignored interrupts": ("trap '' INT; {}", {}),
    "reader that leaves": ("{} | head -1", {}),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_surrounds_it(name, tmp_path):
    shell, variables = OUTSIDE[name]
    write(tmp_path, f"{SEE}\nsee('main')\nopen('seen', 'w').write(str((sys.stdin, sys.stdout, sys.stderr)))")
    script = {"script from standard input": "-", "script from a pipe": "/dev/stdin"}.get(name, "script.py")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NANGUARD", "PYTHON", "PYTEST"))}
    ended = []
    for guard in ([], ["-m", "hf_nanguard.run", "--"]):
        command = shell.format(shlex.join([sys.executable, *guard, script]))
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
            env={**kept, **variables},
        )  # fmt: skip
        told = [line for line in done.stderr.splitlines() if not line.startswith("nanguard: ")]
        ended.append((done.returncode, ADDRESS.sub("", done.stdout), told, (tmp_path / "seen").read_text()))
    assert ended[0] == ended[1]


# ---- the sitecustomize of the machine or the user ----

SITES = {
    "sound": "import sys\nsys.of_the_machine = 1\nprint('site')",
    "broken": "import sys\nsys.of_the_machine = 1\nraise ValueError('broken')",
    "syntax error": "x = (",
    "missing import": "import no_such_module_of_a_site",
    "missing itself": "raise ImportError('gone', name='sitecustomize')",
    "ends the process": "raise SystemExit(3)",
    "prints what it sees": "import sys\nprint(sys.path, __name__, __file__, sys.modules['sitecustomize'].__dict__ is globals())",
}


@pytest.mark.parametrize("name", SITES)
def test_the_users_own_sitecustomize_runs_as_usual(name, place, tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(SITES[name])
    look = "import sys\nprint(getattr(sys, 'of_the_machine', None), 'sitecustomize' in sys.modules)\n"
    child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {look!r}])\n"
    script = write(place, f"{look}{child}")
    stock = run([script], place, guard=False, PYTHONPATH=str(site))
    variables = build_environment({"PYTHONPATH": str(site)}, {}, False)
    guarded = run([script], place, guard=False, **variables)
    if name == "ends the process":  # with a traceback of Python's own start
        assert (guarded[:2], guarded[2][0]) == (stock[:2], stock[2][0])
    else:
        assert guarded == stock
        _, out, _ = run(["-c", "import sys; print(type(sys.meta_path[0]).__name__)"], place, guard=False, **variables)
        assert out.splitlines()[-1] == "ImportHook"  # guarded whatever the site does


# ---- child processes ----

HOOKED = "import sys; print(type(sys.meta_path[0]).__name__, flush=True)"
CHILDREN = {
    "subprocess": f"subprocess.run([sys.executable, '-c', {HOOKED!r}])",
    "shell": f"subprocess.run(shlex.join([sys.executable, '-c', {HOOKED!r}]), shell=True)",
    "system": f"os.system(shlex.join([sys.executable, '-c', {HOOKED!r}]))",
    "copied environment": f"subprocess.run([sys.executable, '-c', {HOOKED!r}], env={{**os.environ, 'A': '1'}})",
    "another folder": f"subprocess.run([sys.executable, '-c', {HOOKED!r}], cwd='/')",
    "grandchild": "subprocess.run([sys.executable, 'child.py'])",
    "spawn": "start('spawn')",
    "forkserver": "start('forkserver')",
    "fork": "start('fork')",
}
NOT_GUARDED = {
    "empty environment": f"subprocess.run([sys.executable, '-c', {HOOKED!r}], env={{}})",
    "isolated": f"subprocess.run([sys.executable, '-I', '-c', {HOOKED!r}])",
    "without site": f"subprocess.run([sys.executable, '-BS', '-c', {HOOKED!r}])",
    "executed": f"os.execve(sys.executable, [sys.executable, '-c', {HOOKED!r}], {{}})",
    "own variables removed": f"os.environ.clear(); subprocess.run([sys.executable, '-c', {HOOKED!r}])",
}
HEAD = """
import multiprocessing, os, shlex, subprocess, sys
def work(): print(type(sys.meta_path[0]).__name__, flush=True)
def start(how):
    process = multiprocessing.get_context(how).Process(target=work)
    process.start()
    process.join()
if __name__ == "__main__":
    """


@pytest.mark.parametrize(("name", "is_guarded"), [(n, True) for n in CHILDREN] + [(n, False) for n in NOT_GUARDED])
def test_children_are_guarded_or_it_is_said(name, is_guarded, tmp_path):
    write(tmp_path, f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {HOOKED!r}])", "child.py")
    script = write(tmp_path, HEAD + (CHILDREN if is_guarded else NOT_GUARDED)[name])
    done = subprocess.run(
        [sys.executable, "-m", "hf_nanguard.run", script], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert ("ImportHook" in done.stdout) == is_guarded
    assert done.stdout.count("\n") == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("nanguard: a child process is started with")]
    assert len(told) == (not is_guarded)


def test_programs_that_are_not_python_are_no_concern(tmp_path):
    script = write(
        tmp_path, "import subprocess\nsubprocess.run(['true'], env={})\nsubprocess.run(['sleep', '0'], env={})"
    )
    command = [sys.executable, "-m", "hf_nanguard.run", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, "child process" in done.stderr) == (0, False)


# ---- the guard itself cannot be what fails ----


def test_an_error_output_that_is_full(tmp_path):
    script = write(tmp_path, "print('out')")
    for command in ([sys.executable, script], [sys.executable, "-m", "hf_nanguard.run", script]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, cwd=tmp_path, timeout=60)
        assert (done.returncode, done.stdout) == (0, "out\n")


FAKE = """
import sys
import transformers.trainer
print(transformers.trainer.Trainer.__name__)
"""


@pytest.mark.parametrize(
    "passed",
    ["", "1", "1 {", "1 []", '1 {"settings": 7}', '1 {"settings": {"nanguard_mode": "x"}, "full_traceback": false}',
     '1 {"settings": {"other": 1}, "full_traceback": false}'],
)  # fmt: skip
def test_a_forged_variable_does_not_end_an_import(passed, tmp_path):
    """transformers is a small package of that name here, so that nothing heavy is imported."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").touch()
    (tmp_path / "transformers" / "trainer.py").write_text("class Trainer: pass\n")
    environment = {**build_environment({"PYTHONPATH": str(tmp_path)}, {}, False), VARIABLE: passed}
    code, out, _ = run([write(tmp_path, FAKE)], tmp_path, guard=False, **environment)
    assert (code, out) == (0, "Trainer\n")
