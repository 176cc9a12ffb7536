"""The stages of `nanguard doctor`, run in their order and printed as they end."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import cast

from rich.console import Console
from transformers import Trainer

from ...errors import ArgumentError
from ...hf.compat.trainer_protocol import HostTrainer
from ..config_check import judge_files
from ..data.sampled_rows import Report, take_sample
from ..dataset_check import DATA_CHECKS, SAMPLE, judge_sample
from ..facts.file_facts import ConfigFile
from ..facts.trainer_inspection import find_trainer_facts
from ..laws.prove import LAWS
from ..rules.rule_set import RULES, TOPICS
from .checkup import STAGES, Checkup, Stage, run_stage
from .measured_steps import measure_steps
from .printed_report import print_grade, print_quarantined, print_stage
from .quarantined_rows import quarantine_found
from .shown_rows import print_rows
from .tried_laws import try_laws

# Takes a title and a number of steps; returns what is called with the steps done, a text, and whether they are the last.
Progress = Callable[[str, int], Callable[[int, str, bool], None]]
Builder = Callable[[], Trainer]


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    num_rows: int | None = SAMPLE  # to check; None for all
    num_shown: int = 0  # rows to print
    num_steps: int = 20
    memory_limit: int | None = None
    quarantine: Path | None = None  # the output_dir of the run that is to leave out bad rows

    def __post_init__(self) -> None:
        _check_names("--only", self.only, STAGES)
        _check_names(
            "--skip",
            self.skip,
            (*STAGES, *TOPICS, *_names()),
        )
        if not self.stages:
            raise ArgumentError("--only and --skip must leave a stage to run, got none.")
        if self.quarantine is not None and "data" not in self.stages:
            raise ArgumentError("--quarantine needs the stage data, which --only or --skip leave out.")

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages to run, in their order."""
        return tuple(name for name in self.only or STAGES if name not in self.skip)


def _names() -> list[str]:
    """Returns the names of all rules, checks of data and laws."""
    return [rule.name for rule in RULES] + [check.name for check in DATA_CHECKS] + [law.name for law in LAWS]


def _check_names(flag: str, given: Sequence[str], known: Sequence[str]) -> None:
    wrong = next((name for name in given if name not in known), None)
    if wrong is None:
        return
    near = get_close_matches(wrong, known, 1)
    listed = f"{', '.join(STAGES)}" + (
        f", {', '.join(TOPICS)}, or the name of a rule, check or law" if len(known) > len(STAGES) else ""
    )
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ArgumentError(f"{flag} must be among {listed}, got {wrong!r}.{hint}")


def run_stages(
    options: Options, files: Sequence[ConfigFile], build: Builder, folder: Path, console: Console, progress: Progress
) -> Checkup:
    """Runs the stages that were asked for, and prints each when it ends. Without files, the rules judge the built trainer.
    `build` raises an [`ArgumentError`] if it cannot build one. Events and autopsies go to `folder`."""
    checkup, wants_rules = Checkup(), "rules" in options.stages
    later = [name for name in options.stages if name != "rules"]

    def finish(stage: Stage) -> None:
        checkup.stages.append(stage)
        print_stage(console, stage)

    if wants_rules and files:
        finish(
            run_stage(
                "rules",
                lambda stage: checkup.add_config(stage, judge_files(files, options.skip, None, options.memory_limit)),
            )
        )
    if not later and files:
        return checkup
    trainer, problem = None, ""
    try:
        trainer = build()
    except ArgumentError as error:
        if not checkup.exit_code:  # nothing that was found explains it
            raise
        problem = str(error)
    if wants_rules and trainer is not None:
        finish(run_stage("rules", lambda stage: _judge_trainer(stage, checkup, files, trainer, options)))
    for name in later:
        if trainer is None:
            finish(Stage(name, problem=problem))
        else:
            finish(_run_later(name, trainer, options, folder, console, progress))
    return checkup


def _judge_trainer(
    stage: Stage, checkup: Checkup, files: Sequence[ConfigFile], trainer: Trainer, options: Options
) -> None:
    """Judges the built trainer; what the files have already said is not repeated."""
    facts = find_trainer_facts(cast(HostTrainer, trainer))
    checkup.keep_findings()
    checkup.add_config(stage, judge_files(files, options.skip, facts, options.memory_limit))


def _run_later(
    name: str, trainer: Trainer, options: Options, folder: Path, console: Console, progress: Progress
) -> Stage:
    def check_data(stage: Stage) -> None:
        if trainer.train_dataset is None:
            raise ArgumentError("the trainer has no training data.")
        sample = take_sample(cast(HostTrainer, trainer), options.num_rows, slow_progress(progress, "rows"))
        found = judge_sample(sample, options.skip)
        stage.examination.add(found.examination)
        stage.details.update(num_rows=found.num_rows, num_checked=found.num_checked, bad_rows=found.bad_rows)
        print_rows(console, sample, options.num_shown)
        if options.quarantine is not None:
            rows = quarantine_found(options.quarantine, trainer.train_dataset, sample, found)
            stage.details["quarantined"] = rows
            print_quarantined(console, rows, options.quarantine)

    def check_laws(stage: Stage) -> None:
        report = slow_progress(progress, "laws")
        try_laws(stage, trainer, options.skip, lambda at, total, law: report(at + 1, total))

    def measure(stage: Stage) -> None:
        report = progress("measured steps", options.num_steps)
        found = measure_steps(
            stage, trainer, options.num_steps, folder,
            lambda step, loss: report(step, f"logged loss {loss:.4g}", False), options.memory_limit,
        )  # fmt: skip
        print_grade(console, found)

    return run_stage(name, {"data": check_data, "laws": check_laws, "steps": measure}[name])


def slow_progress(progress: Progress, title: str, after: float = 2.0) -> Report:
    """Returns what reports progress once something has taken longer than two seconds."""
    begin = time.monotonic()
    bars: list[Callable[[int, str, bool], None]] = []

    def report(done: int, total: int) -> None:
        if not bars and time.monotonic() - begin > after:
            bars.append(progress(title, total))
        if bars:
            bars[0](done, "", done == total)

    return report
