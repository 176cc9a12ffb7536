"""What a scan finds in the files of a checkpoint."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..core.vocabulary import StrEnum
from ..plain_text import printable


class Problem(StrEnum):
    """The closed list of what can be wrong with a file or a tensor."""

    DAMAGED = "damaged"  # a file that cannot be read: truncated, hostile, of another format
    INCOMPLETE = "incomplete"  # files are missing, or the save was interrupted
    NAN = "nan"
    INF = "inf"
    NEAR_LIMIT = "near_limit"  # more than half of the largest number of the dtype
    HUGE = "huge"  # a weight that no healthy model has
    ALL_ZERO = "all_zero"
    UNTIED_HEAD = "untied_head"
    FOREIGN_OBJECTS = "foreign_objects"
    OVERFLOW = "overflow"  # in the dtype of `--as`
    UNDERFLOW = "underflow"
    DENORMAL = "denormal"
    UNINITIALIZED_ROWS = "uninitialized_rows"


UNUSABLE = frozenset({Problem.DAMAGED, Problem.INCOMPLETE})
NONFINITE = frozenset({Problem.NAN, Problem.INF})
NOT_GOOD = UNUSABLE | NONFINITE


@dataclass(frozen=True)
class ScanFinding:
    """One problem of one file or tensor."""

    problem: Problem
    file: str  # or folder, relative to the path that was scanned
    tensor: str | None  # `None` if it is the file as a whole; without a name if the file holds only one tensor
    message: str  # the rest of a sentence that begins with the tensor or the file; safe to print

    def __str__(self) -> str:
        place = f"{self.file}: {self.tensor}" if self.tensor else self.file
        return printable(f"{place} {self.message}")


@dataclass
class ScanResult:
    """The result of scanning one checkpoint, model folder or file."""

    path: Path  # what was scanned
    findings: list[ScanFinding] = field(default_factory=list)  # what is wrong with it
    notes: list[str] = field(default_factory=list)  # what is not wrong, e.g. tensors that could not be checked
    num_files: int = 0  # that were checked
    num_tensors: int = 0
    num_bytes: int = 0

    def count_file(self) -> None:
        self.num_files += 1

    def count_tensors(self, num_tensors: int, num_bytes: int) -> None:
        self.num_tensors += num_tensors
        self.num_bytes += num_bytes

    @property
    def is_good(self) -> bool:
        """Whether it can be resumed from: complete, readable, without NaN and inf."""
        return not any(finding.problem in NOT_GOOD for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """0 if nothing was found, 2 if something cannot be used at all, 1 otherwise."""
        if any(finding.problem in UNUSABLE for finding in self.findings):
            return 2
        return 1 if self.findings else 0

    @property
    def why_not_good(self) -> str:
        """The first reason why it cannot be resumed from, and how many more there are."""
        reasons = [str(finding) for finding in self.findings if finding.problem in NOT_GOOD]
        more = f" ({len(reasons) - 1} more)" if len(reasons) > 1 else ""
        return reasons[0] + more if reasons else "nothing is wrong with it"

    def accept(self, tensors: Collection[str]) -> None:
        """Turns findings of NaN and inf in tensors that are so by design into notes."""
        for finding in [each for each in self.findings if each.problem in NONFINITE and each.tensor in tensors]:
            self.findings.remove(finding)
            self.notes.append(f"{finding}, by design")

    def as_dict(self) -> dict[str, object]:
        """Returns the result as plain values for JSON."""
        findings = [
            {"problem": str(each.problem), "file": each.file, "tensor": each.tensor, "message": each.message}
            for each in self.findings
        ]
        counts = {"num_files": self.num_files, "num_tensors": self.num_tensors, "num_bytes": self.num_bytes}
        return {"path": str(self.path), "good": self.is_good, **counts, "findings": findings, "notes": self.notes}


def worst_exit_code(results: Iterable[ScanResult]) -> int:
    """Returns the exit code for several results."""
    return max((result.exit_code for result in results), default=0)
