"""How a recipe runs its trainer to the end and tells what came of it."""

from collections import Counter
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from ...report.jsonl import events_path, read_jsonl
from .dialect import Plan


def say_notes(plan: Plan, trainer: Any) -> None:
    """Says what the command line leads to and the user may not expect."""
    for note in plan.notes:
        trainer.accelerator.print(f"note: {note}")


def build(trainer_class: type, **parts: Any) -> Any:
    """Builds a trainer; what the host refuses about its arguments is told in a sentence."""
    try:
        return trainer_class(**parts)
    except ArgumentError:
        raise
    except ValueError as error:
        raise ArgumentError(f"{trainer_class.__name__} refused its arguments: {' '.join(str(error).split())}") from error


def train_and_save(trainer: Any, plan: Plan) -> None:
    """Trains, saves the model as TRL's scripts do, and says what the guard had to do."""
    args = plan.training
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    trainer.accelerator.print(f"model: {args.output_dir}")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=plan.script.dataset_name)
    file = events_path(Path(args.output_dir) / "nanguard", 0)
    events = list(read_jsonl(file)) if file.is_file() else []
    counts = Counter(f"{event['signal']} {event['action']}" for event in events)
    told = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    trainer.accelerator.print(f"events: {told}, see {file}" if events else "events: none")


def is_whole(trainer: Any) -> bool:
    """Returns whether this process holds the whole model, so that it can be asked by itself."""
    return not trainer.is_fsdp_enabled and not trainer.is_deepspeed_enabled
