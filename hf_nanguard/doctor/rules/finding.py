"""What the doctor finds, and the form of a rule."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace

from ...core.vocabulary import StrEnum
from ...plain_text import show
from .run_facts import Facts

DOCS = "docs/doctor.md"


class Severity(StrEnum):
    """How bad a finding is. A sound configuration has nothing above `note`."""

    ERROR = "error"  # the run fails, or what it trains is wrong
    WARNING = "warning"  # the run will most likely be unstable or learn badly
    NOTE = "note"  # good to know

    @property
    def is_problem(self) -> bool:
        """Whether it is above a note."""
        return self is not Severity.NOTE


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a configuration or its data."""

    severity: Severity
    what: str  # with the names and values of the settings
    why: str  # that is bad, with numbers
    change: str  # what to change
    rule: str = ""  # the rule, check or law that found it
    reference: str = ""  # where more about it can be read
    rows: tuple[int, ...] = ()  # of the dataset it is about, if it is about some

    def shown(self, text: bool = True) -> "Finding":
        """Returns it with quoted text of the data as it is, or, without `text`, left out."""
        return replace(self, what=show(self.what, text), why=show(self.why, text), change=show(self.change, text))

    def format_line(self) -> str:
        """Returns the finding in one line of a log."""
        return f"{self.what} {self.why} {self.change} [{self.rule}]"

    def as_dict(self) -> dict[str, object]:
        """Returns the fields as JSON values."""
        return {**asdict(self), "severity": str(self.severity), "rows": list(self.rows)}


def rank(findings: Iterable[Finding]) -> list[Finding]:
    """Returns findings, the worst first."""
    return sorted(findings, key=lambda found: list(Severity).index(found.severity))


def error(what: str, why: str, change: str) -> Finding:
    """Returns a finding of the highest severity, still without the name of its rule."""
    return Finding(Severity.ERROR, what, why, change)


def warning(what: str, why: str, change: str) -> Finding:
    """Returns a warning, still without the name of its rule."""
    return Finding(Severity.WARNING, what, why, change)


def note(what: str, why: str, change: str) -> Finding:
    """Returns a note, still without the name of its rule."""
    return Finding(Severity.NOTE, what, why, change)


@dataclass(frozen=True)
class Rule:
    """One rule over plain facts."""

    name: str  # by which `--skip` can leave it out
    topic: str  # `precision`, `hyperparameters` or `resources`
    about: str  # what it checks, as it is listed when it was found sound
    needs: tuple[str, ...]  # the facts that must be known; otherwise the rule is not applied
    check: Callable[[Facts], Finding | None]  # returns a finding, `None` if all is well
    reference: str = ""  # where more about it can be read; its section of the documentation by default

    def applies(self, facts: Facts) -> bool:
        """Returns whether all facts it needs are known."""
        return all(getattr(facts, name) is not None for name in self.needs)

    def judge(self, facts: Facts) -> Finding | None:
        """Returns its finding with its name on it."""
        found = self.check(facts)
        return found and replace(found, rule=self.name, reference=self.reference or f"{DOCS}#{self.topic}")


@dataclass
class Examination:
    """The result of a stage: what was found, what was found sound, and what could not be checked."""

    findings: list[Finding] = field(default_factory=list)
    sound: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def add(self, other: "Examination") -> None:
        """Takes over the result of another examination; the same is reported once."""
        known = {(found.rule, found.what) for found in self.findings}
        self.findings += [found for found in other.findings if (found.rule, found.what) not in known]
        found = {found.rule for found in self.findings}
        self.sound = [name for name in dict.fromkeys([*self.sound, *other.sound]) if name not in found]
        done = {*found, *self.sound}
        self.unchecked = [name for name in dict.fromkeys([*self.unchecked, *other.unchecked]) if name not in done]

    @property
    def ranked(self) -> list[Finding]:
        """All findings, the worst first."""
        return rank(self.findings)

    @property
    def problems(self) -> list[Finding]:
        """The findings above a note."""
        return [found for found in self.findings if found.severity.is_problem]


class Examined:
    """What has an examination: the findings of it, and whether there is nothing above a note."""

    examination: Examination

    @property
    def findings(self) -> list[Finding]:
        """All findings, the worst first."""
        return self.examination.ranked

    @property
    def is_sound(self) -> bool:
        """Whether there is nothing above a note."""
        return not self.examination.problems
