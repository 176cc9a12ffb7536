"""Counts of what a run has seen and lost: the source of the `nanguard/` metrics."""

from collections import deque
from typing import Any

RECENT = 100


class Counter:
    """Cumulative counts; they survive a checkpoint."""

    def __init__(self) -> None:
        self.seen = 0
        self.dropped = 0
        self.skipped_steps = 0
        self.scaler_skips = 0
        self.num_nan = 0
        self.num_inf = 0
        self.grad_norm_max = 0.0
        self.recent: deque[int] = deque(maxlen=RECENT)

    def count_microbatches(self, seen: int, dropped: int) -> None:
        """Counts the micro-batches of one step of this rank."""
        self.seen += seen
        self.dropped += dropped
        self.recent.extend([1] * (seen - dropped) + [0] * dropped)

    def count_gradients(self, bad: dict[str, str]) -> None:
        """Counts bad gradients by kind."""
        self.num_nan += sum(1 for kind in bad.values() if kind == "nan")
        self.num_inf += sum(1 for kind in bad.values() if kind == "inf")

    def as_metrics(self) -> dict[str, float]:
        """Returns the metrics of the next log row and starts a new window for the largest norm."""
        metrics = {
            "nanguard/skipped_steps": self.skipped_steps,
            "nanguard/dropped_microbatches": self.dropped,
            "nanguard/success_rate": 1.0 if not self.seen else (self.seen - self.dropped) / self.seen,
            "nanguard/success_rate_recent": 1.0 if not self.recent else sum(self.recent) / len(self.recent),
            "nanguard/grad_norm_max": self.grad_norm_max,
        }
        if self.scaler_skips:
            metrics["nanguard/scaler_skips"] = self.scaler_skips
        self.grad_norm_max = 0.0
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Returns what `load_state_dict` needs."""
        return {**vars(self), "recent": list(self.recent)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the counts of a checkpoint."""
        for name in vars(self):
            if name in state:
                setattr(self, name, deque(state[name], maxlen=RECENT) if name == "recent" else state[name])
