"""Where the acts of `nanguard demo` are played: runs are told of while they go on, and kept for what comes after."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from transformers import PrinterCallback

from ...core.finite import find_nonfinite
from ...errors import NonFiniteError
from ..compare import Outcome, find_evidence, watch_run
from .small_sft import Report, Watch

CLOCK = 2.0  # seconds by which a file system's clock may be coarse


@dataclass(frozen=True)
class ScenarioRunner:
    """Where acts are played.

    Args:
        folder (`Path`), seed (`int`), steps (`int`):
            Where runs are put, their seed, and how long those of the first act are.
        tell (`Callable`):
            Called with the story of an act before it begins.
        begin (`Callable`):
            Called with the name of a run and its number of steps; returns its reporter.
    """

    folder: Path
    seed: int
    steps: int
    tell: Callable[[str], None]
    begin: Callable[[str, int], Report]

    def run(self, name: str, folder: str, steps: int, build: Callable[..., Any], figure: str = "loss") -> "Run":
        """Builds a trainer by `build(folder, watch)` and runs it."""
        watch = Watch(self.begin(name, steps), figure)
        trainers: list[Any] = []

        def build_hushed() -> Any:
            trainers.append(build(self.folder / folder, watch))
            trainers[0].remove_callback(PrinterCallback)
            return trainers[0]

        started = time.time()
        run = Run(trainers, watch_run(name, build_hushed), watch, started)
        if run.outcome.error is not None:
            watch.report(
                run.outcome.steps, "halted by the guard" if run.is_halted else f"ENDED by {run.outcome.error}", True
            )
        return run


@dataclass(frozen=True)
class Run:
    """A run that is over: its only trainer, what became of it, who watched it and when it began."""

    trainers: list[Any]
    outcome: Outcome
    watch: Watch
    started: float

    @property
    def trainer(self) -> Any:
        """The trainer."""
        return self.trainers[0]

    @property
    def num_lost(self) -> int:
        """Steps that did not bring the weights forward."""
        return self.watch.num_lost

    @property
    def is_halted(self) -> bool:
        """Whether the guard ended it."""
        return (self.outcome.error or "").startswith(NonFiniteError.__name__)

    @property
    def weights(self) -> str:
        """The state of the weights, in words."""
        bad = self.outcome.bad_weights
        return f"weights: {len(bad)} of {self.outcome.num_weights} tensors NaN" if bad else "weights: finite"

    @property
    def end(self) -> str:
        """How it ended, in words."""
        if self.outcome.error is None:
            return "finished"
        if self.is_halted:
            return f"halted by the guard at step {self.outcome.steps}"
        return f"ended at step {self.outcome.steps}: {self.outcome.error}"

    @property
    def saved(self) -> str:
        """The checkpoints that it wrote, in words."""
        files = self.outcome.folder.glob("checkpoint-*/model.safetensors")
        mine = [file for file in files if file.stat().st_mtime >= self.started - CLOCK]  # others are of an earlier demo
        num_bad = sum(bool(find_nonfinite(load_file(file).items())) for file in mine)
        return f"checkpoints saved: {len(mine)}, of them with NaN: {num_bad}"

    @property
    def evidence(self) -> dict[str, Path]:
        """Where the guard told of it, by what is there."""
        return find_evidence(self.outcome)

    def find_event(self, *signals: str) -> dict[str, Any] | None:
        """Returns the first event with one of these signals."""
        return next((event for event in self.outcome.events if event["signal"] in signals), None)


@dataclass(frozen=True)
class Scenario:
    """What an act showed: lines about the stock and the guarded run, and where the guard's evidence is."""

    title: str
    stock: list[str]
    guarded: list[str]
    evidence: dict[str, Path]
