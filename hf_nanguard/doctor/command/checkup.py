"""The result of `nanguard doctor`: its stages, what each found, and the exit code."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from ...core.event import strict
from ...errors import ArgumentError
from ...plain_text import first_line
from ..config_check import ConfigReport
from ..rules.finding import Examination, Finding, Severity, rank
from ..rules.precision_sources import Source

STAGES = ("rules", "data", "laws", "steps")
"""In the order in which they run: from cheap to expensive."""


@dataclass
class Stage:
    name: str  # one of `STAGES`
    examination: Examination = field(default_factory=Examination)
    seconds: float = 0.0
    problem: str | None = None  # why it could not run
    details: dict[str, object] = field(default_factory=dict)  # what else it measured, for `--json`


def run_stage(name: str, examine: Callable[[Stage], None]) -> Stage:
    """Runs a stage and measures its time. Bad arguments are a reason why it could not run."""
    stage, begin = Stage(name), time.perf_counter()
    try:
        examine(stage)
    except ArgumentError as error:
        stage.problem = first_line(error)
    stage.seconds = time.perf_counter() - begin
    return stage


@dataclass
class Checkup:
    """All stages that were asked for, in their order."""

    stages: list[Stage] = field(default_factory=list)
    precision: list[Source] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """The findings of all stages, the worst first."""
        return rank(each for stage in self.stages for each in stage.examination.findings)

    @property
    def exit_code(self) -> int:
        """1 if anything above a note was found, else 0."""
        return int(any(found.severity.is_problem for found in self.findings))

    def count(self, severity: Severity) -> int:
        """Returns the number of findings of a severity."""
        return sum(found.severity is severity for found in self.findings)

    def keep_findings(self) -> None:
        """Keeps nothing but findings of the stages so far, because another one judges the same with more knowledge."""
        examinations = [Examination(stage.examination.findings) for stage in self.stages]
        pairs = zip(self.stages, examinations, strict=True)
        self.stages = [replace(stage, examination=found) for stage, found in pairs if found.findings]

    def add_config(self, stage: Stage, report: ConfigReport) -> None:
        """Takes what rules said and no stage did before; the sources of the precision are those of the newest report."""
        known = {found.rule for found in self.findings}
        findings = [found for found in report.examination.findings if found.rule not in known]
        stage.examination.add(replace(report.examination, findings=findings))
        self.precision = report.precision
        self.unjudged = list(dict.fromkeys([*self.unjudged, *report.unjudged]))
        self.remarks = list(dict.fromkeys([*self.remarks, *report.remarks]))

    def as_dict(self) -> dict[str, object]:
        """Returns everything as strict JSON values."""
        return strict({
            "verdict": "sound" if self.exit_code == 0 else "unsound",
            "findings": [found.as_dict() for found in self.findings],
            "precision": [asdict(source) for source in self.precision],
            "unjudged": self.unjudged,
            "remarks": self.remarks,
            "stages": [{
                "name": stage.name, "seconds": round(stage.seconds, 3), "problem": stage.problem,
                "findings": [found.rule for found in stage.examination.findings], "sound": stage.examination.sound,
                "unchecked": stage.examination.unchecked, **stage.details,
            } for stage in self.stages],
        })  # fmt: skip
