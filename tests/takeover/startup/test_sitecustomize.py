"""A module is handed over at its first import, before anybody else has it."""

import importlib
import inspect
import sys

import pytest

from hf_nanguard.takeover.startup.sitecustomize import ImportHook, Process, find_flags


@pytest.fixture
def awaited(tmp_path, monkeypatch):
    """Yields the names seen and puts a module, and one that fails, on the path."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "arriving.py").write_text("value = 1\n")
    (tmp_path / "user_of_it.py").write_text("from arriving import value\n")
    (tmp_path / "failing.py").write_text("raise KeyError('not yet')\n")
    yield
    for name in ("arriving", "user_of_it", "failing"):
        sys.modules.pop(name, None)


def change(module):
    module.value += 1


def test_it_is_changed_before_anybody_has_it(awaited):
    hook = ImportHook("arriving", change)
    sys.meta_path.insert(0, hook)
    assert importlib.import_module("user_of_it").value == 2
    module = sys.modules["arriving"]
    assert hook not in sys.meta_path
    assert "value = 1" in inspect.getsource(module)
    assert "exec_module" not in vars(module.__loader__)
    assert importlib.reload(module).value == 1


def test_one_who_no_longer_waits_gets_nothing(awaited):
    hook = ImportHook("arriving", change)
    sys.meta_path.insert(0, hook)
    sys.meta_path.remove(hook)
    assert importlib.import_module("arriving").value == 1


def test_an_import_that_fails_is_awaited_again(awaited):
    seen = []
    hook = ImportHook("failing", seen.append)
    sys.meta_path.insert(0, hook)
    with pytest.raises(KeyError, match="not yet"):
        importlib.import_module("failing")
    assert (seen, hook in sys.meta_path) == ([], True)


def test_a_missing_module_is_missing(awaited):
    sys.meta_path.insert(0, ImportHook("no_such_module", change))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module")


@pytest.mark.parametrize(
    ("event", "values"),
    [
        ("subprocess.Popen", ("python", ["python", "x.py"], None, {"A": "1"})),
        ("subprocess.Popen", (b"python3.11", [b"python3.11", b"x.py"], None, {b"A": b"1"})),
        ("subprocess.Popen", ("/bin/sh", ["/usr/bin/torchrun", "x.py"], None, {})),
        ("os.posix_spawn", ("/usr/bin/python", ["python"], {})),
        ("os.exec", ("/usr/bin/python", ("python", "-E", "x.py"), None)),
    ],
)
def test_a_child_out_of_reach_is_said_once(event, values, capsys):
    process = Process()
    process.watch_children(event, values)
    process.watch_children(event, values)
    assert capsys.readouterr().err.count("nanguard: a child process is started") == 1


@pytest.mark.parametrize(
    ("event", "values"),
    [
        ("open", ("python", "r", 0)),
        ("subprocess.Popen", ("git", ["git", "log"], None, {})),
        ("subprocess.Popen", (None, 7, None, {})),
        ("subprocess.Popen", ("python", ["python", "x.py", "-E", "-S"], None, {"HF_NANGUARD_RUN": ""})),
        ("subprocess.Popen", (object(), object(), object(), object())),
        ("os.exec", ()),
    ],
)
def test_nothing_else_is_said_or_raised(event, values, capsys):
    Process().watch_children(event, values)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("python script.py -O", []),
        ("python -m module -O", []),
        ("python -c code -O", []),
        ("python -O -B -m module", ["-O", "-B"]),
        ("python -OBm module", ["-OB"]),
        ("python -W error -Xutf8 -X dev -u script.py", ["-W", "error", "-Xutf8", "-X", "dev", "-u"]),
        ("python", []),
    ],
)
def test_flags_of_python(words, flags):
    assert find_flags(words.split()) == flags
