"""The guard's logger: a line that cannot be written is lost, and that is all that happens.

Handlers belong to the user, and so does standard error: one may raise, the other may be full, closed or without a reader. No call
in the guard has to think of that, because [`make_harmless`] changes the logger itself.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TextIO, TypeVar

from .plain_text import make_record_printable

T = TypeVar("T")


def make_harmless(logger: logging.Logger) -> None:
    """Makes the lines of a logger printable, and ignores errors of whoever makes records of them or handles these."""
    logger.addFilter(make_record_printable)
    # Its class is the application's choice, as is the factory of records.
    logger.makeRecord = partial(_make_record, logger.makeRecord)  # type: ignore[method-assign]
    logger.handle = partial(_handle, logger.handle)  # type: ignore[method-assign]


def _make_record(make: Callable[..., logging.LogRecord], *args: Any, **kwargs: object) -> logging.LogRecord:
    return _attempt(lambda: make(*args, **kwargs), lambda error: logging.LogRecord(*args[:7]))


def _handle(handle: Callable[[logging.LogRecord], None], record: logging.LogRecord) -> None:
    with nothing_left_in(sys.stderr):
        _attempt(lambda: handle(record), lambda error: None)


def _attempt(call: Callable[[], T], failed: Callable[[Exception], T]) -> T:
    # The boundary is not imported with the package: `python -m hf_nanguard.run` imports that while the script's folder, which may
    # have a dataclasses.py, is still searched first.
    from .boundary import attempt

    return attempt(call, failed)


@contextmanager
def nothing_left_in(stream: TextIO | None) -> Iterator[None]:
    """Drops what the block writes to a stream if it cannot be written: Python would try again at its end, and replace the exit
    code by 120. What was in the stream before stays there."""
    was_empty = stream is not None and _is_flushed(stream)
    yield
    if stream is not None and was_empty:
        drop_unwritten(stream)


def drop_unwritten(stream: TextIO) -> bool:
    """Drops what a stream still holds if it cannot be written; returns whether that was so."""
    if _is_flushed(stream):
        return False
    with suppress(Exception):  # no file, or closed
        _drop_buffer(stream)
    return True


def _is_flushed(stream: TextIO) -> bool:
    try:
        stream.flush()
    except Exception:  # full, closed, or an object of the user's
        return False
    return True


def _drop_buffer(stream: TextIO) -> None:
    """Writes what a stream still holds to nowhere. Python has no other way to empty a buffer."""
    number = stream.fileno()
    real, nowhere = os.dup(number), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, number, inheritable=number <= 2)
        stream.flush()
    finally:
        os.dup2(real, number, inheritable=number <= 2)
        os.close(real)
        os.close(nowhere)
