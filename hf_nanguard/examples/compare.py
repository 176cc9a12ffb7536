"""The same training run twice, by the stock trainer and with the guard, and a comparison of the results."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from accelerate import PartialState
from rich.console import Console
from rich.table import Column, Table
from torch import nn
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import is_datasets_available, logging

from ..core.finite import find_nonfinite
from ..errors import NonFiniteError
from ..plain_text import format_error
from ..report.run_files import GUARD_FOLDER, Tail, count_events, events_path, format_counts
from ..report.terminal_console import Report, build_console, print_line, print_progress

# How a run ends whose numbers are not finite; any other error is a mistake in the recipe and is raised.
FAILURES = (ArithmeticError, IndexError, RuntimeError, ValueError)
MAX_ROWS = 8

Figures = dict[str, float | str]  # measurements of a run by name
EventRow = dict[str, Any]  # a line of events.jsonl
Options = dict[str, Any]  # keyword arguments of a class of transformers or TRL


@dataclass
class Outcome:
    """The result of one run, measured from outside the trainer."""

    name: str
    folder: Path
    error: str | None = None  # that ended it early, in one line
    steps: int = 0
    losses: list[float] = field(default_factory=list)  # as logged
    bad_weights: dict[str, str] = field(default_factory=dict)  # tensors that contain NaN or inf
    num_weights: int = 0
    figures: Figures = field(default_factory=dict)
    events: list[EventRow] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether the run finished with finite weights."""
        return self.error is None and not self.bad_weights

    @property
    def end(self) -> str:
        """How the run ended early, as text; empty if it finished."""
        if self.error is None:
            return ""
        is_halted = self.error.startswith(NonFiniteError.__name__)
        return "halted by the guard" if is_halted else f"ENDED by {shorten(self.error, 160)}"

    def with_figures(self, figures: Figures) -> "Outcome":
        """Returns the same outcome with more figures."""
        return replace(self, figures={**self.figures, **figures})

    def find_event(self, *signals: str) -> EventRow | None:
        """Returns the first event with one of these signals."""
        return next((event for event in self.events if event["signal"] in signals), None)

    def as_dict(self) -> dict[str, object]:
        """Returns the outcome as plain values, for JSON."""
        return {**asdict(self), "folder": str(self.folder), "is_sound": self.is_sound}


@contextmanager
def watch_run(
    name: str,
    trainer: Trainer,
    measure: Callable[[Trainer], Figures] = lambda trainer: {},
    failures: type[Exception] | tuple[type[Exception], ...] = FAILURES,
) -> Iterator[Outcome]:
    """Yields the outcome of a run that is made inside the context; an error among `failures` is part of it.

    `measure` is called with the trained trainer and returns figures by name, e.g. an accuracy.
    """
    folder = Path(str(trainer.args.output_dir))
    tail = Tail(events_path(folder / GUARD_FOLDER, trainer.args.process_index))
    outcome = Outcome(name, folder)
    try:
        yield outcome
        outcome.figures = measure(trainer)
    except failures as raised:
        outcome.error = format_error(raised)
    weights = find_weights(trainer)
    outcome.steps, outcome.num_weights = trainer.state.global_step, len(weights)
    outcome.bad_weights = find_nonfinite(weights.items())
    outcome.losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    outcome.events = tail.read()


def find_weights(trainer: Trainer) -> dict[str, nn.Parameter]:
    """Returns the weights of a trainer's model by name."""
    assert trainer.model is not None
    return dict(trainer.model.named_parameters())


def compare_runs(
    build_trainer: Callable[[object, type], Trainer],
    classes: tuple[type, type],
    args: TrainingArguments,
    planted: str,
    measure: Callable[[Trainer], Figures] = lambda trainer: {},
) -> list[Outcome]:
    """Runs stock and guarded with the same planted failure, below `args.output_dir`, and prints both outcomes.

    `build_trainer` is called with the arguments and one of `classes`, stock and guarded; it must build model and data anew
    each time. The arguments may have settings of the guard, which the stock trainer ignores. `planted` is a sentence about
    the failure.
    """
    console = build_console(quiet=not PartialState().is_main_process)
    print_line(console, planted)
    console.print()
    outcomes = []
    with quiet_hosts():
        for name, trainer_class in zip(("stock", "guarded"), classes, strict=True):
            run_args = copy.copy(args)
            run_args.output_dir = str(Path(str(args.output_dir)) / name)
            console.print(f"{name} run ...")
            trainer = build_trainer(run_args, trainer_class)
            for callback in (PrinterCallback, ProgressCallback):
                trainer.remove_callback(callback)
            trainer.add_callback(_StepProgress(console, name))
            with watch_run(name, trainer, measure) as outcome:
                trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
            outcomes.append(outcome)
    print_comparison(outcomes, console)
    return outcomes


