"""How a Trainer's micro-batches are run again: through its own `training_step`, with the inputs it had prepared."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import Trainer

from ...core.autopsy.verdict import MAX_TEXT
from ...core.ranks import Ranks
from ...core.rerun.micro_batch import AccumulationGroup, MicroBatch
from ...core.rerun.runner import Runner
from ..compat import trainer as compat
from ..compat.trainer import ITEMS, completion_mask, count_items, counts_per_generation, local_collectives, metric_lists
from .isolation import untouched, untouched_modules
from .trainer_facts import describe_trainer


@dataclass(frozen=True)
class LossWeight:
    """How the Trainer weighs a micro-batch: by the number of them, or by the items of the whole group.

    Args:
        steps (`float`):
            What per-batch means are divided by; not whole when ranks have different numbers left.
        num_items (`Tensor` or `int`, *optional*):
            What token losses are divided by.
        even (`bool`):
            Whether all ranks run the same number of micro-batches, so that metrics may be reduced across them.
        completion_items (`Tensor`, *optional*):
            What a trainer that counts completion tokens by itself, once for the whole group, divides by instead.
    """

    steps: float
    num_items: Tensor | int | None
    even: bool = True
    completion_items: Tensor | int | None = None


@dataclass(frozen=True)
class HeldInputs:
    """The inputs of a micro-batch as `_prepare_inputs` returned them: a copy of the dictionary, not of the tensors."""

    inputs: Any
    versions: tuple[int, ...]

    @classmethod
    def of(cls, inputs: Any) -> "HeldInputs":
        """Takes hold of prepared inputs."""
        return cls(copy(inputs) if isinstance(inputs, Mapping) else inputs, _versions(inputs))

    def again(self) -> Any:
        """Returns the inputs for another run; the loss may change the dictionary it gets."""
        return copy(self.inputs) if isinstance(self.inputs, Mapping) else self.inputs

    @property
    def written(self) -> bool:
        """Whether a tensor among them was changed in place since."""
        return _versions(self.inputs) != self.versions


def _versions(inputs: Any) -> tuple[int, ...]:
    values = inputs.values() if isinstance(inputs, Mapping) else ()
    return tuple(v._version for v in values if isinstance(v, Tensor) and not v.is_inference())


def decode_sample(tokenizer: Any, inputs: Mapping, sample: int) -> str | None:
    """Returns the text of a sample, printable and cut to a readable length, `None` without a tokenizer or ids.

    Args:
        tokenizer (`Any`):
            A tokenizer or processor; anything without `decode` has no text.
        inputs (`Mapping`):
            The batch.
        sample (`int`):
            Which one.
    """
    parts = [inputs[name] for name in ("prompt_ids", "completion_ids") if name in inputs] or [inputs.get("input_ids")]
    if not hasattr(tokenizer, "decode") or any(not isinstance(part, Tensor) or sample >= len(part) for part in parts):
        return None
    text = tokenizer.decode([token for part in parts for token in part[sample].tolist()], skip_special_tokens=True)
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


class TrainerRunner(Runner):
    """The runner of a guarded Trainer.

    Args:
        trainer (`Trainer`):
            The trainer.
        model (`nn.Module`):
            The model as its training loop calls it.
        ranks (`Ranks`):
            The processes that train together.
    """

    def __init__(self, trainer: Trainer, model: nn.Module, ranks: Ranks):
        super().__init__(model, trainer.accelerator.scaler)
        self.trainer = trainer
        self.ranks = ranks
        self.replayed: HeldInputs | None = None
        self.metric_lengths: dict[str, int] = {}
        self.num_backwards = 0  # of a training_step, where several ranks run it

    def why_not(self, group: AccumulationGroup) -> str | None:
        trainer = self.trainer
        if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED:
            return "DeepSpeed steps its engine inside the backward"
        if trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1:
            return "ranks that share a batch cannot redo it apart"
        if self.num_backwards > 1:  # a rank with nothing left would join one reduction and leave the others waiting
            return "its training_step runs more than one backward pass, and ranks must run equally many"
        if any(not isinstance(micro.payload, HeldInputs) for micro in group.micro_batches):
            return "the trainer did not prepare its inputs through _prepare_inputs"
        if any(micro.payload.written for micro in group.micro_batches):
            return "the loss changed its inputs in place"
        return None

    def keep_books(self) -> None:
        """Notes where the trainer's metric lists end, before the group adds to them."""
        self.metric_lengths = {name: len(values) for name, values in metric_lists(self.trainer).items()}

    def strike_group(self) -> None:
        """Takes what the group added to the metric lists out again."""
        metrics = metric_lists(self.trainer)
        for name, values in list(metrics.items()):
            del values[self.metric_lengths.get(name, 0) :]
            if not values:  # TRL divides by the length of every list there is
                del metrics[name]

    @contextmanager
    def isolated(self) -> Iterator[None]:
        with untouched(self.trainer), untouched_modules(self.model):
            yield

    @contextmanager
    def recorded(self) -> Iterator[None]:
        self.strike_group()
        metrics = metric_lists(self.trainer)
        with untouched(self.trainer):
            yield
            added = {name: list(values) for name, values in metrics.items()}
        for name, values in added.items():
            metrics[name] = values

    def run(self, micro: MicroBatch, share: LossWeight) -> Tensor:
        trainer = self.trainer
        trainer.current_gradient_accumulation_steps = share.steps  # type: ignore[assignment] # may be a fraction
        inputs = micro.payload.again()
        if share.completion_items is not None:
            inputs[ITEMS] = share.completion_items
        self.replayed = HeldInputs.of(inputs)
        try:
            with local_collectives(trainer.args.world_size > 1 and not (self.lockstep or share.even)):
                return trainer.training_step(self.model, inputs, share.num_items)
        finally:
            self.replayed = None

    def probe(self, micro: MicroBatch, share: LossWeight) -> Tensor:
        return super().probe(micro, LossWeight(share.steps, share.num_items, even=False))

    def forward(self, micro: MicroBatch) -> None:
        trainer = self.trainer
        with local_collectives(trainer.args.world_size > 1), trainer.compute_loss_context_manager():
            trainer.compute_loss(self.model, micro.payload.again())

    def regroup(self, good: list[MicroBatch], num_good: list[int]) -> LossWeight:
        trainer = self.trainer
        steps: float = sum(num_good) / len(num_good)
        batches = [micro.payload.inputs for micro in good]
        counted: Any = None if not batches else count_items(trainer, batches, trainer.args.device)
        if trainer.args.average_tokens_across_devices:
            counted = self._add_up(counted)
        elif counted is not None and 0 in num_good:  # means of single ranks: an empty one must not count as a zero
            counted = counted * (1 - num_good.count(0) / len(num_good))
        completions: Tensor | int | None = None
        if not counts_per_generation(trainer) and any(ITEMS in batch for batch in batches):
            completions = torch.stack([completion_mask(batch).sum() for batch in batches]).sum()
        completions = self._add_up(completions)
        even = len(set(num_good)) == 1
        return LossWeight(int(steps) if steps.is_integer() else steps, counted, even, completions)

    def _add_up(self, count: Tensor | int | None) -> Tensor | int | None:
        """Returns the sum of a count over all ranks, `None` if no rank counts."""
        if self.ranks.size == 1:
            return count
        known = [n for n in self.ranks.gather(None if count is None else int(count)) if n is not None]
        return torch.tensor(sum(known), device=self.trainer.args.device) if known else None

    def unscale(self) -> None:
        self.trainer.accelerator.unscale_gradients()

    # ---- what an autopsy asks ----

    @property
    def optimizer(self) -> Any:  # type: ignore[override]
        return compat.bare_optimizer(self.trainer.optimizer)

    def inputs_of(self, micro: MicroBatch) -> Any:
        return micro.payload.inputs

    def with_inputs(self, micro: MicroBatch, inputs: Any) -> HeldInputs:
        return HeldInputs.of(inputs)

    def decode(self, micro: MicroBatch, sample: int) -> str | None:
        inputs = micro.payload.inputs
        return decode_sample(self.trainer.processing_class, inputs, sample) if isinstance(inputs, Mapping) else None

    def facts(self, share: LossWeight) -> dict[str, Any]:
        weights = {"steps": share.steps, "num_items": share.num_items, "completion_items": share.completion_items}
        return describe_trainer(self.trainer, weights)
