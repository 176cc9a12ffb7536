"""Writes and opens the files of a run: no link is followed, nothing blocks, and what is written is there whole or not at all.

Only regular files are opened; a pipe, a device, a folder or a link in their place is an `OSError` whose message says so.
Modes are set when a file is created, so a file is never readable for longer than it should be, and nothing fails on a
file system without modes.
"""

import errno
import hashlib
import os
import platform
import shutil
import stat
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

if sys.platform == "win32":
    NO_BLOCK = NO_FOLLOW = os.O_BINARY
else:
    NO_BLOCK = os.O_NONBLOCK | os.O_CLOEXEC
    NO_FOLLOW = os.O_NOFOLLOW | NO_BLOCK
DRAFT = ".partial"  # ends the name of what is being written; readers ignore it
DAY = 24 * 3600.0


def make_folder(path: Path, private: bool = False) -> None:
    """Makes a folder and those above it; a private one only for its owner. One that exists stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(0o700 if private else 0o777, exist_ok=True)


def append_line(path: Path, line: bytes, private: bool = False) -> None:
    """Appends a line, in one write. After a short write, as on a full disk, the file is as before.

    A last line that a crash has cut is ended first, so that nothing is glued to it.
    """
    descriptor = _open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | NO_FOLLOW, private)
    try:
        size = os.fstat(descriptor).st_size
        if size and _read_byte(descriptor, size - 1) != b"\n":
            line = b"\n" + line
        num_written = os.write(descriptor, line)
        if num_written < len(line):
            end = os.lseek(descriptor, 0, os.SEEK_CUR)
            if os.fstat(descriptor).st_size == end:  # else another process has appended to it
                os.ftruncate(descriptor, end - num_written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes, private: bool = False) -> None:
    """Writes a file whole or not at all: a draft beside it takes its place."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise _not_regular(path)
    draft = draft_of(path)
    with suppress(FileNotFoundError):
        draft.unlink()
    try:
        with os.fdopen(_open_regular(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, private), "wb") as file:
            file.write(content)
        os.replace(draft, path)
    except BaseException:  # also an interrupt: no draft is left behind
        with suppress(OSError):
            draft.unlink()
        raise


def open_to_read(path: Path) -> BinaryIO:
    """Opens a regular file. A link is followed, because reading its target harms nobody."""
    return os.fdopen(_open_regular(path, os.O_RDONLY | NO_BLOCK, False), "rb")


def read_file(path: Path, max_bytes: int) -> bytes:
    """Returns the content of a regular file; a larger one is a `ValueError`."""
    with open_to_read(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"larger than {max_bytes // 2**20} MiB")
    return content


def draft_of(path: Path) -> Path:
    """Returns where this process writes what will become `path`."""
    return path.with_name(f".{path.name}.{find_machine()}-{os.getpid()}{DRAFT}")


@cache
def find_machine() -> str:
    """Returns what tells apart the places in which a process id means something: hosts, containers, and boots of one."""
    known = [platform.node()]
    with suppress(OSError):
        known.append(os.readlink("/proc/self/ns/pid"))
    with suppress(OSError):
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    return hashlib.sha256("\0".join(known).encode("utf-8", "replace")).hexdigest()[:12]


def remove_drafts(folder: Path, names: str = "*") -> None:
    """Removes drafts of processes that have ended: those of a pattern of file names in a folder, if that can be read. Of a process
    of another machine or container it is not known whether it has ended; its draft is removed after a day."""
    try:
        drafts = list(folder.glob(f".{names}{DRAFT}"))
    except OSError:
        return
    for draft in drafts:
        machine, _, owner = draft.name.split(".")[-2].rpartition("-")
        is_ours = machine == find_machine() and owner.isdecimal()
        if (int(owner) != os.getpid() and _is_running(int(owner))) if is_ours else not _is_old(draft):
            continue
        if draft.is_dir() and not draft.is_symlink():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            with suppress(OSError):
                draft.unlink()


def _is_old(draft: Path) -> bool:
    try:
        return time.time() - draft.lstat().st_mtime > DAY
    except OSError:  # somebody else has removed it
        return False


def _open_regular(path: Path, flags: int, private: bool) -> int:
    try:
        descriptor = os.open(path, flags, 0o600 if private else 0o666)
    except OSError as error:
        is_link = error.errno == errno.ELOOP and flags & NO_FOLLOW == NO_FOLLOW
        if is_link or error.errno in (errno.ENXIO, errno.EISDIR, errno.ENODEV):
            raise _not_regular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def _not_regular(path: Path) -> OSError:
    is_folder = path.is_dir() and not path.is_symlink()
    number = errno.EISDIR if is_folder else errno.EINVAL
    return OSError(number, os.strerror(number) if is_folder else "not a regular file", str(path))


def _read_byte(descriptor: int, place: int) -> bytes:
    os.lseek(descriptor, place, os.SEEK_SET)  # appends go to the end anyway
    return os.read(descriptor, 1)


def _is_running(process: int) -> bool:
    if os.name != "posix":  # elsewhere signal 0 ends the process
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        pass
    return True
