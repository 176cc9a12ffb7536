"""A recipe from its command line to its end: what supervised fine-tuning and reinforcement learning have in common."""

import json
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState

from ...core.event import strict
from ...errors import NonFiniteError
from ...report.run_files import GUARD_FOLDER, Tail, events_path
from ..compare import compare_runs
from ..tasks import sums as arithmetic
from .command_line import check_output
from .recipe_parser import RecipeArguments, RecipeKind, parse
from .run_and_save import build, stdout_aside, train_and_save
from .user_data import check_model, fit_model, load_tokenizer, name_parts, set_model_options


@dataclass(frozen=True)
class Failure:
    """A failure that people met, to be planted in a trainer.

    Args:
        sentence (`str`):
            What it is.
        stock (`type`), guarded (`type`):
            The trainers that meet it.
        plant (`Callable`):
            Puts it into one that was built.
    """

    sentence: str
    stock: type
    guarded: type
    plant: Callable[[Any], None]


class Recipe(ABC):
    """A kind of training that a command line describes."""

    kind: RecipeKind
    trainer_class: type

    def run(self, words: Sequence[str]) -> int:
        """Runs the recipe with the words of a command line and returns the exit code."""
        plan = parse(words, self.kind)
        check_output(plan.training)
        with stdout_aside(plan.recipe.json):
            parts = self.gather_parts(plan)
            told = self._compare(plan, parts) if plan.recipe.compare else self._train(plan, parts)
        if plan.recipe.json and PartialState().is_main_process:
            print(json.dumps(strict(told), allow_nan=False))
        return 0 if told["is_sound"] else 1

    def gather_parts(self, plan: RecipeArguments) -> dict[str, Any]:
        """Returns what a trainer is built from; a model that is made here comes as a function."""
        seed = plan.training.seed
        if plan.embedded_model:
            tokenizer = arithmetic.build_tokenizer()
            task, make = self.make_task(tokenizer, seed, plan), self.make_model(seed, tokenizer)
            parts = {"model": lambda: fit_model(make(), plan), "processing_class": tokenizer}
            return {**name_parts(plan), **task, **parts}
        check_model(plan)
        set_model_options(plan)
        if plan.embedded_data:
            tokenizer = load_tokenizer(plan)
            return {**name_parts(plan), **self.make_task(tokenizer, seed, plan), "processing_class": tokenizer}
        return {**name_parts(plan), **self.load_task(plan)}

    def _train(self, plan: RecipeArguments, parts: dict[str, Any]) -> dict[str, Any]:
        trainer = build(self.trainer_class, args=plan.training, **fresh(parts))
        say = trainer.accelerator.print
        for note in plan.notes:
            say(f"note: {note}")
        tail = Tail(events_path(Path(plan.training.output_dir) / GUARD_FOLDER, 0))
        error, figures = None, dict[str, float | str]()
        try:
            train_and_save(trainer, plan)
        except NonFiniteError as halt:
            error = str(halt)
            print(f"nanguard: {error}", file=sys.stderr)
        events = tail.read()
        counts = Counter(f"{event['signal']} {event['action']}" for event in events)
        told = ", ".join(f"{number} {kind}" for kind, number in counts.items())
        say(f"events: {told}, see {tail.path}" if events else "events: none")
        if error is None:
            figures = self.measure(trainer, plan)
            if line := self.tell(figures, plan):
                say(line)
        trainer.end()
        return {
            "task": self.kind.name, "is_sound": error is None, "error": error, "steps": trainer.state.global_step,
            "output_dir": plan.training.output_dir, "figures": figures, "events": dict(counts),
            "events_file": str(tail.path) if events else None,
        }  # fmt: skip

    def _compare(self, plan: RecipeArguments, parts: dict[str, Any]) -> dict[str, Any]:
        failure = self.plan_failure(plan)

        def build_trainer(args: Any, guard: bool) -> Any:
            trainer = build(failure.guarded if guard else failure.stock, args=args, **fresh(parts))
            failure.plant(trainer)
            return trainer

        outcomes = compare_runs(
            build_trainer, plan.training, failure.sentence, lambda trainer: self.measure_planted(trainer, plan)
        )
        runs = [outcome.as_dict() for outcome in outcomes]
        return {"task": self.kind.name, "is_sound": outcomes[-1].is_sound, "planted": failure.sentence, "runs": runs}

    @abstractmethod
    def make_model(self, seed: int, tokenizer: Any) -> Callable[[], Any]:
        """Returns a function that makes the embedded model."""

    @abstractmethod
    def make_task(self, tokenizer: Any, seed: int, plan: RecipeArguments) -> dict[str, Any]:
        """Returns the embedded task, as parts of a trainer."""

    @abstractmethod
    def load_task(self, plan: RecipeArguments) -> dict[str, Any]:
        """Returns the task that was named, as parts of a trainer."""

    @abstractmethod
    def measure(self, trainer: Any, plan: RecipeArguments) -> dict[str, float | str]:
        """Returns figures of a trained trainer by name."""

    @abstractmethod
    def tell(self, figures: dict[str, float | str], plan: RecipeArguments) -> str:
        """Returns the figures in a line, which may be empty."""

    @abstractmethod
    def measure_planted(self, trainer: Any, plan: RecipeArguments) -> dict[str, float | str]:
        """Returns figures of a trainer that met the planted failure."""

    @abstractmethod
    def plan_failure(self, plan: RecipeArguments) -> Failure:
        """Returns the failure that `--compare` plants."""


def fresh(parts: dict[str, Any]) -> dict[str, Any]:
    """Returns the parts with a new model."""
    return {**parts, "model": parts["model"]() if callable(parts["model"]) else parts["model"]}


def find_form(tokenizer: Any) -> str:
    """Returns how to ask a model: as a user, if it knows such."""
    return "conversational" if tokenizer.chat_template else "plain"
