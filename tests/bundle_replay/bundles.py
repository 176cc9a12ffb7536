"""Bundles of real trainers whose batch goes bad, as an autopsy in the run writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_nanguard import GuardArguments, attach
from hf_nanguard.core.autopsy.bundle.writer import write_bundle
from hf_nanguard.core.autopsy.evidence.suspect_batch import SuspectBatch
from hf_nanguard.core.autopsy.evidence.verdict import Verdict
from hf_nanguard.core.autopsy.examiner import Budget, examine
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.core.rerun.micro_batch import MicroBatch
from hf_nanguard.core.rng import RngState
from hf_nanguard.hf.trainer.held_inputs import HeldInputs, LossWeight
from hf_nanguard.hf.trainer.trainer_runner import TrainerRunner
from tests.trainers import build

NAN = float("nan")
UP = "layers.1.mlp.up_proj.weight"
Plant = Callable[[Any, dict], None]


def healthy(model: Any, inputs: dict) -> None:
    """Nothing is wrong."""


def bad_weight(model: Any, inputs: dict) -> None:
    """One entry of a weight is NaN."""
    [weight] = [p for name, p in model.named_parameters() if name.endswith(UP)]
    weight.data[3, 2] = NAN


def overflow(model: Any, inputs: dict) -> None:
    """Two weights are so large that their product leaves float16."""
    for name, parameter in model.named_parameters():
        if name.endswith(("layers.0.mlp.up_proj.weight", "layers.0.mlp.gate_proj.weight")):
            parameter.data.mul_(3e4)


def bad_row(model: Any, inputs: dict) -> None:
    """The embedding of a token that only sample 1 holds was never initialised."""
    table = next(p for name, p in model.named_parameters() if name.endswith("embed_tokens.weight"))
    inputs["input_ids"][1, 2] = 5
    inputs["input_ids"][0][inputs["input_ids"][0] == 5] = 6
    table.data[5] = NAN


def far_policy(model: Any, inputs: dict) -> None:
    """The policy has moved so far that the ratio of GRPO overflows."""
    inputs["old_per_token_logps"] = torch.full(inputs["completion_ids"].shape, -200.0)
    inputs["advantages"] = torch.ones_like(inputs["advantages"])
    inputs["completion_mask"] = torch.ones_like(inputs["completion_mask"])


def hold(trainer: Any, plant: Plant) -> SuspectBatch:
    """Returns the first micro-batch of a trainer, set up as `train()` does, with something planted in it."""
    attach(trainer, GuardArguments(nanguard_mode="off"))
    args = trainer.args
    if args.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
    model = trainer.accelerator.prepare_model(trainer.model)
    model.train()
    batches, num_items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, args.device)
    inputs = trainer._prepare_inputs(batches[0])
    plant(trainer.model, inputs)
    runner = TrainerRunner(trainer, model, Ranks(args.device), trainer.nanguard.recorder)
    runner.buffers.keep()
    return SuspectBatch(runner, MicroBatch(0, HeldInputs.of(inputs), RngState.capture()), LossWeight(3, num_items))


def examine_and_write(
    suspect: SuspectBatch, folder: Path, weights: str = "all", change: Callable[[dict], Any] | None = None
) -> tuple[Path, Verdict]:
    """Examines a micro-batch and writes its bundle, its facts changed by somebody if need be."""
    verdict = examine(suspect, Budget(60.0), remedies=False)
    facts = suspect.runner.facts(suspect.weight)
    if change is not None:
        change(facts)
    return write_bundle(folder / "step-7", suspect, verdict, facts, weights=weights), verdict


def write(
    folder: Path, kind: str = "plain", plant: Plant = bad_weight, weights: str = "all",
    change: Callable[[dict], Any] | None = None, **settings: Any,
) -> tuple[Path, Verdict]:  # fmt: skip
    """Builds a trainer of a kind, plants something, and writes the bundle."""
    return examine_and_write(hold(build(kind, folder / "run", guard=False, **settings), plant), folder, weights, change)
