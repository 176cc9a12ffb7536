"""A child process with limits on memory and time, for work on files that anybody may have written.

Imports only the standard library, so that the parent starts at once.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ..command_exit import handled_signals
from ..core.rerun.host_memory import find_free_memory
from ..errors import ArgumentError

# -P: nothing is imported from the current folder, which may be the bundle's. The root of this package comes last.
START = (
    "-P",
    "-c",
    "import sys; sys.path.append(sys.argv.pop(1)); from hf_nanguard.cli.main import main; sys.exit(main())",
)
ROOT = str(Path(__file__).parents[2])
SHARE = 0.9  # of the free memory
RESERVED = 2 * 2**30  # what the libraries reserve when they are imported, most of it never used


@dataclass(frozen=True)
class Limits:
    """What a process may use."""

    num_bytes: int
    seconds: int

    @classmethod
    def default(cls, seconds: int, num_gib: float | None = None) -> "Limits":
        """Returns the limits for a number of seconds and GiB, by default most of the memory that is free now."""
        wanted = SHARE * find_usable_memory() if num_gib is None else num_gib * 2**30
        return cls(min(int(wanted) + RESERVED, sys.maxsize), seconds)

    def apply(self) -> None:
        """Limits the current process: memory that it writes to, processor time as a second line, and no core files."""
        import resource

        cpu = self.seconds * (os.cpu_count() or 1)
        wanted = {resource.RLIMIT_DATA: self.num_bytes, resource.RLIMIT_CPU: cpu, resource.RLIMIT_CORE: 0}
        for kind, limit in wanted.items():
            hard = resource.getrlimit(kind)[1]
            # The hard limit stays as it was: at the hard limit of time, Linux sends SIGKILL instead of SIGXCPU.
            resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def run_limited(words: Sequence[str], limits: Limits, say: Callable[[str], None]) -> int:
    """Runs the `nanguard` command with these words in a child process and returns its exit code.

    Output goes where that of this process goes. The child ends with this process if that ends by Ctrl-C or a signal. Raises an
    [`ArgumentError`] if it had to be stopped. `say` is called with a sentence if memory cannot be limited on this system.
    """
    can_limit = sys.platform != "win32"
    if not can_limit:
        say("memory is not limited because this system has no resource limits; only time is.")
    command = [sys.executable, *START, ROOT, *words]
    with (
        ending_by_signals(),
        subprocess.Popen(command, preexec_fn=limits.apply if can_limit else None, start_new_session=True) as child,
    ):
        try:
            code = child.wait(limits.seconds)
        except subprocess.TimeoutExpired:
            raise ArgumentError(
                f"The replay was stopped after {limits.seconds} seconds. If you trust the bundle, raise --time-limit."
            ) from None
        finally:
            child.kill()
            child.wait()  # leaving the context after Ctrl-C would not wait
    if code < 0:
        raise ArgumentError(_format_death(-code, limits))
    return code


def _format_death(number: int, limits: Limits) -> str:
    if sys.platform != "win32" and number == signal.SIGXCPU:
        return f"The replay was stopped after {limits.seconds} seconds of all processors. If you trust the bundle, raise --time-limit."
    return (
        f"The replay was ended by {signal.Signals(number).name}, perhaps because it needed more than "
        f"{limits.num_bytes / 2**30:.1f} GiB of memory. If you trust the bundle, raise --memory-limit."
    )


def ending_by_signals() -> AbstractContextManager[None]:
    """Makes SIGTERM and SIGHUP end this process by `SystemExit` inside the context, so that it ends its child too."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    return handled_signals((signal.SIGTERM,) if sys.platform == "win32" else (signal.SIGTERM, signal.SIGHUP), end)


def find_usable_memory() -> int:
    """Returns how many bytes of memory are free, or how many the machine has where that is not known."""
    free = find_free_memory()
    if free is not None:
        return free
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not known either: the check of a model's size is left out
        return sys.maxsize
