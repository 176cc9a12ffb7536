"""A recipe from its command line to its result: common parts of supervised fine-tuning and reinforcement learning."""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments

from ...core.event import strict
from ...errors import NonFiniteError
from ...hf.guarded_trainer import guarded
from ...report.run_files import GUARD_FOLDER, Tail, events_path
from ..compare import Figures, Options, compare_runs, count_events, format_counts
from ..tasks import sums
from .command_line import check_output
from .recipe_parser import RecipeArguments, RecipeKind, parse
from .run_and_save import build, stdout_aside, train_and_save
from .user_data import check_model, fit_model, load_tokenizer, name_parts, set_model_options


@dataclass(frozen=True)
class Failure:
    """A failure from a field report: what is planted, in which stock trainer, and a function that plants it."""

    sentence: str
    trainer_class: type
    plant: Callable[[Trainer], None]


class Recipe(ABC):
    """A kind of training that a command line describes."""

    kind: RecipeKind
    trainer_class: type

    def run(self, words: Sequence[str]) -> int:
        """Runs the recipe with the words of a command line and returns the exit code."""
        arguments = parse(words, self.kind)
        check_output(arguments.training)
        with stdout_aside(arguments.flags.json):
            parts = self.gather_parts(arguments)
            result = self._compare(arguments, parts) if arguments.flags.compare else self._train(arguments, parts)
        if arguments.flags.json and PartialState().is_main_process:
            print(json.dumps(strict({"task": self.kind.name, **result}), allow_nan=False))
        return 0 if result["is_sound"] else 1

    def gather_parts(self, arguments: RecipeArguments) -> Options:
        """Returns the arguments of a trainer's constructor; the built-in model is given as a function that builds it."""
        if arguments.embedded_model:
            tokenizer: PreTrainedTokenizerBase = sums.build_tokenizer()
            own = {"model": lambda: fit_model(self.build_model(arguments.training.seed), arguments)}
        else:
            check_model(arguments)
            set_model_options(arguments)
            if not arguments.embedded_data:
                return {**name_parts(arguments), **self.load_task(arguments)}
            tokenizer, own = load_tokenizer(arguments), {}
        return {
            **name_parts(arguments),
            **self.build_task(tokenizer, arguments),
            **own,
            "processing_class": tokenizer,
        }

    def _train(self, arguments: RecipeArguments, parts: Options) -> Options:
        folder = arguments.training.output_dir
        trainer = build(self.trainer_class, args=arguments.training, **parts)
        say = trainer.accelerator.print
        for note in arguments.notes:
            say(f"note: {note}")
        tail = Tail(events_path(Path(folder) / GUARD_FOLDER, 0))
        error, figures = None, Figures()
        try:
            train_and_save(trainer, arguments)
        except NonFiniteError as halt:
            error = str(halt)
            print(f"nanguard: {error}", file=sys.stderr)
        events = tail.read()
        counts, file = count_events(events), str(tail.path) if events else None
        say(f"events: {format_counts(counts)}" + (f", see {file}" if file else ""))
        if error is None:
            figures = self.measure(trainer, arguments)
            if line := self.format_figures(figures, arguments):
                say(line)
        trainer.end()
        return {
            "is_sound": error is None, "error": error, "steps": trainer.state.global_step, "output_dir": folder,
            "figures": figures, "events": dict(counts), "events_file": file,
        }  # fmt: skip

    def _compare(self, arguments: RecipeArguments, parts: Options) -> Options:
        failure = self.find_failure(arguments)

        def build_trainer(args: TrainingArguments, guard: bool) -> Trainer:
            stock = failure.trainer_class
            trainer = build(guarded(stock) if guard else stock, args=args, **parts)
            failure.plant(trainer)
            return trainer

        outcomes = compare_runs(
            build_trainer, arguments.training, failure.sentence, lambda trainer: self.measure(trainer, arguments)
        )
        runs = [outcome.as_dict() for outcome in outcomes]
        return {"is_sound": outcomes[-1].is_sound, "planted": failure.sentence, "runs": runs}

    @abstractmethod
    def build_model(self, seed: int) -> PreTrainedModel:
        """Returns the built-in model."""

    @abstractmethod
    def build_task(self, tokenizer: PreTrainedTokenizerBase, arguments: RecipeArguments) -> Options:
        """Returns the data of the built-in task, as arguments of a trainer."""

    @abstractmethod
    def load_task(self, arguments: RecipeArguments) -> Options:
        """Returns the data that the user named, as arguments of a trainer."""

    @abstractmethod
    def measure(self, trainer: Trainer, arguments: RecipeArguments) -> Figures:
        """Returns figures of a trained trainer by name; with `--compare`, those that field reports of the failure show."""

    @abstractmethod
    def format_figures(self, figures: Figures, arguments: RecipeArguments) -> str:
        """Returns the figures in one line, which may be empty."""

    @abstractmethod
    def find_failure(self, arguments: RecipeArguments) -> Failure:
        """Returns the failure that `--compare` plants."""


def find_form(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the form of prompts: conversational if the tokenizer has a chat template."""
    return "conversational" if tokenizer.chat_template else "plain"
