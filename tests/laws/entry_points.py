"""Finds the calls of a host into the guard by watching a run, and makes some of them fail in another."""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hf_nanguard

PACKAGE = f"{Path(hf_nanguard.__file__).parent}/"
# The boundary itself, and what puts an override into a class.
SHIMS = ("boundary.py", "hf/trainer/guarded_class.py", "hf/callbacks/harmless_callback.py")
BUILDING = (
    "GuardedTrainerMixin.begin_guarding",
    "ReinforcementMixin.begin_guarding",
)  # where a guard gets its boundary
# Functions that a host calls and that only pass on: to the user's own, and to the boundary; or that only return a class.
FORWARDERS = (
    "CheckedCollator.__call__", "Hook.__call__", "NumericalStabilityLogitsProcessor.__call__", "ObservedIndices.__next__",
    "ObservedSampler.__iter__", "Override.__call__", "_Bounding.__torch_function__", "_received.<locals>.receive_next",
    "_wrap.<locals>.call", "attached_class.<locals>.<lambda>", "deferred_rotation.<locals>.<lambda>",
    "Inert.__new__", "Inert.__setstate__",  # of a reader to which any error is a damaged file
    "GuardedTrainerMixin.train.<locals>.<genexpr>",  # its last resumption closes it, where Python drops any error
)  # fmt: skip
# Who calls parts of the guard behind the boundary.
CALLERS = ("boundary.py", "hf/trainer/mixin.py", "hf/rl/rl_mixin.py")
TESTS = str(Path(__file__).parents[1]) + "/"
# Decorators, context managers and generated constructors between a caller and what it calls.
BETWEEN = ("/contextlib.py", "/functools.py", "/torch/utils/_contextlib.py", "<string>")


@dataclass(frozen=True, order=True)
class Entry:
    """A function of the guard, by file and qualified name."""

    file: str
    name: str
    is_generator: bool = False

    @classmethod
    def of(cls, code: CodeType) -> "Entry":
        return cls(code.co_filename.removeprefix(PACKAGE), code.co_qualname, bool(code.co_flags & 0x20))

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"


def find_caller(frame: FrameType) -> str:
    """Returns the file of the code that called a function."""
    back = frame.f_back
    while back is not None and back.f_code.co_filename.endswith(BETWEEN):
        back = back.f_back
    return "" if back is None else back.f_code.co_filename


def is_entry(entry: Entry, caller: str) -> bool:
    """Returns whether a call is one of a host into the guard, or the first behind the boundary."""
    if entry.file in SHIMS or entry.name in BUILDING + FORWARDERS or ".__init__" in entry.name:
        return False
    return caller.removeprefix(PACKAGE) in CALLERS if caller.startswith(PACKAGE) else not caller.startswith(TESTS)


@contextmanager
def watched_entries() -> Iterator[set[Entry]]:
    """Collects the functions of the guard that a host calls, or that are called right behind the boundary."""
    found: set[Entry] = set()

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if is_entry(Entry.of(code), find_caller(frame)):
            found.add(Entry.of(code))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(before)


@contextmanager
def failing(
    entries: Collection[Entry], make_error: Callable[[], BaseException], after: int = 0
) -> Iterator[set[Entry]]:
    """Makes functions raise whenever they are called, or resumed if they are generators, except the first `after` times. Collects
    those that did.

    Python ends a trace whose function raises; a profile, until its next event, begins it again.
    """
    raised: set[Entry] = set()
    num_calls: Counter[Entry] = Counter()
    known: dict[CodeType, Entry | None] = {}  # a trace runs at every call, so that it must be quick

    def find(code: CodeType) -> Entry | None:
        entry = Entry.of(code)
        known[code] = entry if code.co_filename.startswith(PACKAGE) and entry in entries else None
        return known[code]

    def trace(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        entry = known[code] if code in known else find(code)
        if entry is not None:
            num_calls[entry] += 1
            if num_calls[entry] > after:
                raised.add(entry)
                sys.setprofile(begin_again)
                raise make_error()

    def begin_again(frame: FrameType, event: str, arg: Any) -> None:
        if sys.gettrace() is None:
            sys.setprofile(before[1])
            sys.settrace(trace)

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    try:
        yield raised
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])
