"""The writer of all files: only regular ones, never through a link, whole lines, private from the first moment on."""

import errno
import os
import resource
import stat
import subprocess
import sys
import time

import pytest

from hf_nanguard.safe_files import (
    DAY,
    append_line,
    draft_of,
    find_machine,
    make_folder,
    read_file,
    remove_drafts,
    write_file,
)

WRITERS = {"append": append_line, "replace": write_file}


def plant_odd(kind, path):
    """Puts something that is not a regular file in the place of one; returns a function that says whether it was harmed."""
    victim = path.with_name("victim")
    victim.write_bytes(b"precious")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(victim)
    elif kind == "dangling link":
        path.symlink_to(path.with_name("nobody"))
    elif kind == "device":
        path.symlink_to("/dev/full")
    before = path.lstat()
    return lambda: (
        victim.read_bytes() == b"precious"
        and not path.with_name("nobody").exists()
        and stat.S_IFMT(path.lstat().st_mode) == stat.S_IFMT(before.st_mode)
    )


ODD = ("pipe", "folder", "link", "dangling link", "device")


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def loose_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_only_regular_files_are_written(write, kind, tmp_path):
    path = tmp_path / "file"
    is_unharmed = plant_odd(kind, path)
    with pytest.raises(OSError, match="Is a directory" if kind == "folder" else "not a regular file"):
        write(path, b"line\n")
    assert is_unharmed()
    assert not list(tmp_path.glob(".*")), "no draft is left"


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_only_regular_files_are_read(kind, tmp_path):
    plant_odd(kind, tmp_path / "file")
    with pytest.raises(OSError, match="Is a directory" if kind == "folder" else "not a regular file"):
        read_file(tmp_path / "file", 100)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * (2**20 + 1))
    assert len(read_file(tmp_path / "file", 2**20 + 1)) == 2**20 + 1
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        read_file(tmp_path / "file", 2**20)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_modes_are_those_of_the_owner_or_of_the_umask(write, tmp_path, loose_umask):
    write(tmp_path / "mine", b"a\n", private=True)
    write(tmp_path / "ours", b"a\n")
    make_folder(tmp_path / "a" / "private", private=True)
    make_folder(tmp_path / "a" / "shared")
    assert [mode_of(tmp_path / name) for name in ("mine", "ours")] == [0o600, 0o644]
    assert [mode_of(tmp_path / "a" / name) for name in ("", "private", "shared")] == [0o755, 0o700, 0o755]


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_modes_are_set_at_creation(write, tmp_path, monkeypatch):
    """A file system without modes is accepted, and a file is at no moment readable for others."""
    for name in ("chmod", "fchmod"):
        monkeypatch.setattr(os, name, lambda *args, **kwargs: pytest.fail("a mode was changed"))
    write(tmp_path / "file", b"a\n", private=True)
    assert mode_of(tmp_path / "file") == 0o600


def test_a_line_is_one_write(tmp_path, monkeypatch):
    written = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: written.append(data) or write(descriptor, data))
    append_line(tmp_path / "file", b"x" * 100_000 + b"\n")
    assert [len(data) for data in written] == [100_001]


def test_a_line_that_a_full_disk_cuts_is_taken_back(tmp_path):
    path = tmp_path / "file"
    append_line(path, b"first\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # writes beyond it are short, as on a full disk
    try:
        with pytest.raises(OSError, match="No space left on device"):
            append_line(path, b"second\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"first\n"
    append_line(path, b"third\n")
    assert path.read_bytes() == b"first\nthird\n"


def test_what_another_process_appended_meanwhile_is_not_taken_back(tmp_path, monkeypatch):
    path, write = tmp_path / "file", os.write

    def write_half(descriptor, data):
        half = write(descriptor, data[:3])
        with path.open("ab") as other:
            other.write(b"other\n")
        return half

    monkeypatch.setattr(os, "write", write_half)
    with pytest.raises(OSError, match="No space left"):
        append_line(path, b"second\n")
    assert path.read_bytes() == b"secother\n"


def test_a_cut_last_line_is_ended_first(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"first\nsec")
    append_line(path, b"third\n")
    assert path.read_bytes() == b"first\nsec\nthird\n"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_replacement_that_fails_leaves_the_old_file(error, tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_file(path, b"old")

    def fail(*args):
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(error)):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_drafts_of_processes_that_have_ended_are_removed(tmp_path):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, check=True)
    owners = (int(ended.stdout), os.getpid(), os.getppid(), "x")
    drafts = {owner: tmp_path / f".a.{find_machine()}-{owner}.partial" for owner in owners}
    for draft in drafts.values():
        draft.mkdir()
        (draft / "content").touch()
    (tmp_path / "victim").mkdir()
    (tmp_path / f".link.{find_machine()}-999999999.partial").symlink_to(tmp_path / "victim")
    (tmp_path / "a.999999999.partial").touch()  # not hidden: not ours
    remove_drafts(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([drafts[os.getppid()].name, drafts["x"].name, "a.999999999.partial", "victim"])


def test_a_draft_of_another_machine_is_left_for_a_day(tmp_path):
    """Its process may be running there, although no process has that number here."""
    drafts = [tmp_path / f".{name}.0123456789ab-999999999.partial" for name in ("young", "old")]
    for draft in drafts:
        draft.touch()
    os.utime(drafts[1], (0, time.time() - 2 * DAY))
    remove_drafts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [drafts[0].name]


def test_a_draft_names_where_its_process_runs(tmp_path, monkeypatch):
    here = draft_of(tmp_path / "state.json").name
    find_machine.cache_clear()
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]")
    assert draft_of(tmp_path / "state.json").name != here
    find_machine.cache_clear()


def test_a_draft_lies_beside_its_target(tmp_path):
    assert draft_of(tmp_path / "state.json").parent == tmp_path
