"""How a Trainer's micro-batches are run again: through its own `training_step`, with the inputs it had prepared."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...boundary import attempt
from ...core.ranks import Ranks
from ...core.rerun.buffers import BufferKeeper
from ...core.rerun.kept_attributes import WatchedAttributes, untouched, untouched_modules
from ...core.rerun.micro_batch import AccumulationGroup, MicroBatch
from ...core.rerun.runner import Runner
from ...own_fields import own_fields
from ..compat.accelerate import bare_optimizer, local_collectives, poisoned_backward, steps_in_backward
from ..compat.own_loss import LOSS_METHODS, find_loss_state, has_own_batches
from ..compat.prepared_dataset import count_documents, find_ids, format_ids
from ..compat.trainer import (
    ITEMS,
    METRICS,
    completion_mask,
    count_items,
    counts_per_generation,
    loss_shifts_labels,
    metric_lists,
    metric_store,
    num_tokens,
    set_accumulation_steps,
    set_num_tokens,
)
from ..compat.trainer_protocol import HostTrainer
from ..data.batch_limits import find_limits
from ..data.source_rows import find_source
from .held_inputs import HeldInputs, LossWeight, Replayer
from .trainer_facts import describe_trainer


def decode_sample(tokenizer: object, inputs: object, sample: int) -> str | None:
    """Returns the text of a sample, `None` without ids or a tokenizer or processor that can decode."""
    if not isinstance(inputs, Mapping):
        return None
    parts = [inputs[name] for name in ("prompt_ids", "completion_ids") if name in inputs] or [inputs.get("input_ids")]
    if not hasattr(tokenizer, "decode") or any(not isinstance(part, Tensor) or sample >= len(part) for part in parts):
        return None
    return tokenizer.decode([token for part in parts for token in part[sample].tolist()], skip_special_tokens=True)


class TrainerRunner(Runner):
    """The runner of a guarded Trainer."""

    def __init__(self, trainer: HostTrainer, model: nn.Module, ranks: Ranks, replayer: Replayer):
        super().__init__(model, trainer.accelerator.scaler)
        modules, owners = find_loss_state(trainer)
        self.buffers = BufferKeeper(model, modules, [WatchedAttributes(owner, METRICS) for owner in owners])
        self.trainer = trainer
        self.ranks = ranks
        self.replayer = replayer  # hands held inputs to the trainer's `training_step`
        # The names of the trainer's metrics before the group, the lists among them, each with a copy, and what preparing added:
        # the name, whether it is another list, and the values.
        self.metric_names: set[str] = set()
        self.metrics_before: dict[str, tuple[list, list]] = {}
        self.metrics_prepared: list[tuple[str, bool, list]] = []

    def why_not(self, group: AccumulationGroup) -> str | None:
        trainer = self.trainer
        if group.failure is not None:
            return super().why_not(group)
        if steps_in_backward(trainer):
            return "DeepSpeed steps its engine inside the backward"
        if trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1:
            return "ranks that weight a batch cannot redo it apart"
        if self.replayer.num_backwards > 1:  # a rank with nothing left would join one reduction only
            return "its training_step runs more than one backward pass, and ranks must run equally many"
        if any(not isinstance(micro.payload, HeldInputs) for micro in group.micro_batches):
            return "the trainer did not prepare its inputs through _prepare_inputs"
        if any(micro.payload.written for micro in group.micro_batches):
            return "the loss changed its inputs in place"
        return None

    def begin_group(self) -> None:
        """Notes what the group is about to change: module buffers, and the trainer's metric lists."""
        self.buffers.keep()
        self.metric_names = {*metric_store(self.trainer)}
        self.metrics_before, self.metrics_prepared = self._copy_metrics(), []

    def _copy_metrics(self) -> dict[str, tuple[list, list]]:
        return {name: (values, [*values]) for name, values in metric_lists(self.trainer).items()}

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Surrounds what prepares a batch: its metrics (of completions and their rewards) stay, because it is not repeated."""
        before = {name: (values, len(values)) for name, values in metric_lists(self.trainer).items()}
        yield
        for name, values in metric_lists(self.trainer).items():
            known, length = before.get(name, (values, 0))
            if values is not known:
                self.metrics_prepared.append((name, True, [*values]))
            elif len(values) > length:
                self.metrics_prepared.append((name, False, values[length:]))

    def remove_metrics(self) -> None:
        """Removes what the losses of the group added to the trainer's metric lists, and puts back the lists that they replaced."""
        metrics = metric_store(self.trainer)
        for name in metric_lists(self.trainer).keys() - self.metric_names:  # TRL divides by the length of every list
            del metrics[name]
        for name, (values, copy) in self.metrics_before.items():
            values[:] = copy
            metrics[name] = values
        for name, replaces, values in self.metrics_prepared:
            metrics[name] = [*([] if replaces else metrics.get(name, [])), *values]

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Surrounds a log of the host inside a group: the lists that it takes or empties, as TRL's does, do not come back."""
        before = {name: (values, len(values)) for name, values in metric_lists(self.trainer).items()}
        yield
        now, names = self._copy_metrics(), {*metric_store(self.trainer)}
        kept = {name for name, (values, length) in before.items() if name in now and now[name][0] is values
                and len(values) >= length}  # fmt: skip
        logged = before.keys() - kept
        self.metric_names = self.metric_names - logged | (names & logged)
        self.metrics_before = {name: both for name, both in self.metrics_before.items() if name not in logged}
        self.metrics_before |= {name: both for name, both in now.items() if name in logged}
        self.metrics_prepared = [added for added in self.metrics_prepared if added[0] not in logged]

    def loss_functions(self) -> list[object]:
        own = [own_fields(cls).get(name) for cls in type(self.trainer).__mro__ for name in LOSS_METHODS]
        return [own_fields(self.trainer), *own]

    @contextmanager
    def isolated(self) -> Iterator[None]:
        with untouched(self.trainer), untouched_modules(self.model):
            yield

    @contextmanager
    def recorded(self, weight: LossWeight) -> Iterator[None]:
        self.remove_metrics()
        num_before = num_tokens(self.trainer)
        own = [watched for watched in self.buffers.watched if watched.owner is self.trainer]
        kept = {name for watched in own for name in watched.written}  # the loss goes on with these
        with untouched(self.trainer, ignored={*kept, *METRICS}):
            yield
        if num_before is not None and self._runs_alone(weight):  # each has counted its own
            counted = self.ranks.gather((num_tokens(self.trainer) or 0) - num_before)
            if any(counted):  # an online trainer has the attribute, and logs what it has generated
                set_num_tokens(self.trainer, num_before + sum(counted))

    def run(self, micro: MicroBatch, weight: LossWeight) -> Tensor:
        trainer = self.trainer
        set_accumulation_steps(trainer, weight.steps)
        inputs = micro.payload.again()
        if weight.completion_items is not None:
            inputs[ITEMS] = weight.completion_items
        with local_collectives(self._runs_alone(weight)), self.replayer.replaying(HeldInputs.of(inputs)):
            return trainer.training_step(self.model, inputs, weight.num_items)

    def _runs_alone(self, weight: LossWeight) -> bool:
        """Whether ranks run different numbers of micro-batches again, each without the others."""
        return self.trainer.args.world_size > 1 and not (self.lockstep or weight.even)

    def probe(self, micro: MicroBatch, weight: LossWeight) -> Tensor:
        return super().probe(micro, LossWeight(weight.steps, weight.num_items, even=False))

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

    def weigh_alone(self, micro: MicroBatch) -> LossWeight:
        trainer, batch = self.trainer, micro.payload.inputs
        counted: Any = count_items(trainer, [batch], trainer.args.device)
        if counted is not None and trainer.args.average_tokens_across_devices:  # the loss is multiplied by the ranks
            counted = counted * trainer.args.world_size
        completions = None
        if not counts_per_generation(trainer) and isinstance(batch, Mapping) and ITEMS in batch:
            completions = completion_mask(dict(batch)).sum()
        return LossWeight(1, counted, even=False, completion_items=completions)

    def _add_up(self, count: Tensor | int | None) -> Tensor | int | None:
        """Returns the sum of a count over all ranks, `None` if no rank counts."""
        if self.ranks.size == 1:
            return count
        known = [n for n in self.ranks.gather(None if count is None else int(count)) if n is not None]
        return torch.tensor(sum(known), device=self.trainer.args.device) if known else None

    @property
    def poisons_gradients(self) -> bool:
        """Whether a micro-batch that must be dropped is marked in its gradients, and not in its backward alone: of sharded
        gradients, and on one rank, whose `training_step` may have a backward of its own."""
        return self.lockstep or self.ranks.size == 1

    @contextmanager
    def poisoned(self) -> Iterator[None]:
        """A block whose backward makes all ranks drop the micro-batch, and raises nothing because of that in torch's anomaly mode.
        Shards get theirs by [`Runner.poison`]."""
        marked = nullcontext() if self.lockstep else poisoned_backward(self.trainer.accelerator, self.parameters[0])
        with torch.autograd.set_detect_anomaly(False), marked:
            yield

    def unscale(self) -> None:
        self.trainer.accelerator.unscale_gradients()

    # ---- what an autopsy asks ----

    @property
    def optimizer(self) -> object:  # type: ignore[override]
        return bare_optimizer(self.trainer.optimizer)

    @property
    def max_grad_norm(self) -> float | None:  # type: ignore[override]
        return self.trainer.args.max_grad_norm

    @property
    def num_labels(self) -> int | None:
        trainer = self.trainer
        return find_limits(trainer.model, loss_shifts_labels(trainer), has_own_batches(trainer)).num_labels

    def inputs_of(self, micro: MicroBatch) -> object:
        return micro.payload.inputs

    def with_inputs(self, micro: MicroBatch, inputs: object) -> HeldInputs:
        return HeldInputs.of(inputs)

    def decode(self, micro: MicroBatch, sample: int) -> str | None:
        return decode_sample(self.trainer.processing_class, micro.payload.inputs, sample)

    def name_row(self, row: int | None, text: str | None) -> str | None:
        """The ids of the row if the trainer still has them, else file, row and ids of the row that its text was made from."""
        ids = {} if row is None else find_ids(self.trainer, row)
        if ids:
            return format_ids(ids)
        return attempt(lambda: find_source(self.trainer.train_dataset, text), lambda error: None) if text else None

    def rows_of(self, micro: MicroBatch, number: int) -> list[int] | None:
        """Packing makes several documents one row of the dataset that the trainer has prepared."""
        rows = super().rows_of(micro, number)
        packed = count_documents(self.trainer, micro.rows or [])
        return [row for row, count in packed for _ in range(count)] if sum(n for _, n in packed) == number else rows

    def facts(self, weight: LossWeight) -> dict[str, object]:
        weights = {"steps": weight.steps, "num_items": weight.num_items, "completion_items": weight.completion_items}
        return describe_trainer(self.trainer, weights)
