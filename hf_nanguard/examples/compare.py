"""The same run twice, as the host's trainer does it and guarded, and what became of each: what every recipe ends with."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import transformers
from accelerate import PartialState
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments

from ..core.finite import find_nonfinite
from ..report.run_files import GUARD_FOLDER, Tail, events_path
from .recipe.command_line import check_output

# How a run that has gone bad ends; anything else is a mistake in the recipe and goes through.
FAILURES = (ArithmeticError, IndexError, RuntimeError, ValueError)

# Called with a trained trainer; the figures of a run by name.
Measure = Callable[[Any], dict[str, float | str]]


@dataclass
class Outcome:
    """What one run left behind, measured from outside the trainer.

    Args:
        name (`str`):
            What the run is called, e.g. `"stock"`.
        folder (`Path`):
            Its output folder.
        error (`str`, *optional*):
            What ended it early, in one line.
        steps (`int`):
            Optimizer steps it counted.
        losses (`list[float]`):
            The logged ones.
        bad_weights (`dict[str, str]`), num_weights (`int`):
            Weight tensors that hold a NaN or inf, by name, and how many there are in all.
        figures (`dict[str, float | str]`):
            What else was measured.
        events (`list[dict]`):
            Those the guard has written, as in `events.jsonl`.
    """

    name: str
    folder: Path
    error: str | None = None
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    bad_weights: dict[str, str] = field(default_factory=dict)
    num_weights: int = 0
    figures: dict[str, float | str] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether it ran to its end and left finite weights."""
        return self.error is None and not self.bad_weights

    def as_dict(self) -> dict[str, Any]:
        """Returns it for a program."""
        return {**asdict(self), "folder": str(self.folder), "is_sound": self.is_sound}


def watch_run(name: str, build_trainer: Callable[[], Trainer], measure: Measure | None = None) -> Outcome:
    """Trains and returns what became of it; an error that numbers gone bad end with is part of that.

    Args:
        name (`str`):
            What to call the run.
        build_trainer (`Callable`):
            Builds the trainer, stock or guarded. What it raises is not caught.
        measure (`Callable`, *optional*):
            Returns figures of the trained trainer by name, e.g. an accuracy.

    Example:

    ```python
    outcomes = [watch_run("stock", build_stock), watch_run("guarded", build_guarded)]
    print_comparison(outcomes)
    ```
    """
    trainer = build_trainer()
    folder = Path(str(trainer.args.output_dir))
    tail = Tail(events_path(folder / GUARD_FOLDER, trainer.args.process_index))
    outcome = Outcome(name, folder)
    try:
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        outcome.figures = {} if measure is None else measure(trainer)
    except FAILURES as error:
        outcome.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    weights = dict(trainer.model.named_parameters())  # type: ignore[union-attr]
    outcome.bad_weights, outcome.num_weights = find_nonfinite(weights.items()), len(weights)
    outcome.steps = trainer.state.global_step
    outcome.losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    outcome.events = tail.read()
    return outcome


def compare_runs(
    build_trainer: Callable[[TrainingArguments, bool], Trainer],
    args: TrainingArguments,
    planted: str,
    measure: Measure | None = None,
    compare: bool = True,
) -> list[Outcome]:
    """Runs stock and guarded on the same failure, below `args.output_dir`, and prints both.

    Args:
        build_trainer (`Callable`):
            Called with the arguments and whether to guard; must build model and data anew each time.
        args (`TrainingArguments`):
            For both; guarded ones, the stock trainer leaves the guard's settings alone.
        planted (`str`):
            What was planted, in a sentence.
        measure (`Callable`, *optional*):
            As in [`watch_run`].
        compare (`bool`, *optional*, defaults to `True`):
            If not, there is only the guarded run, in `args.output_dir` itself and as talkative as any.

    Returns:
        `list[Outcome]`: the guarded run's is the last.

    Raises:
        `ArgumentError`: the output folder cannot be written, or there is nothing to resume from.
    """
    check_output(args)
    console = build_console()
    console.print(f"{escape(planted)}\n", highlight=False, soft_wrap=True)
    if not compare:
        outcomes = [watch_run("guarded", lambda: build_trainer(args, True), measure)]
    else:
        outcomes = []
        with quiet_host():
            for name in ("stock", "guarded"):
                mine = copy.copy(args)
                mine.output_dir = str(Path(str(args.output_dir)) / name)
                console.print(f"{name} run ...", highlight=False)
                outcomes.append(
                    watch_run(name, partial(_build_hushed, build_trainer, mine, name == "guarded"), measure)
                )
    print_comparison(outcomes, console)
    return outcomes


