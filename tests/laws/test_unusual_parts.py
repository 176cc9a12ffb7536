"""Unusual but legitimate parts, each given by one expression: modules, inner updates, optimizers, schedules, data, callbacks,
arguments, ways to run and TRL trainers. Guarded, they train as stock, and a bad step of theirs leaves no trace."""

import copy
import random
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset as Rows
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.optim import lr_scheduler
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, WeightedRandomSampler
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    default_data_collator,
)

from tests.models import VOCAB, text_rows, tiny_llama, tiny_t5, tiny_tokenizer, token_rows

from .test_unusual_trainers import callback_with, trainer_with, with_optimizer
from .unusual_run import Run, Table, check_as_stock, check_no_trace

TABLE = Table()
ONLY_HEALTHY: set[str] = set()  # set-ups in which a step cannot be spoiled by the output of the model


# ---- models ----


class Words(nn.Module):
    """Predicts each token from itself, through whatever `middle` is."""

    def __init__(self, middle: nn.Module | None = None, **embedding: Any):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 8, **embedding), nn.Linear(8, VOCAB)
        self.middle = middle or nn.Identity()

    def states(self, input_ids):
        return self.middle(self.embedding(input_ids))

    def loss(self, states, labels):
        return functional.cross_entropy(self.head(states).flatten(0, 1), labels.flatten())

    def forward(self, input_ids, labels, **kwargs):
        states = self.states(input_ids)
        return {"loss": self.loss(states, labels), "logits": states}


