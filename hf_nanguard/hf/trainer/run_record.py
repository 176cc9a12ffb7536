"""What a run leaves behind: events and metrics in `<output_dir>/nanguard/`, the guard's state in checkpoints."""

import json
import logging
from pathlib import Path

from ...core.event import JsonObject, strict
from ...core.step.guard import Guard
from ...report.run_files import GUARD_FOLDER, JsonlWriter, events_path
from ..compat.trainer_protocol import HostTrainer

logger = logging.getLogger("hf_nanguard")

STATE_FILE = "nanguard_state.json"


def save_guard(guard: Guard, folder: Path) -> None:
    """Writes the guard's state beside the trainer's, in a checkpoint that is there."""
    if folder.is_dir():
        (folder / STATE_FILE).write_text(json.dumps(guard.state_dict(), allow_nan=False), encoding="utf-8")


def load_guard(guard: Guard, folder: Path) -> bool:
    """Restores the guard's state from a checkpoint; returns whether there was one. A broken one is told and left out."""
    file = folder / STATE_FILE
    if not file.is_file():
        return False
    try:
        guard.load_state_dict(json.loads(file.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("hf_nanguard: %s was not readable (%r), so counts and statistics start anew.", file, error)
    return True


class RunRecord:
    """The files of one run.

    Args:
        trainer (`Trainer`):
            The guarded trainer.
        rank (`int`):
            This rank.
    """

    def __init__(self, trainer: HostTrainer, rank: int):
        self.trainer = trainer
        self.rank = rank
        self.begin_run()

    def begin_run(self) -> None:
        """Follows `output_dir`, which a script may set after it has built the trainer; lines of another `train()` get
        another id."""
        self.directory = Path(str(self.trainer.args.output_dir)) / GUARD_FOLDER
        self.events = JsonlWriter(events_path(self.directory, self.rank))
        self.metrics = JsonlWriter(self.directory / "metrics.jsonl", self.events.run)

    def write_event(self, event: JsonObject) -> None:
        """Appends an event to the file of this rank."""
        self.events(event)

    def write_row(self) -> None:
        """Appends the newest log row to `metrics.jsonl`."""
        if self.trainer.is_world_process_zero() and self.trainer.state.log_history:
            self.metrics(strict(dict(self.trainer.state.log_history[-1])))
