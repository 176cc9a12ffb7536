"""What `nanguard doctor` prints: findings that can be understood without reading code, then what was found sound."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...plain_text import printable
from ...report.terminal_console import print_line
from ...verification.grade import Verification
from ..dataset_check import DATA_CHECKS
from ..rules.finding import Examination, Finding, Severity
from ..rules.precision_sources import Source
from ..rules.rule_set import RULES
from .checkup import Checkup, Stage

STYLES = {
    "error": "bold red",
    "warning": "yellow",
    "note": "cyan",
    "best": "green",
    "acceptable": "yellow",
    "failed": "bold red",
}
INDENT = 9
FILE_RULES = {"unknown-arguments": "names in the file", "argument-values": "values in the file"}
ABOUT = {
    **FILE_RULES,
    **{rule.name: rule.about for rule in RULES},
    **{check.name: check.about for check in DATA_CHECKS},
}


def print_stage(console: Console, stage: Stage) -> None:
    """Prints the name of a stage, its time and its findings."""
    found = len(stage.examination.findings)
    outcome = (
        f"could not run: {stage.problem}"
        if stage.problem
        else f"{found} finding{'' if found == 1 else 's'}"
        if found
        else "sound"
    )
    if "num_checked" in stage.details:
        outcome += f", {stage.details['num_checked']} of {stage.details['num_rows'] or 'a stream of'} rows checked"
    style = "yellow" if stage.problem or found else "green"
    console.print(
        Text.assemble((f"{stage.name}", "bold"), f"  {stage.seconds:.1f} s  ", (printable(outcome), style)),
        soft_wrap=True,
    )
    for finding in stage.examination.ranked:
        print_finding(console, finding)


def print_finding(console: Console, finding: Finding) -> None:
    """Prints one finding in up to four lines."""
    word = str(finding.severity)
    head = Text.assemble(
        "  ", (f"{word:<{INDENT - 2}}", STYLES[word]), " ", printable(finding.what), (f"  [{finding.rule}]", "dim")
    )
    console.print(head, soft_wrap=True)
    for name, text in (("why", finding.why), ("change", finding.change), ("see", finding.reference)):
        if text:
            console.print(Text.assemble(" " * INDENT, (f" {name}: ", "dim"), printable(text)), soft_wrap=True)


def print_precision(console: Console, sources: list[Source]) -> None:
    """Prints every source of the precision with its value, and whether it agrees with the others."""
    if not sources:
        return
    console.print(Text("precision", "bold"))
    for source in sources:
        verdict = (source.verdict, "green" if source.is_aligned else "yellow")
        console.print(Text.assemble(f"  {source.name:<20} {source.value:<28} ", verdict), soft_wrap=True)


def print_quarantined(console: Console, rows: list[int], folder: Path) -> None:
    """Prints which rows a guarded run in this folder will leave out from now on."""
    listed = ", ".join(map(str, rows[:20])) + (", ..." if len(rows) > 20 else "")
    text = f"{len(rows)} new ({listed})" if rows else "nothing new"
    print_line(console, f"quarantine of {folder}: {text}")


def print_grade(console: Console, found: Verification) -> None:
    """Prints the checks of the measured steps, as a table on a terminal and as lines elsewhere."""
    table = Table("check", "verdict", "measured")
    for check in found.checks:
        style = STYLES.get(check.verdict, "dim")
        table.add_row(check.name, Text(check.verdict, style), Text(printable(check.text)))
        if not console.is_terminal:
            line = f"  {check.name:<16} {check.verdict:<13} {printable(check.text)}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if console.is_terminal:
        console.print(table)


def print_end(console: Console, checkup: Checkup) -> None:
    """Prints what was checked and found sound, what could not be checked, and the counts of findings."""
    console.print()
    for stage in checkup.stages:
        _print_names(console, stage.name, stage.examination)
    for remark in checkup.remarks:
        print_line(console, remark)
    if checkup.unjudged:
        print_line(console, f"no rule knows these names of the file: {', '.join(checkup.unjudged)}")
    counts = ", ".join(
        f"{number} {severity}{'' if number == 1 else 's'}"
        for severity in Severity
        if (number := checkup.count(severity))
    )
    word = ("sound", "green") if checkup.exit_code == 0 else ("unsound", "bold red")
    console.print(Text.assemble("verdict: ", word, f" ({counts or 'no findings'})"), soft_wrap=True)


def _print_names(console: Console, name: str, examination: Examination) -> None:
    for title, names in (
        ("checked and found sound", examination.sound),
        ("not applicable or not known", examination.unchecked),
    ):
        if names:
            print_line(console, f"{name}, {title}: {', '.join(ABOUT.get(each, each) for each in names)}")