class _StepProgress(TrainerCallback):
    """Prints how far a run is, and the loss that it has logged last."""

    report: Report

    def __init__(self, console: Console, name: str):
        self.console, self.name, self.text = console, name, ""

    def on_train_begin(self, args, state, control, **kwargs):
        self.report = print_progress(self.console, self.name, state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):
        self.report(state.global_step, self.text, False)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.text = f"logged loss {format_number(logs['loss'])}"


@contextmanager
def quiet_hosts() -> Iterator[None]:
    """Turns off warnings and progress bars of transformers and datasets; messages of the guard stay."""
    with ExitStack() as undo:
        undo.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        if logging.is_progress_bar_enabled():
            undo.callback(logging.enable_progress_bar)
        logging.disable_progress_bar()
        if is_datasets_available():
            import datasets

            if datasets.is_progress_bar_enabled():
                undo.callback(datasets.enable_progress_bars)
            datasets.disable_progress_bars()
        yield


def format_number(value: float | str) -> str:
    """Returns a figure with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def format_losses(losses: Sequence[float]) -> str:
    """Returns the first two and the last three losses."""
    shown = [*map(format_number, losses)]
    return " ".join(shown if len(shown) < 6 else [*shown[:2], "...", *shown[-3:]]) or "none logged"


def format_event(event: EventRow) -> str:
    """Returns an event in one line: step, signal, action, cause, culprit, and remedies that work."""
    culprit = event["culprit"] or {}
    names = ("term", "module", "parameter", "source", "rows", "reward_function")
    works = [remedy["name"] for remedy in event["remedies"] if remedy.get("works")]
    parts = [
        f"step {event['step']}: {event['signal']}, {event['action']}",
        event["cause"],
        *(f"{name.replace('_', ' ')} {_shorten_list(culprit[name])}" for name in names if culprit.get(name)),
        f"would have helped: {', '.join(works)}" if works else None,
    ]
    return "; ".join(part for part in parts if part)


def _shorten_list(value: object) -> object:
    """Returns the ends of a long list as text; a rewind leaves out the rows of many batches."""
    if not isinstance(value, list) or len(value) <= MAX_ROWS:
        return value
    return f"{value[0]} ... {value[-1]} ({len(value)})"


def find_first(events: Sequence[EventRow]) -> EventRow:
    """Returns the first event in which the guard acted, or the first of all if it only observed."""
    return next((event for event in events if event["action"] != "observed"), events[0])


def describe(outcome: Outcome) -> dict[str, str]:
    """Returns the outcome of a run as texts by topic."""
    bad = outcome.bad_weights
    return {
        "run": f"{outcome.steps} steps{outcome.end and ', '}{outcome.end}",
        "weights": f"NOT FINITE: {len(bad)} of {outcome.num_weights} tensors" if bad else "all finite",
        "logged losses": format_losses(outcome.losses),
        **{name: format_number(value) for name, value in outcome.figures.items()},
        "events": format_counts(count_events(outcome.events)),
        **({"first culprit": format_event(find_first(outcome.events))} if outcome.events else {}),
    }


def print_comparison(outcomes: Sequence[Outcome], console: Console) -> None:
    """Prints runs as a table on a terminal or one after the other elsewhere, and the paths of their events."""
    answers = [describe(outcome) for outcome in outcomes]
    topics = list(dict.fromkeys(topic for answer in answers for topic in answer))
    console.print()
    if console.is_terminal:
        table = Table("", *(Column(outcome.name, overflow="fold") for outcome in outcomes), show_lines=True)
        for topic in topics:
            table.add_row(topic, *(answer.get(topic, "-") for answer in answers))
        console.print(table)
    else:
        width = max(map(len, topics))
        for outcome, answer in zip(outcomes, answers, strict=True):
            for line in (outcome.name, *(f"  {topic:<{width}}  {text}" for topic, text in answer.items())):
                print_line(console, line)
    for outcome in outcomes:
        for kind, path in find_evidence(outcome).items():
            print_line(console, f"{kind} of the {outcome.name} run: {path}")


def measure_rewards(trainer: Trainer) -> Figures:
    """Returns the mean reward at the beginning and at the end of a run, each over a tenth of its logged rows."""
    rewards = [row["reward"] for row in trainer.state.log_history if row.get("reward") is not None]
    rewards = [reward for reward in rewards if reward == reward]  # NaN if no completion of the row could be scored
    if not rewards:
        return {}
    num = max(len(rewards) // 10, 1)
    return {"mean reward, first": sum(rewards[:num]) / num, "mean reward, last": sum(rewards[-num:]) / num}


def find_evidence(outcome: Outcome) -> dict[str, Path]:
    """Returns the event file and the autopsy folder of a run, as far as they exist."""
    if not outcome.events:
        return {}
    folder = outcome.folder / GUARD_FOLDER
    bundles = folder / "autopsy"
    return {"events": events_path(folder, 0), **({"autopsies": bundles} if bundles.is_dir() else {})}
