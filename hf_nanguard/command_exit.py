"""Exit codes of commands and recipes, and the one message for bad arguments and Ctrl-C."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from .errors import ArgumentError
from .harmless_log import nothing_left_in
from .plain_text import cut, printable

IMPOSSIBLE_PATHS = (errno.ENAMETOOLONG, errno.ELOOP)
MAX_PATH = 200  # characters of a path in a message


def exit_code(run: Callable[[], int]) -> int:
    """Returns what `run` returns, 2 for bad arguments, 130 for Ctrl-C; these two are one line on standard error."""
    try:
        return run()
    except (ArgumentError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in IMPOSSIBLE_PATHS:
            raise
        if is_local_first():
            print_error(_format(error))
        return 2
    except KeyboardInterrupt as stop:
        print_error(f"stopped by Ctrl-C; {str(stop) or 'all files written so far are complete'}.")
        return 130


def print_error(text: str) -> None:
    """Prints a message on standard error. It is lost if that cannot be written, and the exit code stays."""
    with nothing_left_in(sys.stderr), suppress(OSError):
        print(f"nanguard: {printable(text)}", file=sys.stderr)


@contextmanager
def handled_signals(numbers: Iterable[int], handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handles signals inside the context, which only the main thread of a process can enter."""
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_local_first() -> bool:
    """Returns whether this is the first rank of its machine, which alone prints what all ranks would print."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _format(error: ArgumentError | OSError) -> str:
    if isinstance(error, ArgumentError) or error.filename is None:
        return str(error)
    return f"{error.strerror}: {cut(os.fsdecode(error.filename), MAX_PATH)}"
