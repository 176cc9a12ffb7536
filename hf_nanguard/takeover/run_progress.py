"""How far a supervised run has come, on disk, so that its supervisor knows it even after `kill -9`."""

import json
import os
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

RANK = "rank-"
LONGEST_WAIT = 1.0  # of a process, until another one that was killed is gone: its connections are closed before
STARTED = time.time()  # what was written before, another process wrote that is no rank of now
EXIT_STATUS = 49  # of a zombie, among the fields after its name
WIDTH = 20  # digits, so that a step is always overwritten as a whole


@dataclass(frozen=True)
class Progress:
    """A folder with the last step that was begun, the class of the first error that ended a process, the processes of ranks, and where trainings save."""

    folder: str

    def write_step(self, step: int) -> None:
        """Notes that a step begins."""
        self._overwrite("step", f"{step:0{WIDTH}d}")

    def begin_rank(self, rank: int) -> None:
        """Notes the process of a rank, in place of one that has ended: a launcher may start all ranks again, and then the error of those
        before is no more the reason. A process that a rank starts itself has the same environment, and is not noted."""
        before = self._read(f"{RANK}{rank}")
        if before and _find_end(before) is None:
            return
        self._overwrite(f"{RANK}{rank}", f"{os.getpid()}\n", os.O_TRUNC)
        error = Path(self.folder, "error")
        with suppress(OSError):  # there is none
            if error.stat().st_mtime < STARTED:
                error.unlink()

    def end_rank(self, rank: int) -> None:
        """Notes that the process of a rank ends by itself."""
        if self._read(f"{RANK}{rank}").strip() == str(os.getpid()):
            with suppress(OSError):
                Path(self.folder, f"{RANK}{rank}").unlink()

    def write_error(self, name: str) -> None:
        """Notes the class of an uncaught error, unless another rank has failed before: those that wait for it then fail as well."""
        ranks = self._list_ranks()
        if not self._overwrite("error", f"{name[:200]}\n", os.O_EXCL if ranks else 0):
            return
        deadline = time.monotonic() + (LONGEST_WAIT if len(ranks) > 1 else 0.0)
        while not (ends := self._find_ends()) and time.monotonic() < deadline:
            time.sleep(0.05)
        killed = next((rank for rank, end in ends.items() if end == "killed"), None)
        gone = next((rank for rank, end in ends.items() if end == "gone"), None)
        if killed is not None:
            self._overwrite("error", f"the sudden end of rank {killed}\n", os.O_TRUNC)
        elif gone is not None:
            self._overwrite("error", f"{name[:200]}; rank {gone} had ended before\n", os.O_TRUNC)

    def _find_ends(self) -> dict[str, str]:
        """Returns the ranks whose processes have ended without a word, and how."""
        ends = {path.name.removeprefix(RANK): _find_end(self._read(path.name)) for path in self._list_ranks()}
        return {rank: end for rank, end in ends.items() if end in ("killed", "gone")}

    def _list_ranks(self) -> list[Path]:
        return sorted(Path(self.folder).glob(f"{RANK}*"))

    def note_folder(self, position: int, folder: str) -> list[str]:
        """Notes where the training at a position of the script saves; returns where it did in earlier attempts, the last first.
        A script may name a new folder each time it starts."""
        before = [json.loads(line) for line in self._read(f"folder-{position}").splitlines()]
        if folder not in before:
            self._overwrite(f"folder-{position}", json.dumps(folder) + "\n", os.O_APPEND)
        return [each for each in reversed(before) if each != folder]

    def begin(self) -> None:
        """Notes that the first attempt begins."""
        self._overwrite("begin", "")

    def is_of_this_run(self, path: Path) -> bool:
        """Returns whether a file was written since the first attempt has begun."""
        try:
            return path.stat().st_mtime >= Path(self.folder, "begin").stat().st_mtime
        except OSError:
            return False

    def _overwrite(self, name: str, text: str, how: int = 0) -> bool:
        """Returns whether it could be written: the supervisor may be gone, or the disk full, and the run goes on."""
        with suppress(OSError), ExitStack() as stack:
            descriptor = os.open(os.path.join(self.folder, name), os.O_WRONLY | os.O_CREAT | how, 0o600)
            stack.callback(os.close, descriptor)
            os.write(descriptor, text.encode(errors="replace"))
            return True
        return False

    def read_step(self) -> int | None:
        """Returns the last step that was begun, `None` if there was none."""
        text = self._read("step")
        return int(text) if text.isdecimal() else None

    def read_error(self) -> str | None:
        """Returns the class of the error that ended the process, or how another rank ended before; `None` if it ended otherwise."""
        return self._read("error").partition("\n")[0] or None

    def clear(self) -> None:
        """Forgets how an attempt ended, before the next one."""
        for path in (Path(self.folder, "step"), Path(self.folder, "error"), *self._list_ranks()):
            with suppress(OSError):  # there is none, or it cannot be removed
                path.unlink()

    def _read(self, name: str) -> str:
        try:
            return Path(self.folder, name).read_text(encoding="utf-8")
        except OSError:
            return ""


def _find_end(process: str) -> str | None:
    """Returns how a process has ended: `killed`, or with an error of its own; `left` if without; `gone` if its parent has noticed already,
    who alone knows; `None` if it has not."""
    if sys.platform == "win32" or not process.strip().isdecimal():  # os.kill would end it there
        return None
    try:
        os.kill(int(process), 0)
        state = Path(f"/proc/{process.strip()}/stat").read_text().rpartition(")")[2].split()
    except ProcessLookupError:
        return "gone"
    except OSError:  # it is somebody else's, or the system has no such files
        return None
    if state[0] not in ("Z", "X"):
        return None
    return "left" if len(state) > EXIT_STATUS and state[EXIT_STATUS] == "0" else "killed"
