"""What can be run, and one sentence for what cannot."""

import sys
from pathlib import Path

import pytest

from hf_nanguard import ArgumentError
from hf_nanguard.takeover.script_target import find_command


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("bin", "empty", "package"):
        (tmp_path / name).mkdir()
    (tmp_path / "package" / "__main__.py").touch()
    for name, text in {
        "script.py": "", "bin/python-command": "#!/usr/bin/env python3\n", "bin/shell-command": "#!/bin/sh\n",
        "look": "#!/usr/bin/python\n", "bin/nanguard": "#!/bin/sh\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["script.py", "--help", "-m"], ["script.py", "--help", "-m"]),
        (["look", "a"], ["look", "a"]),
        (["package"], ["package"]),
        (["-m", "any.module", "a"], ["-m", "any.module", "a"]),
        (["python-command", "a"], ["{place}/bin/python-command", "a"]),
        (["nanguard", "a"], ["-c", "import sys; from hf_nanguard.__main__ import main; sys.exit(main())", "a"]),
    ],
    ids=str,
)
def test_what_can_be_run(place, words, command):
    assert find_command(words) == [word.format(place=place) for word in command]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "needs something to run"),
        (["missing.py"], "No such file or command: missing.py"),
        (["no-such-command"], "command: no-such-command"),
        ([str(Path("bin") / "shell-command")], "shell-command is not a Python script"),
        (["shell-command", "-c", "true"], "shell-command is not a Python script"),
        (["empty"], "command: empty"),
        (["-m"], "-m needs the name of a module"),
        ([sys.executable, "train.py"], "Leave it out"),
    ],
)
def test_what_cannot_be_run(place, words, told):
    with pytest.raises(ArgumentError) as error:
        find_command(words)
    assert told in str(error.value)
