"""Runs the trainers of a demo scenario, with progress on the console, and keeps their outcomes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PrinterCallback, Trainer, TrainerCallback

from ...core.finite import find_nonfinite
from ...errors import NonFiniteError
from ..compare import EventRow, Figures, Outcome, find_evidence, format_number, watch_run

CLOCK = 2.0  # seconds by which the clock of a file system may be coarse

# Called with the number of steps done, a short text about them, and whether these are the last.
Report = Callable[[int, str, bool], None]


class StepReporter(TrainerCallback):
    """Counts the steps without progress of the weights, and reports a logged figure at every step."""

    def __init__(self, report: Report, figure: str):
        self.report = report
        self.figure = figure
        self.num_lost = 0
        self.before = torch.empty(0)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.before = model.lm_head.weight.detach().clone()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        now = model.lm_head.weight.detach()
        self.num_lost += not bool(torch.isfinite(now).all()) or torch.equal(now, self.before)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.report(state.global_step, f"logged {self.figure} {format_number(logs.get(self.figure))}", False)


@dataclass(frozen=True)
class Run:
    """A run that has ended: its trainer, its outcome, its reporter and when it began."""

    trainer: Trainer
    outcome: Outcome
    reporter: StepReporter
    started: float

    @property
    def is_halted(self) -> bool:
        """Whether the guard ended it."""
        return (self.outcome.error or "").startswith(NonFiniteError.__name__)

    @property
    def weights(self) -> str:
        """The state of the weights, as text."""
        bad = self.outcome.bad_weights
        return f"weights: {len(bad)} of {self.outcome.num_weights} tensors NaN" if bad else "weights: finite"

    @property
    def lost(self) -> str:
        """The number of steps without progress, as text."""
        return f"steps lost: {self.reporter.num_lost} of {self.outcome.steps}"

    @property
    def end(self) -> str:
        """How it ended, as text."""
        if self.outcome.error is None:
            return "finished"
        if self.is_halted:
            return f"halted by the guard at step {self.outcome.steps}"
        return f"ended at step {self.outcome.steps}: {self.outcome.error}"

    @property
    def saved(self) -> str:
        """The checkpoints that it wrote, as text."""
        files = self.outcome.folder.glob("checkpoint-*/model.safetensors")
        own = [file for file in files if file.stat().st_mtime >= self.started - CLOCK]  # others are of an earlier demo
        num_bad = sum(bool(find_nonfinite(load_file(file).items())) for file in own)
        return f"checkpoints saved: {len(own)}, of them with NaN: {num_bad}"

    @property
    def evidence(self) -> dict[str, Path]:
        """Its event file and autopsy folder."""
        return find_evidence(self.outcome)

    def find_event(self, *signals: str) -> EventRow | None:
        """Returns the first event with one of these signals."""
        return next((event for event in self.outcome.events if event["signal"] in signals), None)


@dataclass(frozen=True)
class ScenarioRunner:
    """Runs the trainers of a scenario."""

    folder: Path
    seed: int
    steps: int  # of the first scenario
    announce: Callable[[str], None]  # prints a description of the scenario before it begins
    begin: Callable[[str, int], Report]  # given the name of a run and its number of steps

    def run(
        self,
        name: str,
        folder: str,
        steps: int,
        build: Callable[[Path], Trainer],
        measure: Callable[[Trainer], Figures] = lambda trainer: {},
        figure: str = "loss",
    ) -> Run:
        """Builds a trainer for a folder, runs it and reports the progress of a logged figure."""
        report, started = self.begin(name, steps), time.time()
        reporter = StepReporter(report, figure)
        trainer = build(self.folder / folder)
        trainer.add_callback(reporter)
        trainer.remove_callback(PrinterCallback)
        run = Run(trainer, watch_run(name, trainer, measure), reporter, started)
        if run.outcome.error is not None:
            text = "halted by the guard" if run.is_halted else f"ENDED by {run.outcome.error}"
            report(run.outcome.steps, text, True)
        return run


@dataclass(frozen=True)
class Scenario:
    """The result of a scenario: lines about the stock and the guarded run, and the paths of the guard's evidence."""

    title: str
    stock: list[str]
    guarded: list[str]
    evidence: dict[str, Path]
