"""Free host memory: of the machine, of a container, and of each of several processes."""

import pytest

from hf_nanguard.core.rerun import host_memory
from hf_nanguard.core.rerun.host_memory import find_free_memory, find_free_share


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(host_memory, "MEMORY", tmp_path / "MEMORY")
    missing = tmp_path / "missing", tmp_path / "missing"
    monkeypatch.setattr(host_memory, "CGROUPS", (missing, (tmp_path / "GROUP_LIMIT", tmp_path / "GROUP_USE")))
    (tmp_path / "MEMORY").write_text("MemTotal:  900 kB\nMemAvailable:  500 kB\n")
    return tmp_path


def test_what_the_machine_has(files):
    assert find_free_memory() == 500 * 1024


@pytest.mark.parametrize(("limit", "free"), [("max", 500 * 1024), ("3000", 1000), ("1000", 0)])
def test_a_container_may_have_less(files, limit, free):
    (files / "GROUP_LIMIT").write_text(f"{limit}\n")
    (files / "GROUP_USE").write_text("2000\n")
    assert find_free_memory() == free


def test_processes_of_one_machine_share_it(files, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert find_free_share() == 125 * 1024


@pytest.mark.parametrize("text", [None, "MemTotal:  900 kB\n"])
def test_a_system_that_does_not_say(files, text):
    (files / "MEMORY").unlink()
    if text is not None:
        (files / "MEMORY").write_text(text)
    assert find_free_memory() is None
