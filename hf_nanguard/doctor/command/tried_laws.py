"""The stage `laws`: relations that must hold for the trainer, its data and its loss."""

from collections.abc import Callable, Collection
from dataclasses import asdict

from transformers import Trainer

from ..laws.prove import LAWS, prove
from ..rules.finding import Finding
from ..trial.law_result import BROKEN, HELD
from .checkup import Stage

REFERENCE = "docs/laws.md"


def try_laws(
    stage: Stage, trainer: Trainer, skip: Collection[str], progress: Callable[[int, int, str], None] | None = None
) -> None:
    """Tries every law and turns each broken one into a finding."""
    statements = {law.name: law.statement for law in LAWS}
    results = prove(trainer, None, [name for name in skip if name in statements], progress)
    stage.details["laws"] = [{**asdict(result), "severity": str(result.severity)} for result in results]
    for result in results:
        if result.status == HELD:
            stage.examination.sound.append(result.name)
        elif result.status == BROKEN:
            what = f"This does not hold: {statements[result.name].rstrip('.')}."
            change = f"See {result.name} in {REFERENCE}, which names the usual causes."
            finding = Finding(result.severity, what, result.message, change, result.name, REFERENCE)
            stage.examination.findings.append(finding)
        else:
            stage.examination.unchecked.append(f"{result.name} ({result.message.rstrip('.')})")
