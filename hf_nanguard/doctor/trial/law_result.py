"""The result of trying one law on a trainer: held, broken (by how much and where), or could not run (why)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..rules.finding import Severity

HELD, BROKEN, COULD_NOT_RUN = "held", "broken", "could not run"
NOTE, WARNING, ERROR = Severity.NOTE, Severity.WARNING, Severity.ERROR


class NotApplicable(Exception):  # noqa: N818 - not an error: the law says nothing about this trainer
    """Raised by a law that cannot be tried on a trainer; its text says why."""


@dataclass(frozen=True)
class LawResult:
    """What became of one law."""

    name: str  # of the law
    status: str  # `"held"`, `"broken"` or `"could not run"`
    severity: Severity  # of a broken law: `error` if the run trains something else than intended; `note` otherwise
    message: str  # by how much and where it is broken, what was compared, or why it could not run
    values: dict[str, object] = field(default_factory=dict)  # the figures of the message
    seconds: float = 0.0


@dataclass(frozen=True)
class Law:
    """A law: its name, what must hold, and the function that tries it and leaves the trainer as it was."""

    name: str
    statement: str
    check: Callable[[Any], LawResult]


def held(message: str, **values: object) -> LawResult:
    return LawResult("", HELD, NOTE, message, values)


def broken(severity: Severity, message: str, **values: object) -> LawResult:
    return LawResult("", BROKEN, severity, message, values)
