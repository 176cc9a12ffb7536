"""Runs the trainers of a demo scenario, with progress on the console, and keeps their outcomes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PrinterCallback, Trainer, TrainerCallback

from ...core.finite import find_nonfinite
from ...report.terminal_console import Report
from ..compare import Figures, Outcome, format_number, watch_run

CLOCK = 2.0  # seconds by which the clock of a file system may be coarse

# The title of a scenario, and the same failure in a stock and in a guarded run.
Scenario = tuple[str, Outcome, Outcome]


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
    ) -> Outcome:
        """Builds a trainer for a folder, runs it and reports the progress of a logged figure."""
        report, started = self.begin(name, steps), time.time()
        reporter = StepReporter(report, figure)
        trainer = build(self.folder / folder)
        trainer.add_callback(reporter)
        trainer.remove_callback(PrinterCallback)
        with watch_run(name, trainer, measure) as outcome:
            trainer.train()
        if outcome.error is not None:
            report(outcome.steps, outcome.end, True)
        lost = {"steps lost": f"{reporter.num_lost} of {outcome.steps}"} if reporter.num_lost else {}
        return outcome.with_figures({**lost, **_count_checkpoints(outcome.folder, started)})

    def run_both(
        self, what: str, folder: str, steps: int, build: Callable[[bool, Path], Trainer], *how: Any
    ) -> list[Outcome]:
        """Runs stock and guarded; `build` is called with whether to guard. `how` is as in [`run`]."""
        return [
            self.run(f"{name}{what}", f"{folder}-{name}", steps, partial(build, name == "guarded"), *how)
            for name in ("stock", "guarded")
        ]


def _count_checkpoints(folder: Path, started: float) -> Figures:
    """Returns how many checkpoints a run has saved, and how many of them contain NaN or inf; nothing if it saved none."""
    files = folder.glob("checkpoint-*/model.safetensors")
    own = [file for file in files if file.stat().st_mtime >= started - CLOCK]  # others are of an earlier demo
    num_bad = sum(bool(find_nonfinite(load_file(file).items())) for file in own)
    return {"checkpoints": f"{len(own)} saved, {num_bad} with NaN"} if own else {}
