"""What a run leaves behind: events and metrics in `<output_dir>/nanguard/`, the guard's state in checkpoints."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...core.autopsy.examiner import FOLDER as BUNDLES
from ...core.event import JsonObject, strict
from ...core.monitors.base import Stateful, load_whole
from ...core.ranks import Ranks
from ...core.settings import Policy
from ...core.step.guard import Guard
from ...plain_text import REDACTED, quote_metric, show
from ...report.run_files import GUARD_FOLDER, JsonlWriter, events_path, new_run_id
from ...report.state_file import read_state, report_unusable, write_state
from ...safe_files import remove_drafts
from ..compat.hub_uploads import uploads_without
from ..compat.trainer_protocol import HostTrainer

STATE_FILE = "nanguard_state.json"


def save_guard(guard: Guard, folder: Path) -> None:
    """Writes the guard's state beside the trainer's, in a checkpoint that is there."""
    write_state(folder / STATE_FILE, guard.state_dict())


def load_guard(guard: Guard, folder: Path) -> bool:
    """Restores the guard's state from a checkpoint, on all ranks or on none, because they decide by it together; returns
    whether it was restored. Every rank must call it."""
    return load_part(guard, folder / STATE_FILE, guard.ranks)


def load_part(part: Stateful, file: Path, ranks: Ranks | None = None) -> bool:
    """Restores what [`write_state`] wrote; returns whether it did. What cannot be used is logged, and nothing of it is loaded."""
    state = read_state(file)
    if (ranks is not None and ranks.any(state is None)) or state is None:
        return False
    try:
        load_whole(part, state)
    except ValueError as error:  # written by another version
        report_unusable(file, error)
        return False
    return True


class RunRecord:
    """The files of one run. The policy says whether rows may contain text, which a callback or `compute_metrics` of the user's
    may log, and whether the files may be uploaded."""

    def __init__(self, trainer: HostTrainer, rank: int, policy: Policy | None = None):
        self.trainer = trainer
        self.rank = rank
        self.policy = policy or Policy()
        self._kept: dict[str, float] = {}
        self.begin_run()

    def begin_run(self) -> None:
        """Follows `output_dir`, which a script may set after it has built the trainer; lines of another `train()` get
        another id."""
        self.directory = Path(str(self.trainer.args.output_dir)) / GUARD_FOLDER
        self.event_file, self.run = events_path(self.directory, self.rank), new_run_id()
        self.events = JsonlWriter(self.event_file, self.run)
        self.metrics = JsonlWriter(self.directory / "metrics.jsonl", self.run, private=False)

    def remove_drafts(self) -> None:
        """Removes what an earlier run was writing when it was killed."""
        if self.rank == 0:
            remove_drafts(self.directory / BUNDLES)
            for checkpoint in self.directory.parent.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
                remove_drafts(checkpoint, "nanguard_*")

    def write_event(self, event: JsonObject) -> None:
        """Appends an event to the file of this rank."""
        self.events(event)

    def kept_local(self) -> AbstractContextManager[None]:
        """Returns a context in which the trainer uploads its folder to the Hub without ours, unless the policy says otherwise."""
        return nullcontext() if self.policy.push_to_hub else uploads_without(GUARD_FOLDER)

    def keep_metrics(self, metrics: dict[str, float]) -> None:
        """Keeps the metrics of the next row, of which the log shows only some."""
        self._kept = metrics

    def write_row(self) -> None:
        """Appends the newest log row to `metrics.jsonl`, with all metrics of the guard."""
        kept, self._kept = self._kept, {}
        if self.trainer.is_world_process_zero() and self.trainer.state.log_history:
            row = {**self.trainer.state.log_history[-1], **kept}
            shown = {quote_metric(str(name)): self._show(value) for name, value in row.items()}
            self.metrics(strict(show(shown, self.policy.bundle_text)))

    def _show(self, value: object) -> object:
        is_number = value is None or isinstance(value, (bool, int, float)) or getattr(value, "ndim", None) == 0
        return value if is_number or self.policy.bundle_text else REDACTED
