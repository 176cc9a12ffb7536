"""Further unusual but legitimate set-ups: what libraries and scripts do to a trainer, its model, its data and its numbers."""

import copy
import functools
import gc
from collections import UserDict
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset as Rows
from datasets import concatenate_datasets, interleave_datasets
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, Dataset, RandomSampler
from transformers import Trainer

from tests.models import VOCAB, tiny_llama, token_rows

from .test_unusual_trainers import callback_with, trainer_with, with_optimizer
from .unusual_run import Run, Table, check_as_stock, check_no_trace

TABLE = Table()


# ---- losses ----


def mixed_up(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    """Mixes embeddings of two samples by a coefficient drawn from a Beta distribution of NumPy."""
    share = float(np.random.beta(0.4, 0.4))
    states = model.get_input_embeddings()(inputs["input_ids"])
    outputs = model(inputs_embeds=share * states + (1 - share) * states.flip(0))
    ids = inputs["input_ids"]
    losses = [functional.cross_entropy(outputs.logits.flatten(0, 1), each.flatten()) for each in (ids, ids.flip(0))]
    return share * losses[0] + (1 - share) * losses[1]


def penalised(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    """A gradient penalty: the norm of the gradient of the loss by the embeddings, differentiated again."""
    states = model.get_input_embeddings()(inputs["input_ids"])
    loss = model(inputs_embeds=states, labels=inputs["labels"]).loss
    [gradient] = torch.autograd.grad(loss, states, create_graph=True)
    return loss + gradient.square().sum()


def twice_dropped(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    """R-Drop: two forwards of one batch, and the divergence of their outputs."""
    first, second = model(**inputs), model(**inputs)
    p, q = (outputs.logits.log_softmax(-1) for outputs in (first, second))
    return first.loss + second.loss + functional.kl_div(p, q, log_target=True, reduction="batchmean")


def balanced(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    """Weights of two losses that are learned by a moving average of the losses themselves, kept on the trainer."""
    outputs = model(**inputs)
    losses = torch.stack([outputs.loss, outputs.logits.square().mean()])
    self.averages = losses.detach() if not hasattr(self, "averages") else self.averages.lerp(losses.detach(), 0.1)
    return (losses / self.averages).sum()


def of_memory(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    """A queue of earlier states as negatives, as in MoCo."""
    states = model(**inputs, output_hidden_states=True).hidden_states[-1].mean(1)
    if not hasattr(self, "queue"):
        self.queue = functional.normalize(torch.ones(6, states.shape[1]), dim=1)
    keys = functional.normalize(states, dim=1)
    logits = torch.cat([(keys * keys.detach()).sum(1, keepdim=True), keys @ self.queue.T], 1)
    self.queue = torch.cat([keys.detach(), self.queue])[:6]
    return functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


for name, loss in {
    "embeddings_that_are_mixed_up": mixed_up,
    "a_penalty_on_gradients": penalised,
    "two_forwards_with_dropout": twice_dropped,
    "losses_balanced_by_their_averages": balanced,
    "a_queue_of_earlier_states": of_memory,
}.items():
    TABLE.add(name, functools.partial(lambda own: Run(trainer_class=trainer_with(compute_loss=own)), loss))


# ---- models ----


class Tied(nn.Module):
    """Layers that share one set of weights, an output tied to the input, and a scale that is not trained but counted."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.ModuleList([self.layer] * 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, input_ids, labels, **kwargs):
        if self.training:
            self.seen += input_ids.numel()
        states = self.embedding(input_ids)
        for layer in self.layers:
            states = layer(states)
        logits = states @ self.embedding.weight.T
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Complex(nn.Module):
    """Complex weights, in a Fourier layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.filter = nn.Parameter(torch.randn(5, 8, dtype=torch.complex64) * 0.1)

    def forward(self, input_ids, labels, **kwargs):
        states = torch.fft.rfft(self.embedding(input_ids), dim=1)
        states = torch.fft.irfft(states * self.filter[: states.shape[1]], n=input_ids.shape[1], dim=1)
        return {"loss": functional.cross_entropy(self.head(states).flatten(0, 1), labels.flatten())}


def spectral() -> nn.Module:
    model = tiny_llama()
    for module in (model.lm_head, model.model.embed_tokens):  # write their estimates whenever a weight is read
        nn.utils.parametrizations.spectral_norm(module)
    return model


def weight_normed() -> nn.Module:
    model = tiny_llama()
    nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    return model


def with_ema() -> Run:
    averages: list[AveragedModel] = []

    def on_optimizer_step(state, model, **kwargs):
        if not averages:
            averages.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
        averages[0].update_parameters(model)

    return Run(extra={"callbacks": [callback_with(on_optimizer_step=on_optimizer_step)]})


for name, model in {
    "layers_that_share_weights": Tied,
    "complex_weights": Complex,
    "weights_with_a_spectral_norm": spectral,
    "a_layer_with_a_weight_norm": weight_normed,
}.items():
    arguments = {"optim": "adamw_torch"}  # the fused one takes no complex weights
    TABLE.add(name, functools.partial(lambda make, given: Run(make(), arguments=given), model, arguments))
TABLE.add("averages_kept_by_torch", with_ema)


# ---- data ----


class Batches(Dataset):
    """Rows that are batches already; the dataset has a state that advances with each of them."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.reads += 1
        rows = token_rows(24)[2 * index : 2 * index + 2]
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def only(examples: list) -> Any:
    return examples[0]


class Batch(UserDict):
    """A batch that is no dictionary, with a method that moves it."""

    def to(self, *args: Any, **kwargs: Any) -> "Batch":
        return Batch({name: value.to(*args, **kwargs) for name, value in self.data.items()})


def as_object(examples: list) -> Batch:
    return Batch({name: torch.tensor([row[name] for row in examples]) for name in examples[0]})


def extra_keys(self, model, inputs, *args, **kwargs):
    """The batch carries texts, `None` and nested lists beside its tensors."""
    inputs = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.ndim == 2}
    return Trainer.compute_loss(self, model, inputs, *args, **kwargs)


def annotated(examples: list) -> dict:
    tensors = {name: torch.tensor([row[name] for row in examples]) for name in examples[0]}
    return {**tensors, "texts": ["x"] * len(examples), "nothing": None, "nested": [[1], {"a": torch.ones(1)}]}


def mixed_rows() -> Any:
    first, second = Rows.from_list(token_rows(24)), Rows.from_list(token_rows(24)[::-1])
    both = interleave_datasets([first, second], probabilities=[0.7, 0.3], seed=3, stopping_strategy="all_exhausted")
    return concatenate_datasets([both, first.select(range(4))]).with_format("torch")


def transformed() -> Any:
    def turn(batch):
        shift = int(torch.randint(0, 4, ()))
        return {name: [row[shift:] + row[:shift] for row in rows] for name, rows in batch.items()}

    return Rows.from_list(token_rows(24)).with_transform(turn)


for name, make in {
    "rows_that_are_batches": lambda: Run(
        rows=Batches(), extra={"data_collator": only}, arguments={"per_device_train_batch_size": 1}
    ),
    "a_batch_that_is_no_dictionary": lambda: Run(extra={"data_collator": as_object}),
    "a_batch_with_texts_and_nested_lists": lambda: Run(
        trainer_class=trainer_with(compute_loss=extra_keys), extra={"data_collator": annotated}
    ),
    "datasets_interleaved_by_chance": lambda: Run(rows=mixed_rows()),
    "rows_transformed_when_they_are_read": lambda: Run(rows=transformed(), arguments={"remove_unused_columns": False}),
    "batches_of_a_sampler_of_ones_own": lambda: Run(trainer_class=trainer_with(get_train_dataloader=own_batches)),
}.items():
    TABLE.add(name, make)


def own_batches(self):
    sampler = BatchSampler(RandomSampler(range(24), generator=torch.Generator().manual_seed(4)), 3, drop_last=True)
    return self.accelerator.prepare(
        torch.utils.data.DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
    )


# ---- optimizers and ways to run ----


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer and interpolates to slow weights every other step."""

    def __init__(self, inner: torch.optim.Optimizer):
        self.inner, self.count = inner, 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for parameter, weight in zip(group["params"], slow, strict=True):
                    parameter.copy_(weight.lerp_(parameter, 0.5))


@contextmanager
def collecting_garbage():
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def often_collected(trainer: Any) -> None:
    with collecting_garbage():
        trainer.train()


def in_deterministic_mode(trainer: Any) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        trainer.train()
    finally:
        torch.use_deterministic_algorithms(False)


def in_parts(trainer: Any) -> None:
    """One `train()` for each share of the data, by one optimizer."""
    rows = trainer.train_dataset
    for part in (rows[:8], rows[8:16], rows[16:]):
        trainer.train_dataset = part
        trainer.train()


for name, make in {
    "an_optimizer_that_looks_ahead": functools.partial(
        with_optimizer, lambda model: Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    ),
    "garbage_that_is_collected_all_the_time": lambda: Run(train=often_collected),
    "deterministic_algorithms_of_torch": lambda: Run(train=in_deterministic_mode),
    "a_run_for_each_share_of_the_data": lambda: Run(train=in_parts),
    "a_model_that_was_copied_before": lambda: Run(copy.deepcopy(tiny_llama())),
}.items():
    TABLE.add(name, make)


QUICK = ("weights_with_a_spectral_norm", "a_batch_that_is_no_dictionary")


@pytest.mark.parametrize("make", TABLE.cases_of(*QUICK))
def test_a_further_unusual_run_trains_as_stock_does(make, tmp_path):
    check_as_stock(make, tmp_path)


@pytest.mark.parametrize("make", TABLE.cases_of("losses_balanced_by_their_averages"))
def test_a_bad_step_of_a_further_unusual_run_leaves_no_trace(make, tmp_path):
    check_no_trace(make, tmp_path)
