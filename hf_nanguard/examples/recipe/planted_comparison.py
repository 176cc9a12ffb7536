"""`--compare` of recipes/sft.py and recipes/grpo.py: the user's own trainer with a planted failure, stock and guarded."""

from collections.abc import Callable
from typing import Any

from transformers import Trainer
from trl import GRPOTrainer

from ...hf.guarded_trainer import guarded
from ..compare import Figures, Outcome, compare_runs
from ..planted_failures import AnswerTrainer, CutOffAnswer, blank_scores, find_third

Build = Callable[[object, type], Any]
Measure = Callable[[Trainer], Figures]


def compare_sft(build_trainer: Build, args: Any, measure: Measure) -> list[Outcome]:
    """Runs SFT stock and guarded; a third of the way through, one answer is cut off. Arguments as of [`compare_runs`]."""
    batch = find_third(args.max_steps) * args.gradient_accumulation_steps

    def build(args: object, trainer_class: type) -> Any:
        trainer = build_trainer(args, trainer_class)
        trainer.data_collator = CutOffAnswer(trainer.data_collator, batch)
        return trainer

    sentence = (
        f"Planted: one sample of micro-batch {batch} was cut off before its answer. All its labels are masked, so "
        "the mean loss over its answer is 0/0."
    )
    return compare_runs(build, (AnswerTrainer, guarded(AnswerTrainer)), args, sentence, measure)


def compare_grpo(build_trainer: Build, args: Any, measure: Measure) -> list[Outcome]:
    """Runs GRPO stock and guarded; a third of the way through, the scores of one completion are NaN."""
    steps = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    generation = find_third(int(args.max_steps / steps))

    def build(args: object, trainer_class: type) -> Any:
        trainer = build_trainer(args, trainer_class)
        blank_scores(trainer.accelerator.unwrap_model(trainer.model), generation)
        return trainer

    sentence = f"Planted: in generation {generation} the scores of one completion are NaN when its tokens are sampled."
    return compare_runs(build, (GRPOTrainer, guarded(GRPOTrainer)), args, sentence, measure)
