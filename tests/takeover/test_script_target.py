"""What is run sees what it would see without us: `sys.argv`, `sys.path`, `__name__`, `__file__`."""

import json
import os
import subprocess
import sys

import pytest

from hf_nanguard import ArgumentError
from hf_nanguard.takeover.script_target import find_target

# Run by Python itself and by us; what it prints must be the same.
LOOK = """
import json, sys
if __name__ == "__main__":
    main = sys.modules["__main__"]
    def function(): pass
    print(json.dumps({"argv": sys.argv, "path0": sys.path[0], "file": __file__, "package": __package__, "own": vars(main) is globals(),
        "spec": __spec__ and __spec__.name, "module": function.__module__, "loader": type(__loader__).__name__, "doc": __doc__,
        "builtins": type(__builtins__).__name__, "names": sorted(name for name in globals() if name[:2] == "__")}))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["before", *sys.path[1:]])
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "look.py").write_text(LOOK)
    (tmp_path / "scripts" / "look").write_text(f"#!/usr/bin/env python3\n{LOOK}")
    package = tmp_path / "looking_package"
    package.mkdir()
    for name in ("__init__.py", "__main__.py", "inner.py"):
        (package / name).write_text("" if name == "__init__.py" else LOOK)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "looking_package"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "words",
    [
        ["scripts/look.py", "--help", "-x", "--", "y"],
        ["scripts/look", "a"],
        ["-m", "looking_package.inner", "--flag"],
        ["-m", "looking_package"],
    ],
    ids=" ".join,
)
def test_it_sees_what_python_would_show_it(place, words, capsys):
    before = (list(sys.argv), list(sys.path), sys.modules["__main__"])
    find_target(words).execute()
    seen = json.loads(capsys.readouterr().out)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, env=environment)
    assert seen == json.loads(done.stdout)
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_a_command_is_run_by_its_entry_point(capsys):
    with pytest.raises(SystemExit) as stop:
        find_target(["nanguard", "--version"]).execute()
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("nanguard ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "needs something to run"),
        (["missing.py"], "No such file or command: missing.py"),
        (["no-such-command"], "command: no-such-command"),
        (["/bin/sh", "-c", "true"], "/bin/sh is not a Python script"),
        (["sh"], "sh is not a Python script"),
        (["folder"], "command: folder"),
        (["-m"], "-m needs the name of a module"),
        (["-m", "no_such_module"], "No module named no_such_module"),
        (["-m", "looking_package.no_such"], "named looking_package.no_such"),
        (["-m", "needs.inner"], "needs no_such_dependency"),
        (["-m", "failing.inner"], "-m failing.inner cannot be imported: ValueError: of the package."),
        (["-m", "importing.inner"], "ImportError: cannot import name 'nothing'"),
        (["-m", ".inner"], "-m .inner cannot"),
        ([sys.executable, "train.py"], "Leave it out"),
    ],
)
def test_what_cannot_be_run(place, words, told):
    (place / "folder").mkdir()
    for name, text in {
        "needs": "import no_such_dependency",
        "failing": "raise ValueError('of the package')",
        "importing": "from os import nothing",
    }.items():
        (place / name).mkdir()
        (place / name / "__init__.py").write_text(text)
    with pytest.raises(ArgumentError) as error:
        find_target(words)
    assert told in str(error.value)
