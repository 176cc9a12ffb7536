"""The boundary between a host and the guard: an error behind it costs a part of the guard, never the run.

Whatever a host calls of the guard passes one of these:

    around(part, override, host, ...)     a method of the host, with something of the guard before and after it
    call(part, function, ...)             what only the guard does
    overriding(...), wrapped(...)         the same two as functions, to be put where a host calls them
    inside(part, context)                 code of the host inside a context of the guard
    together(part, function, otherwise)   the same where ranks exchange facts: they fail together or not at all

The other direction is [`attempt`]: the guard calls code that is not its own.

An error that came out of the host's own method belongs to the user's run and passes unchanged, as do the errors that the guard
raises on purpose (`NanGuardError`), those of signal handlers, which come while the guard happens to be running, and everything
that is no `Exception` (Ctrl-C). Any other error is the guard's own: it is reported with its location, and the run continues as
without that part, which is turned off after a few failures.
"""

import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from .errors import NanGuardError
from .plain_text import quote_error

T = TypeVar("T")
U = TypeVar("U")

MAX_FAILURES = 3
PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class RankError(Exception):
    """Another rank could not do its share of what the ranks do together."""


class Agreement(Protocol):
    """The ranks that succeed or fail together."""

    size: int

    def agree(self) -> None:
        """Raises [`RankError`] if another rank has failed. Every rank must call it, or [`Agreement.fail`]."""

    def fail(self) -> None:
        """Takes part in the exchange that the other ranks are waiting in, or will be, and makes it fail there."""


@dataclass(frozen=True)
class GuardFailure:
    """An error inside the guard, as plain values: the error itself would keep the tensors of its frames alive."""

    part: str  # of the guard
    what: str  # the error
    place: str  # the innermost line of the guard that was running, as `hf/trainer/mixin.py:12`
    number: int  # of failures of that part in this run
    is_last: bool  # whether the part is off from now on

    def __str__(self) -> str:
        end = "; it is turned off for the rest of the run" if self.is_last else ""
        return f"{self.part} failed at {self.place} ({self.what}){end}"


def attempt(call: Callable[[], T], failed: Callable[[Exception], U]) -> T | U:
    """Returns `call()`, and `failed(error)` if that raises.

    For a call into code of the user's, a host's or another library's that may raise anything, where the caller can do without
    its result.
    """
    try:
        return call()
    except Exception as error:
        if is_of_a_signal(error):
            raise
        return failed(error)


def is_of_a_signal(error: Exception) -> bool:
    """Returns whether a signal handler has raised an error, such as one that ends a run when its time is over.

    A handler is a function that was called with a number and the frame that it has interrupted. Which handlers are installed says
    less: one that raises has often removed itself before.
    """
    entry = error.__traceback__
    while entry is not None:
        frame = entry.tb_frame
        code, values = frame.f_code, frame.f_locals
        given = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
        if code.co_flags & inspect.CO_VARARGS:
            given += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
        if any(isinstance(one, int) and other is frame.f_back is not None for one, other in pairwise(given)):
            return True
        entry = entry.tb_next
    return False


def find_place(error: Exception) -> str:
    """Returns the innermost line of the guard in the traceback of an error."""
    entry, place = error.__traceback__, "an unknown place"
    while entry is not None:
        file = entry.tb_frame.f_code.co_filename
        if file.startswith(PACKAGE) and file != __file__:
            place = f"{file.removeprefix(PACKAGE).replace(os.sep, '/')}:{entry.tb_lineno}"
        entry = entry.tb_next
    return place


