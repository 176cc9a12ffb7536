"""Counts of what a run has seen and lost: the source of the `nanguard/` metrics."""

import math
from collections import deque

from ...own_fields import own_fields
from ..event import JsonObject
from ..rerun.micro_batch import MicroBatch

RECENT = 100
QUIET = {
    "nanguard/success_rate": 1.0,
    "nanguard/success_rate_recent": 1.0,
}  # values that say nothing; 0 for other metrics


def find_news(metrics: dict[str, float]) -> dict[str, float]:
    """Returns the metrics that a log row should show: counters once they are not zero, rates once something was lost, and the
    terms that the user has named."""
    return {
        name: value
        for name, value in metrics.items()
        if value != QUIET.get(name, 0) or name.startswith("nanguard/term/")
    }


class Counter:
    """Cumulative counts of one run; they survive a checkpoint."""

    def __init__(self) -> None:
        self.begin_run()

    def begin_run(self) -> None:
        self.seen = 0
        self.dropped = 0
        self.skipped_steps = 0
        self.scaler_skips = 0
        self.unscorable_completions = 0
        self.failed_reward_calls = 0
        self.num_nan = 0
        self.num_inf = 0
        self.grad_norm_max = 0.0
        self.recent: deque[int] = deque(maxlen=RECENT)
        self.terms: dict[str, tuple[float, int]] = {}  # sum and number since the last row
        self.dropped_terms: dict[str, int] = {}

    @property
    def success_rate(self) -> float:
        """The share of micro-batches that were trained on."""
        return 1.0 if not self.seen else (self.seen - self.dropped) / self.seen

    def count_norm(self, norm: float) -> None:
        """Counts the finite gradient norm of a step."""
        self.grad_norm_max = max(self.grad_norm_max, norm)

    def count_skip(self) -> None:
        """Counts a step that was skipped."""
        self.skipped_steps += 1

    def count_scaler_skip(self) -> None:
        """Counts a step that the loss scaler skips."""
        self.scaler_skips += 1

    def count_rewards(self, unscorable: int, failed_calls: int) -> None:
        """Counts, of one generation, completions of all ranks without a finite reward and calls that failed as a whole."""
        self.unscorable_completions += unscorable
        self.failed_reward_calls += failed_calls

    def count_microbatches(self, seen: int, dropped: int) -> None:
        """Counts the micro-batches of one step of this rank."""
        self.seen += seen
        self.dropped += dropped
        self.recent.extend([1] * (seen - dropped) + [0] * dropped)

    def count_gradients(self, bad: dict[str, str]) -> None:
        self.num_nan += sum(1 for kind in bad.values() if kind == "nan")
        self.num_inf += sum(1 for kind in bad.values() if kind == "inf")

    def count_terms(self, micro_batches: list[MicroBatch]) -> None:
        """Counts the terms of micro-batches of this rank that were trained on, without those dropped or not finite."""
        for micro in micro_batches:
            dropped = {term.name for term in micro.terms if term.is_bad and term.drops} | micro.left_out
            for name in sorted(dropped):
                self.dropped_terms[name] = self.dropped_terms.get(name, 0) + 1
            for name, value in micro.term_values.items():
                if name not in dropped and math.isfinite(value):
                    total, number = self.terms.get(name, (0.0, 0))
                    self.terms[name] = (total + value, number + 1)

    def as_metrics(self) -> dict[str, float]:
        """Returns the metrics of the next log row and starts a new window for the largest norm."""
        metrics = {
            "nanguard/skipped_steps": self.skipped_steps,
            "nanguard/dropped_microbatches": self.dropped,
            "nanguard/success_rate": self.success_rate,
            "nanguard/success_rate_recent": 1.0 if not self.recent else sum(self.recent) / len(self.recent),
            "nanguard/grad_norm_max": self.grad_norm_max,
        }
        rare = {
            "nanguard/scaler_skips": self.scaler_skips,
            "nanguard/unscorable_completions": self.unscorable_completions,
            "nanguard/failed_reward_calls": self.failed_reward_calls,
        }
        metrics |= {name: number for name, number in rare.items() if number}
        metrics |= {f"nanguard/term/{name}": total / number for name, (total, number) in self.terms.items()}
        metrics |= {f"nanguard/dropped_terms/{name}": number for name, number in self.dropped_terms.items()}
        self.grad_norm_max, self.terms = 0.0, {}
        return metrics

    def state_dict(self) -> JsonObject:
        copies = {"recent": list(self.recent), "terms": dict(self.terms), "dropped_terms": dict(self.dropped_terms)}
        return {**own_fields(self), **copies}

    def load_state_dict(self, state: JsonObject) -> None:
        for name in own_fields(self):
            if name in state:
                value = dict(state[name]) if isinstance(state[name], dict) else state[name]
                setattr(self, name, deque(value, maxlen=RECENT) if name == "recent" else value)
