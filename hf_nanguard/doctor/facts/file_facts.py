"""What was read of a configuration file, and the findings that are about the file itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...plain_text import printable
from ..rules.finding import Examination, Finding, Severity
from ..rules.run_facts import Facts

MAX_SINGLE = 5  # unknown names that are reported one by one; more are a file of another kind
REFERENCE = "docs/doctor.md#files"


@dataclass
class ConfigFile:
    """What a file or folder says."""

    path: str
    kind: str  # `arguments`, `axolotl`, `llamafactory`, `accelerate`, `deepspeed`, `run` or `trainer`
    facts: Facts  # what the rules can use of it
    unjudged: list[str] = field(default_factory=list)  # names in it that no rule knows
    examination: Examination = field(default_factory=Examination)  # findings about the file itself
    remarks: list[str] = field(default_factory=list)  # how it was understood, where that is not certain

    def report_unknown(self, unknown: Mapping[str, str], reader: str, severity: Severity = Severity.ERROR) -> None:
        """Takes names that no argument has, each with the one that was probably meant, or nothing."""
        if not unknown:
            self.examination.sound.append("unknown-arguments")
            return
        named = [f"{name} (did you mean {near}?)" if near else name for name, near in unknown.items()]
        why = f"{reader} refuses to start with it, or the value you meant to set keeps its default."
        for part in [[each] for each in named] if len(named) <= MAX_SINGLE else [named]:
            form = "an argument" if len(part) == 1 else "arguments"
            what = f"{Path(self.path).name} has {form} that nobody knows: {printable(', '.join(part))}."
            self._add(severity, what, why, "Correct the spelling, or remove it.", "unknown-arguments")

    def report_values(self, bad: Mapping[str, str], values: Mapping[str, object], reader: str) -> None:
        """Takes names whose value no argument takes, each with what it must be."""
        if not bad:
            self.examination.sound.append("argument-values")
            return
        why = f"{reader} refuses to start with it, or trains something else than you meant."
        for name, must in bad.items():
            value = printable(repr(values[name])[:80])
            what = f"{Path(self.path).name} sets {name} to {value}, which cannot be."
            self._add(
                Severity.ERROR,
                what,
                why,
                f"{name} {must}." if must.startswith("must") else f"{must[:1].upper()}{must[1:]}",
                "argument-values",
            )

    def _add(self, severity: Severity, what: str, why: str, change: str, rule: str) -> None:
        self.examination.findings.append(Finding(severity, what, why, change, rule, REFERENCE))


def read_targets(value: object) -> tuple[str, ...] | None:
    """Returns the names of the modules that get an adapter."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(map(str, value)) if isinstance(value, list) else None


def find_scale(rank: float | None, alpha: float | None, is_stabilised: bool | None = False) -> float | None:
    """Returns what the output of a LoRA is multiplied by."""
    if alpha is None or rank is None or rank < 1:
        return None
    return alpha / (rank**0.5 if is_stabilised else rank)