class HostCall:
    """A method of the host as an override calls it. Remembers how it ended, so that it is known whose an error is."""

    def __init__(self, method: Callable[..., object]):
        self.method = method
        self.has_run = False
        self.result: object = None
        self.error: BaseException | None = None

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        self.has_run, self.error = True, None
        try:
            self.result = self.method(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        return self.result


def log_failure(failure: GuardFailure) -> None:
    """Reports an error of the guard where there is no journal."""
    logging.getLogger("hf_nanguard").warning("hf_nanguard: %s.", failure)


class Boundary:
    """Turns errors of the guard into reports."""

    def __init__(self, report: Callable[[GuardFailure], None] = log_failure, ranks: Agreement | None = None):
        self.report = report  # errors in it are ignored, because there is nobody left to tell
        self.ranks = ranks  # if there are several, no override is turned off: other ranks may wait for this one
        self.num_failures: Counter[str] = Counter()
        self.off: set[str] = set()
        self._ending: BaseException | None = None
        self._is_reporting = False

    def begin_run(self) -> None:
        """Turns all parts on again."""
        self.num_failures.clear()
        self.off.clear()

    @contextmanager
    def not_survivable(self, applies: bool = True) -> Iterator[None]:
        """Lets errors inside the block end the run: the other ranks wait in a collective operation of the model, which this
        rank will not reach."""
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            self._ending = error if applies else self._ending
            raise

    def passes(self, error: Exception) -> bool:
        """Returns whether an error ends the run: one that the guard raises on purpose, or one that is not its own."""
        return isinstance(error, NanGuardError) or error is self._ending or is_of_a_signal(error)

    @property
    def is_alone(self) -> bool:
        """Whether no other rank waits for this one."""
        return self.ranks is None or self.ranks.size == 1

    # ---- the three ways in ----

    def around(
        self,
        part: str,
        override: Callable[..., object],
        host: Callable[..., object],
        /,
        *args: object,
        **kwargs: object,
    ) -> Any:
        """Returns `override(call, *args)`, which calls the host's method as `call`; if it fails, what the host returns."""
        if part in self.off:
            return host(*args, **kwargs)
        call = HostCall(host)
        try:
            return override(call, *args, **kwargs)
        except Exception as error:
            if error is call.error or self.passes(error):
                raise
            self.note(part, error, can_turn_off=self.is_alone)
        if call.error is not None:  # which an error of ours has replaced
            raise call.error
        return call.result if call.has_run else host(*args, **kwargs)

    def call(
        self,
        part: str,
        function: Callable[..., T],
        *args: object,
        otherwise: Callable[..., T] | None = None,
        max_failures: int = MAX_FAILURES,
        host: HostCall | None = None,
    ) -> T:
        """Returns `function(*args)`; if it fails or is off, `otherwise(*args)`, without which that is `None`. The function may
        call `host`, whose errors pass."""
        if part not in self.off:
            try:
                return function(*args)
            except Exception as error:
                if self.passes(error) or (host is not None and error is host.error):
                    raise
                self.note(part, error, max_failures)
        return None if otherwise is None else otherwise(*args)  # type: ignore[return-value]

    def wrapped(
        self, part: str, function: Callable[..., T], otherwise: Callable[..., T] | None = None
    ) -> Callable[..., T]:
        """Returns a function for a host to call: `function` as [`Boundary.call`] calls it."""

        @wraps(function)
        def entry(*args: object) -> T:
            return self.call(part, function, *args, otherwise=otherwise)

        return entry

    def overriding(self, part: str, override: Callable[..., object], host: Callable[..., object]) -> Callable[..., Any]:
        """Returns a function for a host to call in place of its own: `override` as [`Boundary.around`] runs it."""

        @wraps(host)
        def entry(*args: object, **kwargs: object) -> object:
            return self.around(part, override, host, *args, **kwargs)

        return entry

    @contextmanager
    def inside(self, part: str, make: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """Runs the block inside a context; if that cannot be made, entered or left, the block runs anyway."""
        context = ExitStack()
        self.call(part, lambda: context.enter_context(make()))
        try:
            yield
        finally:
            self._leave(part, context)

    def _leave(self, part: str, context: ExitStack) -> None:
        """Leaves a context, also if its part was turned off inside."""
        try:
            context.close()
        except Exception as error:
            if self.passes(error):
                raise
            self.note(part, error)

    def together(self, part: str, function: Callable[[], T], otherwise: Callable[[str], U]) -> T | U:
        """Returns `function()` if it succeeds on every rank; if it fails on one, `otherwise(why)` on all of them."""
        why = f"{part} is turned off because it has failed before"
        if part not in self.off:
            try:
                result = function()
                if self.ranks is not None:
                    self.ranks.agree()
                return result
            except RankError:  # reported by that rank
                why = f"{part} failed on another rank"
                self._count(part)
            except Exception as error:
                if self.passes(error):
                    raise
                if self.ranks is not None:
                    self.ranks.fail()
                why = str(self.note(part, error))
        return otherwise(why)

    def note(
        self, part: str, error: Exception, max_failures: int = MAX_FAILURES, can_turn_off: bool = True
    ) -> GuardFailure:
        """Counts and reports an error of the guard. The first few of a part are reported, but not those of a report."""
        number = self._count(part, max_failures if can_turn_off else None)
        failure = GuardFailure(part, quote_error(error), find_place(error), number, part in self.off)
        if number <= max_failures and not self._is_reporting:
            self._is_reporting = True
            try:
                attempt(lambda: self.report(failure), lambda error: None)
            finally:
                self._is_reporting = False
        return failure

    def _count(self, part: str, max_failures: int | None = MAX_FAILURES) -> int:
        self.num_failures[part] += 1
        if max_failures is not None and self.num_failures[part] >= max_failures:
            self.off.add(part)
        return self.num_failures[part]
