"""Finds the newest checkpoint of a run that can be resumed from, and says why newer ones cannot."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .checkpoint_files import has_optimizer, list_checkpoints
from .scan import scan_paths
from .tensor_check import Checks

MAX_REASONS = 3  # checkpoints whose reasons are said


@dataclass(frozen=True)
class Choice:
    """The checkpoint that was chosen, `None` if there is none, and why newer ones were not."""

    path: Path | None
    skipped: tuple[tuple[Path, str], ...]

    def format_skipped(self) -> str:
        """Returns the checkpoints that were not chosen in one line, the newest with their reasons."""
        reasons = [f"{path.name}: {why}" for path, why in self.skipped[:MAX_REASONS]]
        num_more = len(self.skipped) - len(reasons)
        return "; ".join([*reasons, f"and {num_more} more, see nanguard scan"] if num_more else reasons)


def choose_checkpoint(run: Path, needs_optimizer: bool = False, before: Path | None = None) -> Choice:
    """Returns the newest checkpoint of a run that is complete, readable and finite.

    One without optimizer state is taken only if no good one has it, if `needs_optimizer`. With `before`, a checkpoint of the
    run, only older ones are considered.
    """
    candidates = list_checkpoints(run)
    if before is not None:
        names = [path.name for path in candidates]
        candidates = candidates[names.index(before.name) + 1 :] if before.name in names else []
    skipped: list[tuple[Path, str]] = []
    weights_only: list[Path] = []
    for path, why in _judge(candidates):
        if why is not None:
            skipped.append((path, why))
        elif needs_optimizer and not has_optimizer(path):
            weights_only.append(path)
            skipped.append((path, "it has no optimizer state"))
        else:
            return Choice(path, tuple(skipped))
    if not weights_only:
        return Choice(None, tuple(skipped))
    return Choice(weights_only[0], tuple(each for each in skipped if each[0] != weights_only[0]))


def _judge(checkpoints: Iterable[Path]) -> Iterator[tuple[Path, str | None]]:
    """Yields each checkpoint with the reason why it cannot be resumed from, `None` if it can; scans no more than is asked for."""
    for path in checkpoints:
        for result in scan_paths([path], Checks()):
            yield path, None if result.is_good else result.why_not_good