def _build_hushed(
    build_trainer: Callable[[TrainingArguments, bool], Trainer], args: TrainingArguments, guard: bool
) -> Trainer:
    """Builds a trainer that does not print every logged row."""
    trainer = build_trainer(args, guard)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    return trainer


@contextmanager
def quiet_host() -> Iterator[None]:
    """Keeps the host's advice and bars off the screen; what the guard says stays on it."""
    host = transformers.utils.logging
    level, bars = host.get_verbosity(), host.is_progress_bar_enabled()
    host.set_verbosity_error()
    host.disable_progress_bar()
    try:
        yield
    finally:
        host.set_verbosity(level)
        if bars:
            host.enable_progress_bar()


def build_console() -> Console:
    """Returns a console that prints on the main process only."""
    return Console(quiet=not PartialState().is_main_process)


def show_number(value: float | str) -> str:
    """Returns a figure in a few digits."""
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def show_losses(losses: Sequence[float]) -> str:
    """Returns the first two and the last three losses."""
    shown = [*map(show_number, losses)]
    return " ".join(shown if len(shown) < 6 else [*shown[:2], "...", *shown[-3:]]) or "none logged"


def show_event(event: dict[str, Any]) -> str:
    """Returns an event in a line: when, what, done about it, the cause, where, and what would have helped."""
    culprit = event["culprit"] or {}
    kinds = ("term", "module", "parameter", "source", "rows", "reward_function")
    places = [f"{kind.replace('_', ' ')} {culprit[kind]}" for kind in kinds if culprit.get(kind)]
    works = [remedy["name"] for remedy in event["remedies"] if remedy.get("works")]
    parts = [
        f"step {event['step']}: {event['signal']}, {event['action']}",
        *([event["cause"]] if event["cause"] else []),
    ]
    return "; ".join([*parts, *places, *([f"would have helped: {', '.join(works)}"] if works else [])])


def find_first(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the first event with which the guard acted, or the first if it only observed."""
    return next((event for event in events if event["action"] != "observed"), events[0])


def describe(outcome: Outcome) -> dict[str, str]:
    """Returns what became of a run, as answers by question."""
    bad, counts = outcome.bad_weights, Counter(f"{event['signal']} {event['action']}" for event in outcome.events)
    ended = "" if outcome.error is None else f", ENDED by {shorten(outcome.error, 160)}"
    return {
        "run": f"{outcome.steps} steps{ended}",
        "weights": f"NOT FINITE: {len(bad)} of {outcome.num_weights} tensors" if bad else "all finite",
        "logged losses": show_losses(outcome.losses),
        **{name: show_number(value) for name, value in outcome.figures.items()},
        "events": ", ".join(f"{number} {kind}" for kind, number in counts.items()) or "none",
        **({"first blamed": show_event(find_first(outcome.events))} if outcome.events else {}),
    }


def print_comparison(outcomes: Sequence[Outcome], console: Console | None = None) -> None:
    """Prints runs side by side on a terminal, one after the other in a pipe, and where the events are.

    Args:
        outcomes (`Sequence[Outcome]`):
            The runs.
        console (`Console`, *optional*):
            Where to; by default standard output, of the main process only.
    """
    console = build_console() if console is None else console
    answers = [describe(outcome) for outcome in outcomes]
    questions = list(dict.fromkeys(question for answer in answers for question in answer))
    console.print()
    if console.is_terminal:
        table = Table("", *(escape(outcome.name) for outcome in outcomes), show_lines=True)
        for question in questions:
            table.add_row(escape(question), *(escape(answer.get(question, "-")) for answer in answers))
        console.print(table)
    else:
        width = max(map(len, questions))
        for outcome, answer in zip(outcomes, answers, strict=True):
            lines = [outcome.name, *(f"  {question:<{width}}  {text}" for question, text in answer.items())]
            console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    for outcome in outcomes:
        for kind, path in find_evidence(outcome).items():
            console.print(f"{kind} of the {outcome.name} run: {path}", markup=False, highlight=False, soft_wrap=True)


def find_evidence(outcome: Outcome) -> dict[str, Path]:
    """Returns the files and folders in which the guard told of a run's events, by what they hold."""
    if not outcome.events:
        return {}
    folder = outcome.folder / GUARD_FOLDER
    bundles = folder / "autopsy"
    return {"events": events_path(folder, 0), **({"autopsies": bundles} if bundles.is_dir() else {})}
