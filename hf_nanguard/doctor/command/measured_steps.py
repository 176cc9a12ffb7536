"""The stage `steps`: a few measured steps with the guard, and a grade."""

from collections.abc import Callable
from pathlib import Path

from transformers import Trainer

from ...report.run_files import GUARD_FOLDER
from ...verification.grade import ACCEPTABLE, BEST, FAILED, Verification
from ...verification.measured_run import verify
from ..rules.finding import DOCS, Finding, Severity
from .checkup import Stage

CHANGES = {
    "completion": "Read the reason, and the events of the guard if there are any.",
    "logits": "Look at the autopsy of that step, which names the operator and remedies.",
    "gradients": "Look at the autopsy of that step, which names the operator and remedies.",
    "clipping": "Check who clips the gradients: a callback or a subclass may undo it.",
    "success rate": "Look at the events: they name the rows and the cause of what was dropped.",
    "held-out loss": "Lower learning_rate, or check that labels are what the model should learn.",
    "held-out reward": "A few samples are noisy: run more --steps before you conclude anything.",
    "memory peak": "Lower per_device_train_batch_size, or turn gradient_checkpointing on.",
}


def measure_steps(
    stage: Stage,
    trainer: Trainer,
    steps: int,
    folder: Path,
    report: Callable[[int, float], None],
    memory_limit: int | None,
) -> Verification:
    """Trains a few steps and turns each check of the grade into a finding or something found sound."""
    found = verify(trainer, steps, folder, report, memory_limit)
    for check in found.checks:
        severity = {FAILED: Severity.ERROR, ACCEPTABLE: Severity.NOTE}.get(check.verdict)
        if check.verdict == BEST:
            stage.examination.sound.append(check.name)
        elif severity is not None:
            what = f"In {found.num_done} measured steps, {check.name} is {check.verdict}."
            change = CHANGES[check.name]
            if found.events:
                change += f" Events and autopsies: {folder / GUARD_FOLDER}."
            finding = Finding(
                severity, what, f"{check.text[:1].upper()}{check.text[1:]}.", change, check.name, f"{DOCS}#steps"
            )
            stage.examination.findings.append(finding)
    stage.details["measurements"] = found.as_dict()
    return found