def module_of(forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    """A module that is one function of itself and its input."""
    own = type("Own", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(own, name, value)
    return own


def words_of(forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    """A model of words with another forward, called with the model, ids and labels."""

    def call(self, input_ids, labels=None, **kwargs):
        return forward(self, input_ids, labels)

    own = type("Own", (Words,), {"forward": call})()
    for name, value in attributes.items():
        setattr(own, name, value)
    return own


def buffered(forward: Callable[..., Any], **buffers: torch.Tensor) -> nn.Module:
    own = module_of(forward)
    for name, value in buffers.items():
        own.register_buffer(name, value, persistent=False)
    return own


class Noisy(torch.autograd.Function):
    """Draws random numbers in its backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 0.01 * torch.rand(()))


Pair = namedtuple("Pair", "loss logits")


def recurrent(self, x):
    states, last = self.cell(x, self.last if len(x) == 2 else None)
    self.last = tuple(part.detach() for part in last)
    return states


def codebook(self, x):
    flat = x.detach().flatten(0, 1)
    nearest = torch.cdist(flat, self.codes).argmin(1)
    self.codes.mul_(0.9).index_add_(0, nearest, 0.01 * flat)
    return x + (self.codes[nearest].view_as(x) - x).detach()


def normalized(self, x):
    with torch.no_grad():
        self.linear.weight.copy_(functional.normalize(self.linear.weight, dim=1))
    return self.linear(x)


def dropped_layers(self, x):
    for layer in self.layers:
        x = layer(x) if torch.rand(()) < 0.5 else x
    return x


def inner_step(self, input_ids, labels):
    """One step of learning inside the forward, through which gradients flow."""
    states = self.states(input_ids)
    [gradient] = torch.autograd.grad(self.loss(states, labels), self.head.weight, create_graph=True)
    logits = functional.linear(states, self.head.weight - 0.1 * gradient, self.head.bias)
    return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def by_chance(self, input_ids, labels):
    states = self.states(input_ids.flip(1) if random.random() < 0.5 else input_ids)
    return {"loss": self.loss(states * float(np.random.rand()), labels)}


def bfloat16_inside(self, x):
    return self.third(self.second(self.first(x.bfloat16()).double()).half()).float()


for name, model in {
    "an_embedding_that_scales_the_rows_it_looks_up": lambda: Words(max_norm=0.5),
    "weights_that_a_forward_normalizes": lambda: Words(module_of(normalized, linear=nn.Linear(8, 8))),
    "an_orthogonal_layer": lambda: Words(nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))),
    "a_backward_that_draws_random_numbers": lambda: Words(module_of(lambda self, x: Noisy.apply(x))),
    "a_recurrent_net_that_remembers_batches": lambda: Words(
        module_of(recurrent, cell=nn.LSTM(8, 8, batch_first=True), last=None)
    ),
    "a_codebook_that_follows_its_inputs": lambda: Words(buffered(codebook, codes=torch.randn(16, 8))),
    "layers_that_are_left_out_by_chance": lambda: Words(
        module_of(dropped_layers, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))
    ),
    "parts_in_four_dtypes": lambda: Words(
        module_of(bfloat16_inside, first=nn.Linear(8, 8).bfloat16(), second=nn.Linear(8, 8).double(),
                  third=nn.Linear(8, 8).half())
    ),
    "a_step_of_learning_inside_the_forward": lambda: words_of(inner_step),
    "random_numbers_of_python_and_numpy": lambda: words_of(by_chance),
    "a_named_tuple_as_output": lambda: words_of(lambda self, ids, labels: Pair(**Words.forward(self, ids, labels))),
    "labels_made_by_the_model": lambda: words_of(lambda self, ids, labels: {"loss": self.loss(self.states(ids), ids)}),
    "parameters_without_entries_and_without_use": lambda: words_of(
        lambda self, ids, labels: {"loss": Words.forward(self, ids, labels)["loss"] * self.scale + self.none.sum()},
        none=nn.Parameter(torch.zeros(0, 4)), unused=nn.Parameter(torch.ones(3)), scale=nn.Parameter(torch.tensor(1.0)),
    ),
    "tensors_saved_elsewhere_for_the_backward": lambda: Words(
        module_of(lambda self, x: saved_elsewhere(self.linear, x), linear=nn.Linear(8, 8))
    ),
    "a_lazy_layer_after_its_first_use": lambda: first_used(Words(nn.LazyLinear(8))),
    "batch_norm_that_stays_in_evaluation": lambda: Words(
        module_of(lambda self, x: self.norm(x.transpose(1, 2)).transpose(1, 2), norm=nn.BatchNorm1d(8).eval(),
                  train=lambda mode=True: None)
    ),
}.items():  # fmt: skip
    TABLE.add(name, partial(lambda make: Run(make()), model), quick=name.startswith("an_embedding_that"))


def saved_elsewhere(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return module(x)


def first_used(model: nn.Module) -> nn.Module:
    model(torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long))
    return model


# ---- updates inside a step ----


def adversary_of(model: nn.Module) -> Any:
    torch.manual_seed(1)
    net = nn.Linear(VOCAB, 1)
    return SimpleNamespace(net=net, optimizer=torch.optim.Adam(net.parameters(), lr=1e-2))


@TABLE.setup
def an_adversary_with_an_optimizer_of_its_own() -> Run:
    adversary = adversary_of(nn.Identity())

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        adversary.optimizer.zero_grad()
        adversary.net(outputs.logits.detach()).mean().backward()
        adversary.optimizer.step()
        return outputs.loss - adversary.net(outputs.logits).mean()

    return Run(trainer_class=trainer_with(compute_loss=compute_loss))


@TABLE.slow_setup
def weights_that_are_moved_uphill_and_back() -> Run:
    """Sharpness-aware minimisation by the size of the gradient, which carries its NaN into the weights."""

    def training_step(self, model, inputs, *args):
        super(own, self).training_step(model, dict(inputs), *args)
        moves = [0.01 * parameter.grad for parameter in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moves)
        model.zero_grad()
        loss = super(own, self).training_step(model, dict(inputs), *args)
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        return loss

    own = trainer_with(training_step=training_step)
    return Run(trainer_class=own, arguments={"gradient_accumulation_steps": 1})


UPDATED = {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0}


@TABLE.slow_setup
def updates_in_the_hooks_of_gradients() -> Run:
    model = tiny_llama()

    def update(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=1e-2)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return Run(model, arguments=UPDATED)


class Idle(torch.optim.SGD):
    """Leaves the updates to others."""

    def step(self, closure=None):
        pass


def an_optimizer_for_each_weight() -> Run:
    def make(model):
        optimizers = {parameter: torch.optim.Adam([parameter], lr=1e-2) for parameter in model.parameters()}

        def update(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(update)
        return Idle(model.parameters(), lr=0.1)

    return with_optimizer(make, arguments=UPDATED)


def a_step_taken_inside_the_training_step() -> Run:
    def training_step(self, model, inputs, *args):
        model.train()
        loss = model(**self._prepare_inputs(inputs)).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    return Run(trainer_class=trainer_with(training_step=training_step))


ANNOUNCED = Table()  # the guard says of them that it knows their losses alone
ANNOUNCED.slow_setup(an_optimizer_for_each_weight)
ANNOUNCED.slow_setup(a_step_taken_inside_the_training_step)


# ---- optimizers and schedules ----


class Plain(torch.optim.Optimizer):
    """An optimizer without state that calls a function of each gradient."""

    def __init__(self, parameters, direction):
        super().__init__(parameters, {"lr": 1e-3})
        self.direction = direction

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self.direction(parameter), alpha=-group["lr"])


optim = torch.optim
for name, make in {
    "signs_of_gradients": lambda model: Plain(model.parameters(), lambda p: p.grad.sign()),
    "updates_with_noise": lambda model: Plain(model.parameters(), lambda p: p.grad + 0.1 * torch.randn_like(p)),
    "low_rank_updates": lambda model: Plain(
        model.parameters(), lambda p: p.grad if p.ndim < 2 else (lambda u: u @ (u.T @ p.grad))(torch.linalg.svd(p.grad)[0][:, :2])
    ),
    "amsgrad_in_a_fused_kernel": lambda model: optim.AdamW(model.parameters(), fused=True, amsgrad=True),
    "rprop": lambda model: optim.Rprop(model.parameters()),
    "averaged_sgd": lambda model: optim.ASGD(model.parameters()),
    "adadelta_over_all_tensors_at_once": lambda model: optim.Adadelta(model.parameters(), foreach=True),
    "rectified_adam": lambda model: optim.RAdam(model.parameters()),
    "nesterov_with_decay": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "groups_whose_rate_is_zero": lambda model: optim.AdamW(
        [{"params": [p], "lr": (0.0, 1e-2)[i % 2]} for i, p in enumerate(model.parameters())]
    ),
    "a_rate_that_is_a_tensor": lambda model: optim.AdamW(model.parameters(), lr=torch.tensor(1e-2)),
    "parameters_given_by_name": lambda model: optim.AdamW(model.named_parameters(), lr=1e-2),
    "muon_for_matrices": lambda model: optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2),
    "an_optimizer_of_the_head_alone": lambda model: optim.SGD(model.lm_head.parameters(), lr=0.1),
    "an_optimizer_that_maximizes": lambda model: optim.Adam(model.parameters(), maximize=True),
}.items():  # fmt: skip
    TABLE.add(name, partial(with_optimizer, make))

for name, make in {
    "a_cycle_of_rates_and_momenta": lambda given: lr_scheduler.CyclicLR(given, 1e-3, 1e-1, step_size_up=2),
    "schedules_in_a_chain": lambda given: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(given, 0.9), lr_scheduler.StepLR(given, 2)]
    ),
    "schedules_in_turn": lambda given: lr_scheduler.SequentialLR(
        given, [lr_scheduler.LinearLR(given, total_iters=1), lr_scheduler.CosineAnnealingLR(given, 5)], [1]
    ),
    "a_schedule_of_factors": lambda given: lr_scheduler.MultiplicativeLR(given, lambda step: 0.9),
    "a_schedule_for_averaged_weights": lambda given: optim.swa_utils.SWALR(given, 0.05, anneal_epochs=2),
}.items():
    sgd = lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    TABLE.add(name, partial(with_optimizer, sgd, make))


# ---- data ----


class Stream(IterableDataset):
    """Rows in an order that changes with the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rows = token_rows(24)
        random.Random(self.epoch).shuffle(rows)
        yield from rows[:12]


class Shifted(Dataset):
    """Rows that are turned by chance whenever they are read."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        row, turn = dict(token_rows(24)[index]), int(torch.randint(0, 4, ()))
        return {**row, "input_ids": row["input_ids"][turn:] + row["input_ids"][:turn]}


class Batched(Dataset):
    """Rows that are read several at a time."""

    def __len__(self):
        return 24

    def __getitems__(self, indices):
        return [{name: torch.tensor(value) for name, value in token_rows(24)[i].items()} for i in indices]


def masked(examples: list) -> dict:
    batch = default_data_collator(examples)
    chosen = torch.rand(batch["input_ids"].shape) < 0.5
    np.random.rand()
    return {**batch, "labels": batch["labels"].masked_fill(~chosen, -100), "input_ids": batch["input_ids"] ^ 1}


def ragged() -> list[dict]:
    return [{name: value[: 3 + i % 5] for name, value in row.items()} for i, row in enumerate(token_rows(24))]


def padded() -> Any:
    return DataCollatorForSeq2Seq(tiny_tokenizer(), padding=True)


def mlm_collator() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = "<unk>"
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)


def by_weight(self, *args):
    return WeightedRandomSampler([1.0 + i % 3 for i in range(24)], 24)


def two_loaders(self):
    class Both(DataLoader):
        def __iter__(self):
            for pair in zip(*loaders, strict=True):
                yield from pair

    loaders = [Trainer.get_train_dataloader(self) for _ in range(2)]
    return Both(self.train_dataset, batch_size=2)


def sharded() -> Any:
    rows = Rows.from_list(token_rows(48)).to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=7)
    return rows.map(lambda row: {**row, "labels": row["input_ids"][::-1]}).filter(lambda row: row["input_ids"][1] % 5)


LONG = {"max_steps": 7}
for name, make in {
    "a_stream_of_another_order_each_epoch": lambda: Run(rows=Stream(), arguments=LONG),
    "a_stream_of_shards_that_is_shuffled_mapped_and_filtered": lambda: Run(rows=sharded(), arguments={"max_steps": 5}),
    "rows_that_are_turned_by_chance": lambda: Run(rows=Shifted()),
    "rows_that_are_turned_by_chance_in_workers": lambda: Run(
        rows=Shifted(), arguments={**LONG, "dataloader_num_workers": 2, "dataloader_prefetch_factor": 1}
    ),
    "rows_read_several_at_a_time": lambda: Run(rows=Batched()),
    "datasets_one_after_another": lambda: Run(
        rows=ConcatDataset([Subset(token_rows(24), [3, 1, 2]), token_rows(9)]), arguments=LONG
    ),
    "columns_that_are_removed": lambda: Run(
        rows=Rows.from_list([{**row, "text": "x"} for row in token_rows(24)]), arguments={"remove_unused_columns": True}
    ),
    "a_collator_that_draws_a_mask": lambda: Run(extra={"data_collator": masked}),
    "a_collator_that_is_partial": lambda: Run(
        extra={"data_collator": partial(default_data_collator, return_tensors="pt")}
    ),
    "words_to_be_guessed": lambda: Run(
        rows=[{"input_ids": row["input_ids"]} for row in token_rows(24)], extra={"data_collator": mlm_collator()}
    ),
    "rows_of_many_lengths_grouped": lambda: Run(
        rows=ragged(), extra={"data_collator": padded()}, arguments={"train_sampling_strategy": "group_by_length"}
    ),
    "rows_drawn_by_weight": lambda: Run(trainer_class=trainer_with(_get_train_sampler=by_weight), arguments=LONG),
    "two_dataloaders_in_turn": lambda: Run(
        trainer_class=trainer_with(get_train_dataloader=two_loaders), arguments=LONG
    ),
    "a_last_batch_of_one_row": lambda: Run(rows=token_rows(9), arguments={**LONG, "per_device_train_batch_size": 4}),
}.items():
    TABLE.add(name, make)


# ---- callbacks ----


class Holder:
    """Gives callbacks their trainer."""

    trainer: Any = None

    def take(self, trainer: Any) -> None:
        self.trainer = trainer


def called(make: Callable[[Holder], dict[str, Callable[..., Any]]], **more: Any) -> Callable[[], Run]:
    def build() -> Run:
        holder, given = Holder(), copy.deepcopy(more)
        extra = {"callbacks": [callback_with(**make(holder))], **given.pop("extra", {})}
        return Run(extra=extra, change=holder.take, **given)

    return build


def other_optimizer(holder: Holder) -> dict:
    def on_step_begin(state, model, **kwargs):
        if state.global_step == 2:
            trainer = holder.trainer
            trainer.optimizer = trainer.accelerator.prepare_optimizer(optim.SGD(model.parameters(), lr=0.1))
            trainer.lr_scheduler = lr_scheduler.ConstantLR(trainer.optimizer, 1.0)

    return {"on_step_begin": on_step_begin}


def other_module(holder: Holder) -> dict:
    def on_step_begin(state, model, **kwargs):
        if state.global_step == 2:
            torch.manual_seed(2)
            model.model.layers[1].mlp = nn.Sequential(nn.Linear(16, 16), nn.GELU())

    return {"on_step_begin": on_step_begin}


def pruned(holder: Holder) -> dict:
    def on_step_begin(state, model, **kwargs):
        if state.global_step == 2:
            prune.l1_unstructured(model.lm_head, "weight", amount=0.5)

    return {"on_step_begin": on_step_begin}


def other_arguments(holder: Holder) -> dict:
    def on_step_begin(state, args, optimizer, **kwargs):
        args.gradient_accumulation_steps, args.logging_steps = 3, 2
        args.max_grad_norm = (0.0, 0.1, 1e9)[state.global_step % 3]
        optimizer.param_groups[0]["lr"] = 0.0

    return {"on_step_begin": on_step_begin}


def other_callbacks(holder: Holder) -> dict:
    def on_step_end(state, **kwargs):
        if state.global_step == 1:
            holder.trainer.pop_callback(PrinterCallback)
            holder.trainer.add_callback(callback_with(on_step_end=lambda state, **kwargs: torch.rand(1)))

    return {"on_step_end": on_step_end}


def asking(**flags: Callable[[int], bool]) -> Callable[[Holder], dict]:
    """Sets flags of the control at the end of a step, each by its number."""

    def on_step_end(state, control, **kwargs):
        for name, is_set in flags.items():
            setattr(control, f"should_{name}", is_set(state.global_step))

    return lambda holder: {"on_step_end": on_step_end}


def jumping(holder: Holder) -> dict:
    def on_step_end(state, **kwargs):
        state.global_step = max(state.global_step, 5) if state.global_step > 1 else 1

    return {"on_step_end": on_step_end}


def in_double(holder: Holder) -> dict:
    return {
        "on_step_begin": lambda state, **kwargs: torch.set_default_dtype(
            torch.float64 if state.global_step == 2 else torch.float32
        ),
        "on_train_end": lambda state, **kwargs: torch.set_default_dtype(torch.float32),
    }


EVALUATED = {"extra": {"eval_dataset": token_rows(4)}}
for name, make in {
    "an_optimizer_replaced_by_a_callback": called(other_optimizer, arguments={"max_steps": 4}),
    "a_module_replaced_by_a_callback": called(other_module, arguments={"max_steps": 4}),
    "a_head_pruned_by_a_callback": called(pruned, arguments={"max_steps": 4}),
    "arguments_changed_before_every_step": called(other_arguments, arguments={"max_steps": 5}),
    "callbacks_added_and_removed_by_a_callback": called(other_callbacks),
    "a_callback_that_asks_for_everything": called(
        asking(log=lambda n: True, save=lambda n: n == 2, evaluate=lambda n: True), **EVALUATED
    ),
    "epochs_that_a_callback_cuts_short": called(
        asking(epoch_stop=lambda n: n % 2 == 0), arguments={"max_steps": 6}
    ),
    "a_run_that_a_callback_stops": called(asking(training_stop=lambda n: n == 3), arguments={"max_steps": 6}),
    "a_callback_that_moves_the_step_on": called(jumping, arguments={"max_steps": 7}),
    "a_callback_that_changes_the_default_dtype": called(in_double),
}.items():  # fmt: skip
    TABLE.add(name, make)


# ---- arguments and ways to run ----


def inside(make: Callable[[], Any]) -> Callable[[Any], None]:
    """Trains inside a context."""

    def train(trainer: Any) -> None:
        with make():
            trainer.train()

    return train


def with_copy(trainer: Any) -> None:
    other = copy.deepcopy(trainer)
    vars(other).pop("training_step", None)  # of a step that is left out of the first
    other.train()
    trainer.train()


def with_other_model(trainer: Any) -> None:
    trainer.train()
    trainer.model = trainer.model_wrapped = tiny_llama(5)
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.train()


def with_evaluations(trainer: Any) -> None:
    with torch.inference_mode():
        trainer.evaluate()
    trainer.train()
    with torch.no_grad():
        trainer.predict(token_rows(4))
    trainer.train()


def with_patches(trainer: Any) -> None:
    original = Trainer.training_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "training_step", lambda self, *args, **kwargs: original(self, *args, **kwargs))
        trainer.train()


def methods_on_the_trainer(trainer: Any) -> None:
    for name in ("compute_loss", "log", "_prepare_inputs", "get_batch_samples"):
        setattr(trainer, name, partial(lambda own, *args, **kwargs: own(*args, **kwargs), getattr(trainer, name)))


for name, more in {
    "the_filter_of_gradients_that_never_clips": {"arguments": {"max_grad_norm": float("inf")}},
    "clipping_to_hardly_anything": {"arguments": {"max_grad_norm": 1e-9}},
    "noise_and_smoothing_together": {"arguments": {"neftune_noise_alpha": 3.0, "label_smoothing_factor": 0.2}},
    "logging_in_a_ratio_of_the_run": {"arguments": {"logging_steps": 0.5, "max_steps": 6}},
    "a_log_without_rows": {"arguments": {"logging_strategy": "no"}},
    "batches_split_among_processes": {
        "arguments": {"accelerator_config": {"split_batches": True, "even_batches": False}, "max_steps": 5}
    },
    "a_sampler_without_a_seed": {
        "arguments": {"accelerator_config": {"use_seedable_sampler": False, "non_blocking": True}, "max_steps": 7}
    },
    "less_than_an_epoch": {"arguments": {"num_train_epochs": 0.4, "max_steps": -1}},
    "losses_whose_nan_the_log_shows": {"arguments": {"logging_nan_inf_filter": False, "logging_steps": 2}},
    "a_run_in_autocast": {"train": inside(lambda: torch.autocast("cpu", dtype=torch.bfloat16))},
    "a_run_whose_operations_are_counted": {"train": inside(lambda: FlopCounterMode(display=False))},
    "a_copied_trainer_beside_the_first": {"train": with_copy},
    "a_model_replaced_between_two_runs": {"train": with_other_model},
    "evaluations_between_two_runs": {"train": with_evaluations, "extra": {"eval_dataset": token_rows(4)}},
    "a_class_that_is_patched_for_the_run": {"train": with_patches},
    "methods_put_on_the_trainer": {"change": methods_on_the_trainer},
}.items():
    TABLE.add(name, partial(Run, **more))


# ---- generation and TRL ----


@TABLE.slow_setup
def generation_in_evaluation() -> Run:
    arguments = {
        "predict_with_generate": True, "generation_max_length": 5, "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip
    metrics = lambda found: {"sum": int(np.asarray(found.predictions).sum())}  # noqa: E731
    extra = {"eval_dataset": token_rows(4), "processing_class": tiny_tokenizer(), "compute_metrics": metrics}
    return Run(
        tiny_t5(), trainer_class=Seq2SeqTrainer, config=Seq2SeqTrainingArguments, extra=extra, arguments=arguments
    )


def of_trl(kind: str, rows: list[dict], extra: Callable[[], dict] = dict, **arguments: Any) -> Callable[[], Run]:
    def make() -> Run:
        import trl

        more = {"processing_class": tiny_tokenizer(), **extra()}
        settings = {"remove_unused_columns": kind != "DPO", **arguments}
        trainer_class, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
        return Run(tiny_llama(), Rows.from_list(rows), trainer_class, more, settings, config)

    return make


def adapted(**settings: Any) -> Callable[[], dict]:
    def make() -> dict:
        import peft

        return {"peft_config": peft.LoraConfig(r=2, task_type="CAUSAL_LM", **settings)}

    return make


TEXT = text_rows(24)
CHOICES = [
    {"prompt": "w1 w2", "chosen": f" {row['text']}", "rejected": f" {other['text']}"}
    for row, other in zip(TEXT, text_rows(24, seed=1), strict=True)
]
PROMPTS = [{"prompt": row["text"]} for row in TEXT]
SHORT = {"max_length": 16}
ROLLOUT = {"num_generations": 2, "max_completion_length": 4}


def lengths(completions: list, **kwargs: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def some(completions: list, **kwargs: Any) -> list[float | None]:
    return [None if i % 3 == 0 else float(len(text)) for i, text in enumerate(completions)]


async def later(completions: list, **kwargs: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def reference() -> dict:
    return {"ref_model": tiny_llama(3)}


for name, make in {
    "sft_packed": of_trl("SFT", TEXT, packing=True, **SHORT),
    "sft_packed_and_wrapped": of_trl("SFT", TEXT, packing=True, packing_strategy="wrapped", max_length=12),
    "sft_of_completions": of_trl("SFT", [{**row, "completion": " w3 w4"} for row in PROMPTS], max_length=32),
    "sft_with_tokens_that_are_trained": of_trl("SFT", TEXT, adapted(trainable_token_indices=[3, 4]), **SHORT),
    "sft_with_adapted_embeddings": of_trl("SFT", TEXT, adapted(target_modules=["embed_tokens", "q_proj"]), **SHORT),
    "sft_by_its_own_probabilities": of_trl("SFT", TEXT, loss_type="dft", **SHORT),
    "dpo_of_several_losses": of_trl(
        "DPO", CHOICES, reference, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5], max_length=24
    ),
    "dpo_with_a_reference_that_follows": of_trl(
        "DPO", CHOICES, reference, sync_ref_model=True, ref_model_sync_steps=1, max_length=24
    ),
    "dpo_with_a_reference_computed_before": of_trl(
        "DPO", CHOICES, reference, precompute_ref_log_probs=True, max_length=24
    ),
    "dpo_by_a_hinge": of_trl("DPO", CHOICES, reference, loss_type=["hinge"], max_length=24),
    "grpo_of_several_rewards": of_trl("GRPO", PROMPTS, lambda: {"reward_funcs": [lengths, some, later]}, **ROLLOUT),
    "grpo_of_several_passes": of_trl(
        "GRPO", PROMPTS, lambda: {"reward_funcs": lengths}, num_iterations=2, max_steps=4, **ROLLOUT
    ),
    "grpo_of_sequences_and_entropies": of_trl(
        "GRPO", PROMPTS, lambda: {"reward_funcs": lengths}, importance_sampling_level="sequence",
        top_entropy_quantile=0.5, **ROLLOUT,
    ),
    "rloo_of_several_rewards": of_trl("RLOO", PROMPTS, lambda: {"reward_funcs": [lengths, some]}, beta=0.0, **ROLLOUT),
}.items():  # fmt: skip
    TABLE.add(name, make)
    if name.startswith(("grpo", "rloo")):
        ONLY_HEALTHY.add(name)  # their model also generates in training mode


@pytest.mark.parametrize("make", TABLE.cases)
def test_an_unusual_part_trains_as_stock_does(make, tmp_path):
    check_as_stock(make, tmp_path)


@pytest.mark.parametrize("make", ANNOUNCED.cases)
def test_an_update_in_a_step_is_announced_and_trains_as_stock_does(make, tmp_path):
    check_as_stock(make, tmp_path)


SPOILED = TABLE.cases_of("an_adversary_with_an_optimizer_of_its_own") + ANNOUNCED.cases


@pytest.mark.parametrize("make", [case for case in SPOILED if case.id not in ONLY_HEALTHY])
def test_a_bad_step_of_an_unusual_part_leaves_no_trace(make, tmp_path):
    check_no_trace(make, tmp_path)
