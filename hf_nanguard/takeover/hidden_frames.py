"""Tracebacks of a guarded script without the frames of the guard, as the script would show them without it."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ..errors import NanGuardError

PACKAGE = str(Path(__file__).parent.parent) + os.sep


def hide_in_tracebacks(say: Callable[[str], None]) -> None:
    """Hides the guard's frames when Python shows an uncaught error, unless the script has a hook of its own."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        num_hidden = hide_frames(error, set())
        sys.__excepthook__(kind, error, error.__traceback__)
        if num_hidden:
            frames = f"{num_hidden} frame{'' if num_hidden == 1 else 's'}"
            say(f"{frames} of the guard hidden above; --full-traceback shows all.")

    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = show


def hide_frames(error: BaseException | None, seen: set[int]) -> int:
    """Removes the guard's frames from the tracebacks of an error and of its causes, and returns how many.

    All frames stay if the error is a bug of the guard: it came from the guard's code and is none that the guard raises on purpose.
    """
    if error is None or id(error) in seen:
        return 0
    seen.add(id(error))
    frames, entry = [], error.__traceback__
    while entry is not None:
        frames.append(entry)
        entry = entry.tb_next
    ours = [frame.tb_frame.f_code.co_filename.startswith(PACKAGE) for frame in frames]
    is_bug = ours[-1:] == [True] and not isinstance(error, NanGuardError)
    kept = [frame for frame, own in zip(frames, ours, strict=True) if not own or is_bug]
    for frame in reversed(kept):
        entry = TracebackType(entry, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = entry
    hidden = len(frames) - len(kept)
    return hidden + hide_frames(error.__cause__, seen) + hide_frames(error.__context__, seen)
