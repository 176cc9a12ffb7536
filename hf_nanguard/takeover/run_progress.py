"""How far a supervised run has come, on disk, so that its supervisor knows it even after `kill -9`."""

import json
import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

WIDTH = 20  # digits, so that a step is always overwritten as a whole


@dataclass(frozen=True)
class Progress:
    """A folder with the last step that was begun, the class of the error that ended the process, and where trainings save."""

    folder: str

    def write_step(self, step: int) -> None:
        """Notes that a step begins."""
        self._overwrite("step", f"{step:0{WIDTH}d}")

    def write_error(self, name: str) -> None:
        """Notes the class of an uncaught error."""
        self._overwrite("error", f"{name[:200]}\n")

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

    def _overwrite(self, name: str, text: str, how: int = 0) -> None:
        with suppress(OSError), ExitStack() as stack:  # the supervisor is gone, or the disk is full: the run goes on
            descriptor = os.open(os.path.join(self.folder, name), os.O_WRONLY | os.O_CREAT | how, 0o600)
            stack.callback(os.close, descriptor)
            os.write(descriptor, text.encode(errors="replace"))

    def read_step(self) -> int | None:
        """Returns the last step that was begun, `None` if there was none."""
        text = self._read("step")
        return int(text) if text.isdecimal() else None

    def read_error(self) -> str | None:
        """Returns the class of the error that ended the process, `None` if it ended otherwise."""
        return self._read("error").partition("\n")[0] or None

    def clear(self) -> None:
        """Forgets how an attempt ended, before the next one."""
        for name in ("step", "error"):
            with suppress(OSError):  # there is none, or it cannot be removed
                Path(self.folder, name).unlink()

    def _read(self, name: str) -> str:
        try:
            return Path(self.folder, name).read_text(encoding="utf-8")
        except OSError:
            return ""
