"""Unusual but legitimate labels, losses, models, data and types: guarded, they train as the stock trainer."""

import random
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaForCausalLM,
    PerceiverConfig,
    PerceiverForMaskedLM,
    Trainer,
    TrainerCallback,
    default_data_collator,
)
from transformers.modeling_outputs import CausalLMOutput

from hf_nanguard import GuardArguments
from hf_nanguard.testing import Fault, plant
from tests.models import VOCAB, tiny_llama, tiny_t5, token_rows
from tests.trainers import events_of

from .unusual_run import Run, Table, attached, check_as_stock, check_no_trace

TABLE = Table()


# ---- losses, models and labels of the user's own ----


def labelled(*labels: Any, length: int = 8) -> list[dict]:
    """Rows whose labels repeat the given ones."""
    return [
        {**row, "labels": [labels[(i + k) % len(labels)] for k in range(length)]}
        for i, row in enumerate(token_rows(24, length))
    ]


def loss_ignoring(index: int) -> Callable[..., torch.Tensor]:
    """A cross-entropy that ignores another label than -100 and fails for -100."""

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), ignore_index=index)

    return loss


@TABLE.setup
def a_loss_function_with_another_ignored_label() -> Run:
    return Run(rows=labelled(-1, -1, 4, 9), extra={"compute_loss_func": loss_ignoring(-1)})


@TABLE.slow_setup
def a_loss_function_that_ignores_every_label_of_some_batches() -> Run:
    return Run(
        rows=labelled(255),
        extra={"compute_loss_func": lambda out, labels, num_items_in_batch=None: out["logits"].square().mean()},
    )


class OrdinalTrainer(Trainer):
    """Regards labels, which are far above the vocabulary, as numbers."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        targets = inputs.pop("labels").float() / 1000
        outputs = model(**inputs)
        loss = (outputs.logits.mean(-1) - targets).square().mean()
        return (loss, outputs) if return_outputs else loss


@TABLE.slow_setup
def an_overridden_loss_with_labels_above_the_vocabulary() -> Run:
    return Run(rows=labelled(1000, 2500, -900), trainer_class=OrdinalTrainer)


@TABLE.slow_setup
def an_overridden_loss_with_labels_that_are_all_masked() -> Run:
    return Run(rows=labelled(-100), trainer_class=OrdinalTrainer)


@TABLE.slow_setup
def a_loss_set_on_the_trainer() -> Run:
    def change(trainer: Any) -> None:
        trainer.compute_loss = lambda model, inputs, **kwargs: (
            model(input_ids=inputs["input_ids"]).logits.square().mean()
        )

    return Run(rows=labelled(4000, -5), change=change)


@TABLE.slow_setup
def float_labels_whose_nan_means_missing() -> Run:
    class Masked(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            targets = inputs.pop("labels")
            error = model(**inputs).logits.mean(-1) - torch.nan_to_num(targets)
            return torch.where(targets.isnan(), 0.0, error).square().mean()

    return Run(rows=labelled(0.5, float("nan"), 1.5), trainer_class=Masked)


@TABLE.slow_setup
def several_tasks_with_labels_of_their_own() -> Run:
    class Tasks(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels, scores = inputs.pop("labels"), inputs.pop("scores")
            logits = model(**inputs).logits
            return (
                functional.cross_entropy(logits.flatten(0, 1), labels.flatten() % VOCAB)
                + (logits.sum((1, 2)) - scores).abs().mean()
            )

    rows = [
        {**row, "labels": [v * 100 for v in row["labels"]], "scores": float(i)} for i, row in enumerate(token_rows(24))
    ]
    return Run(rows=rows, trainer_class=Tasks)


class OwnHead(LlamaForCausalLM):
    """Ignores label -7 and embeds ids modulo its vocabulary."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        outputs = super().forward(input_ids=input_ids % VOCAB, **kwargs)
        loss = functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), ignore_index=-7)
        return CausalLMOutput(loss=loss, logits=outputs.logits)


@TABLE.setup
def a_model_class_with_its_own_labels_and_ids() -> Run:
    rows = [{**row, "input_ids": [i + 3 * VOCAB for i in row["input_ids"]]} for row in labelled(-7, 5, -7, 11)]
    return Run(OwnHead(tiny_llama().config), rows)


class PlainModel(nn.Module):
    """No model of transformers: embeds hashed ids, and its labels are classes counted from 1."""

    def __init__(self, **settings: Any):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8, **settings), nn.Linear(8, 4)

    def forward(self, input_ids, labels=None, attention_mask=None, **kwargs):
        logits = self.head(self.embedding(input_ids % 16).mean(1))
        loss = None if labels is None else functional.cross_entropy(logits, labels[:, 0] % 4)
        return {"loss": loss, "logits": logits}


@TABLE.slow_setup
def a_plain_module() -> Run:
    return Run(PlainModel(), labelled(-3, 400))


@TABLE.slow_setup
def a_loss_function_set_on_the_model() -> Run:
    model = tiny_llama()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=0
    )
    return Run(model, labelled(0, 0, 0, 7))


@TABLE.slow_setup
def a_forward_set_on_the_model() -> Run:
    model = tiny_llama()
    forward = model.forward

    def own(input_ids=None, labels=None, **kwargs):
        labels = labels.masked_fill(labels == -1, -100)
        return forward(input_ids=input_ids % VOCAB, labels=labels, **kwargs)

    model.forward = own
    return Run(model, labelled(-1, 6, 900 % VOCAB))


class HashedEmbedding(nn.Embedding):
    """Takes any id modulo its rows."""

    def forward(self, ids):
        return super().forward(ids % self.num_embeddings)


@TABLE.slow_setup
def an_embedding_that_takes_ids_modulo_its_rows() -> Run:
    model = tiny_llama()
    hashed = HashedEmbedding(VOCAB, 16)
    model.set_input_embeddings(hashed)
    return Run(model, [{**row, "input_ids": [i * 977 for i in row["input_ids"]]} for row in token_rows(24)])


@TABLE.slow_setup
def ids_that_a_hook_of_the_embedding_maps() -> Run:
    model = tiny_llama()
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: (args[0] % VOCAB,))
    return Run(model, [{**row, "input_ids": [i + 640 for i in row["input_ids"]]} for row in token_rows(24)])


@TABLE.slow_setup
def ids_and_labels_that_the_trainer_maps_when_it_prepares_them() -> Run:
    class Shifted(Trainer):
        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            labels = inputs["labels"]
            return {**inputs, "input_ids": inputs["input_ids"] - 5000, "labels": labels.masked_fill(labels < 0, -100)}

    rows = [{**row, "input_ids": [i + 5000 for i in row["input_ids"]]} for row in labelled(-2, 5)]
    return Run(rows=rows, trainer_class=Shifted)


@TABLE.slow_setup
def labels_that_the_trainer_maps_in_its_step() -> Run:
    class Mapped(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            inputs["labels"] = inputs["labels"] % VOCAB
            return super().training_step(model, inputs, *args, **kwargs)

    return Run(rows=labelled(4096, 81), trainer_class=Mapped)


@TABLE.slow_setup
def a_perceiver_whose_input_embedding_is_a_parameter() -> Run:
    torch.manual_seed(0)
    config = PerceiverConfig(
        vocab_size=50, num_latents=4, d_latents=8, d_model=8, num_blocks=1, num_self_attends_per_block=1,
        num_self_attention_heads=2, num_cross_attention_heads=2, max_position_embeddings=8, qk_channels=8, v_channels=8,
    )  # fmt: skip
    rows = [
        {"inputs": [i % 50 for i in row["input_ids"]], "labels": [i % 50 for i in row["labels"]]}
        for row in token_rows(24)
    ]
    return Run(PerceiverForMaskedLM(config), rows)


@TABLE.slow_setup
def embeddings_in_place_of_ids() -> Run:
    torch.manual_seed(1)
    rows = [{"inputs_embeds": torch.randn(8, 16), "labels": torch.tensor(row["labels"])} for row in token_rows(24)]
    return Run(rows=rows)


def tiny_bert(cls: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, **settings
    )
    return cls(config)


@TABLE.slow_setup
def a_regression() -> Run:
    rows = [{**row, "labels": -3.5 * i} for i, row in enumerate(token_rows(24))]
    return Run(tiny_bert(BertForSequenceClassification, num_labels=1), rows)


@TABLE.slow_setup
def several_classes_at_once() -> Run:
    rows = [{**row, "labels": [1.0, 0.0, float(i % 2)]} for i, row in enumerate(token_rows(24))]
    return Run(tiny_bert(BertForSequenceClassification, num_labels=3), rows)


@TABLE.slow_setup
def a_custom_head_for_other_classes() -> Run:
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 3)

        def forward(self, states):
            return self.linear(states)

    model = tiny_bert(BertForTokenClassification, num_labels=3)
    model.classifier = Head()
    return Run(model, labelled(0, 1, 2, -100))


@TABLE.slow_setup
def label_smoothing() -> Run:
    return Run(rows=labelled(-100, 3, 4), arguments={"label_smoothing_factor": 0.1})


@TABLE.slow_setup
def an_ignored_label_that_travels_with_the_batch() -> Run:
    def collate(examples):
        return {**default_data_collator(examples), "ignore_index": 0}

    return Run(rows=labelled(0, 0, 5), extra={"data_collator": collate})


@TABLE.slow_setup
def labels_that_are_shifted_beforehand() -> Run:
    rows = [{**row, "shift_labels": [*row["labels"][1:], -100], "labels": [-100] * 8} for row in token_rows(24)]
    return Run(rows=rows)


@TABLE.slow_setup
def an_attention_mask_that_masks_a_whole_sample() -> Run:
    rows = [{**row, "attention_mask": [int(i % 3 != 0)] * 8} for i, row in enumerate(token_rows(24))]
    return Run(PlainModel(), rows)


# ---- collators, samplers and dataloaders ----


@dataclass
class Collator:
    """A collator with state that others read and write."""

    scale: float = 1.0
    valid_label_columns: tuple[str, ...] = ("labels",)

    def __call__(self, examples):
        return {**default_data_collator(examples), "scale": torch.tensor(self.scale)}


class ScaledTrainer(Trainer):
    """Knows its collator by identity and class, and looks at every batch on its way: nothing may be in it but what the
    collator put there."""

    keys: frozenset[str] = frozenset({"input_ids", "attention_mask", "labels", "scale"})

    def get_train_dataloader(self):
        assert type(self.data_collator) is Collator
        assert self.data_collator.valid_label_columns == ("labels",)
        loader = super().get_train_dataloader()
        assert loader.collate_fn is self.data_collator
        return loader

    def get_batch_samples(self, *args, **kwargs):
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        assert all(batch.keys() == self.keys for batch in batches)
        return batches, num_items

    def training_step(self, model, inputs, *args, **kwargs):
        assert inputs.keys() == self.keys
        return super().training_step(model, inputs, *args, **kwargs)

    def _prepare_inputs(self, inputs):
        assert inputs.keys() == self.keys
        return super()._prepare_inputs(inputs)

    def compute_loss(self, model, inputs, *args, **kwargs):
        assert inputs.keys() == self.keys
        scale = inputs.pop("scale")
        return super().compute_loss(model, inputs, *args, **kwargs) * scale


class Steering(TrainerCallback):
    """Changes the collator in the course of a run, by each way there is to it."""

    def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
        assert type(train_dataloader.collate_fn) is Collator
        train_dataloader.collate_fn.scale += 0.5


@TABLE.setup
def a_collator_known_by_identity_and_steered_by_a_callback() -> Run:
    collator = Collator()
    return Run(trainer_class=ScaledTrainer, extra={"data_collator": collator, "callbacks": [Steering()]})


@TABLE.slow_setup
def batches_with_hardly_anything_to_learn_from() -> Run:
    rows = [{**row, "input_ids": [5] * 8} for row in token_rows(24)]
    return Run(rows=rows, trainer_class=ScaledTrainer, extra={"data_collator": Collator()}, arguments={"max_steps": 6})


@TABLE.slow_setup
def a_collator_that_is_wrapped_by_the_trainer() -> Run:
    class Wrapping(Trainer):
        def get_train_dataloader(self):
            inner = self.data_collator

            def outer(examples):
                batch = inner(examples)
                assert set(batch) == {"input_ids", "attention_mask", "labels"}
                return {**batch, "labels": batch["labels"] % VOCAB}

            self.data_collator = outer
            try:
                return super().get_train_dataloader()
            finally:
                self.data_collator = inner

    return Run(rows=token_rows(24), trainer_class=Wrapping)


@TABLE.slow_setup
def a_collator_that_returns_the_same_object_each_time() -> Run:
    batch: dict[str, Any] = {}

    def collate(examples):
        batch.update(default_data_collator(examples))
        return dict(batch)

    return Run(extra={"data_collator": collate})


def with_batches(make: Callable[[Any], Any], **arguments: Any) -> Run:
    """A trainer whose dataloader has a batch sampler of the user's own."""

    class Own(Trainer):
        def get_train_dataloader(self):
            loader = DataLoader(
                self.train_dataset, batch_sampler=make(self.train_dataset), collate_fn=self.data_collator
            )
            return self.accelerator.prepare(loader)

    return Run(trainer_class=Own, arguments=arguments)


class OwnIterator(Sampler):
    """A sampler that is its own iterator."""

    def __init__(self, data):
        self.size, self.position, self.epoch = len(data), 0, 0

    def __iter__(self):
        self.position = 0
        return self

    def __next__(self):
        if self.position >= self.size:
            raise StopIteration
        self.position += 2
        return [self.position - 2, self.position - 1]

    def __len__(self):
        return self.size // 2


@TABLE.setup
def a_batch_sampler_that_is_its_own_iterator() -> Run:
    return with_batches(OwnIterator)


class Yielding(Sampler):
    """A sampler that yields something else than lists, has no length, and counts its epochs."""

    def __init__(self, data, make):
        self.size, self.make, self.epoch = len(data), make, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"epoch": self.epoch}

    def __iter__(self):
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        for start in range(0, self.size, 2):
            yield self.make(order[start : start + 2])


@TABLE.slow_setup
def a_batch_sampler_that_yields_generators() -> Run:
    return with_batches(lambda data: Yielding(data, lambda rows: (row for row in rows)), max_steps=8)


class Drawing(Sampler):
    """Draws its order from the global random state as soon as it is asked for an iterator."""

    def __init__(self, data):
        self.size = len(data)

    def __iter__(self):
        return iter(torch.randperm(self.size).view(-1, 2).tolist())

    def __len__(self):
        return self.size // 2


@TABLE.slow_setup
def a_batch_sampler_that_draws_from_the_global_random_state() -> Run:
    return with_batches(Drawing, max_steps=8)


@TABLE.slow_setup
def a_batch_sampler_that_yields_tuples() -> Run:
    return with_batches(lambda data: Yielding(data, tuple), max_steps=8)


@TABLE.slow_setup
def a_batch_sampler_that_yields_tensors() -> Run:
    return with_batches(lambda data: Yielding(data, torch.tensor), max_steps=8)


@TABLE.slow_setup
def a_batch_sampler_that_yields_the_same_list_each_time() -> Run:
    buffer: list[int] = []

    def refill(rows):
        buffer[:] = rows
        return buffer

    return with_batches(lambda data: Yielding(data, refill), max_steps=8)


@TABLE.slow_setup
def a_batch_sampler_that_is_a_list() -> Run:
    return with_batches(lambda data: [[0, 1], [4, 3], [5, 7], [8, 9], [2, 11], [20, 21]])


class Slotted:
    """A batch sampler of no class of torch's, without a dictionary."""

    __slots__ = ("size",)

    def __init__(self, data):
        self.size = len(data)

    def __iter__(self):
        return iter([[i, i + 1] for i in range(0, self.size, 2)])

    def __len__(self):
        return self.size // 2


@TABLE.slow_setup
def a_batch_sampler_with_slots() -> Run:
    return with_batches(Slotted)


@TABLE.slow_setup
def a_batch_sampler_over_keys_that_are_no_numbers() -> Run:
    class Keyed(Dataset):
        rows = {f"row {i}": row for i, row in enumerate(token_rows(24))}

        def __getitem__(self, key):
            return self.rows[key]

        def __len__(self):
            return len(self.rows)

    run = with_batches(lambda data: BatchSampler(list(data.rows), 2, False))
    run.rows = Keyed()
    return run


@TABLE.slow_setup
def a_sampler_of_the_trainers_own() -> Run:
    class Own(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return RandomSampler(self.train_dataset, replacement=True, num_samples=60)

    return Run(trainer_class=Own)


def with_loader(make: Callable[[Any], Any]) -> Run:
    """A trainer whose dataloader is whatever `make` makes of the stock one."""

    class Own(Trainer):
        def get_train_dataloader(self):
            return make(super().get_train_dataloader())

    return Run(trainer_class=Own, arguments={"max_steps": 8})


@TABLE.slow_setup
def a_dataloader_that_is_a_list() -> Run:
    return with_loader(list)


@TABLE.slow_setup
def a_dataloader_with_an_iterator_of_its_own() -> Run:
    class Cycled(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                yield {**batch, "labels": batch["labels"].flip(0)}

    return with_loader(lambda loader: Cycled(loader.dataset, batch_size=2, collate_fn=default_data_collator))


@TABLE.slow_setup
def a_dataloader_of_ready_batches() -> Run:
    class Batches(Dataset):
        rows = [default_data_collator(token_rows(24)[i : i + 2]) for i in range(0, 24, 2)]

        def __getitem__(self, index):
            return self.rows[index]

        def __len__(self):
            return len(self.rows)

    return with_loader(lambda loader: DataLoader(Batches(), batch_size=None))


class Stream(IterableDataset):
    """Rows without numbers."""

    def __iter__(self):
        return iter(token_rows(24))


@TABLE.slow_setup
def a_stream() -> Run:
    return Run(rows=Stream())


@TABLE.slow_setup
def workers_that_are_spawned() -> Run:
    arguments = {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "spawn", "max_steps": 2}
    return Run(extra={"data_collator": Collator()}, trainer_class=ScaledTrainer, arguments=arguments)


@TABLE.slow_setup
def workers_that_persist() -> Run:
    arguments = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "max_steps": 9}
    return Run(arguments=arguments)


@TABLE.slow_setup
def workers_that_answer_in_any_order() -> Run:
    return Run(arguments={"dataloader_num_workers": 1, "dataloader_in_order": False})


@TABLE.slow_setup
def batches_that_the_trainer_reorders() -> Run:
    class Reordering(Trainer):
        def get_batch_samples(self, *args, **kwargs):
            batches, num_items = super().get_batch_samples(*args, **kwargs)
            return batches[::-1], num_items

    return Run(trainer_class=Reordering)


@TABLE.slow_setup
def batches_that_are_an_iterator() -> Run:
    class Once(tuple):
        """A group of batches that is no list."""

    class Other(Trainer):
        def get_batch_samples(self, *args, **kwargs):
            batches, num_items = super().get_batch_samples(*args, **kwargs)
            return Once(batches), num_items

    return Run(trainer_class=Other)


# ---- types in batches, losses and gradients ----


class AnyInputs(Trainer):
    """Takes a batch of any type: `pick` returns its ids and labels."""

    @staticmethod
    def pick(inputs):
        return inputs["input_ids"], inputs["labels"]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids, labels = self.pick(inputs)
        outputs = model(input_ids=ids, labels=labels)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def batches_as(make: Callable[[dict], Any], pick: Callable[[Any], Any] = AnyInputs.pick) -> Run:
    own = type("Own", (AnyInputs,), {"pick": staticmethod(pick)})
    return Run(trainer_class=own, extra={"data_collator": lambda examples: make(default_data_collator(examples))})


@dataclass
class Ready:
    """A batch that is a dataclass."""

    input_ids: torch.Tensor
    labels: torch.Tensor

    def __contains__(self, name):
        return hasattr(self, name)

    def __len__(self):
        return len(self.labels)


@TABLE.slow_setup
def batches_that_are_dataclasses() -> Run:
    run = batches_as(lambda b: Ready(b["input_ids"], b["labels"]), lambda batch: (batch.input_ids, batch.labels))
    run.model = PlainModel()
    return run


@TABLE.slow_setup
def batches_that_are_tuples() -> Run:
    return batches_as(lambda batch: (batch["input_ids"], batch["labels"]), tuple)


@TABLE.slow_setup
def batches_that_are_user_dicts() -> Run:
    return batches_as(lambda batch: UserDict(batch))


@TABLE.slow_setup
def batches_that_are_encodings() -> Run:
    return Run(extra={"data_collator": lambda examples: BatchEncoding(default_data_collator(examples))})


@TABLE.slow_setup
def batches_with_none_and_other_objects() -> Run:
    return batches_as(lambda batch: {**batch, "extra": None, "texts": ["a", None], "number": 3, "when": object()})


@TABLE.slow_setup
def batches_with_nested_and_sparse_tensors() -> Run:
    def make(batch):
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        return {**batch, "ragged": ragged, "sparse": torch.eye(2).to_sparse(), "empty": torch.empty(0)}

    return batches_as(make)


@TABLE.slow_setup
def batches_with_conjugate_and_complex_tensors() -> Run:
    def make(batch):
        wave = torch.randn(2, 3, dtype=torch.complex64)
        return {**batch, "wave": wave.conj(), "negative": wave.conj().imag, "angle": wave, "half": torch.ones(2).half()}

    return batches_as(make)


@TABLE.slow_setup
def batches_with_tensors_that_require_gradients_and_views() -> Run:
    def make(batch):
        return {
            **batch,
            "soft": torch.ones(2, 2, requires_grad=True),
            "view": torch.ones(1).expand(2, 5),
            "float8": torch.ones(2).to(torch.float8_e4m3fn),
        }

    return batches_as(make)


def labels_as(change: Callable[[torch.Tensor], torch.Tensor], back: Callable[[torch.Tensor], torch.Tensor]) -> Run:
    return batches_as(
        lambda batch: {**batch, "labels": change(batch["labels"])},
        lambda batch: (batch["input_ids"], back(batch["labels"])),
    )


@TABLE.slow_setup
def labels_of_uint8() -> Run:
    return labels_as(lambda labels: labels.to(torch.uint8), lambda labels: labels.long())


@TABLE.slow_setup
def labels_of_bool() -> Run:
    return labels_as(lambda labels: labels > 20, lambda labels: labels.long())


@TABLE.slow_setup
def labels_of_no_dimension() -> Run:
    run = batches_as(
        lambda batch: {**batch, "labels": torch.tensor(7)},
        lambda batch: (batch["input_ids"], batch["labels"].expand(batch["input_ids"].shape)),
    )
    run.model = PlainModel()
    return run


def with_sparse_gradients(make_optimizer: Callable[[Any], Any]) -> Run:
    """torch has no norm of sparse gradients, so that such a trainer does without."""

    class Unclipped(Trainer):
        def _get_grad_norm(self, model, grad_norm=None):
            return None

    model = PlainModel(sparse=True)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    extra = {"optimizers": (optimizer, scheduler)}
    return Run(model, trainer_class=Unclipped, extra=extra, arguments={"max_grad_norm": 0.0})


@TABLE.slow_setup
def sparse_gradients() -> Run:
    return with_sparse_gradients(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))


@TABLE.slow_setup
def sparse_gradients_alone() -> Run:
    def make(model):
        model.head.requires_grad_(False)
        return torch.optim.SparseAdam([model.embedding.weight], lr=0.1)

    return with_sparse_gradients(make)


class Evaluating(Trainer):
    """Evaluates with a loss that may be missing, and computes losses of a function instead of a module."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if model is None or not getattr(model, "training", False):
            return (None, {}) if return_outputs else None
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, _ = self.compute_loss(model, inputs, return_outputs=True)
        assert loss is None
        return None, None, None


@TABLE.slow_setup
def an_evaluation_without_a_loss() -> Run:
    arguments = {"eval_strategy": "steps", "eval_steps": 1}
    return Run(trainer_class=Evaluating, extra={"eval_dataset": token_rows(4)}, arguments=arguments)


@TABLE.slow_setup
def a_loss_of_a_function() -> Run:
    class OfFunction(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            with torch.no_grad():
                self.compute_loss(lambda **given: {"loss": torch.zeros(())}, dict(inputs))
            return super().training_step(model, inputs, *args, **kwargs)

    return Run(trainer_class=OfFunction)


# ---- states that are not finite by design ----


class Transitions(PlainModel):
    """Has, as a conditional random field has, transitions of -inf."""

    def __init__(self, value: float = -float("inf"), **buffers: torch.Tensor):
        super().__init__()
        self.transitions = nn.Parameter(torch.zeros(4, 4))
        self.transitions.data[0, 1] = value
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, input_ids, labels=None, **kwargs):
        outputs = super().forward(input_ids, labels)
        return {**outputs, "loss": outputs["loss"] + self.transitions.logsumexp(1).square().sum()}


SAVING = {"save_strategy": "steps", "save_steps": 1, "weight_decay": 0.0}


@TABLE.setup
def a_parameter_with_inf_by_design() -> Run:
    return Run(Transitions(), arguments=SAVING)


@TABLE.slow_setup
def buffers_with_nan_and_inf_by_design() -> Run:
    model = Transitions(0.0, none=torch.tensor([float("nan"), 1.0]), mask=torch.full((2, 2), -float("inf")))
    return Run(model, arguments=SAVING)


# ---- others ----


@TABLE.slow_setup
def a_model_of_tied_weights_in_bfloat16() -> Run:
    return Run(tiny_llama(dtype=torch.bfloat16, tied=True))


@TABLE.slow_setup
def an_encoder_and_a_decoder() -> Run:
    return Run(tiny_t5())


@TABLE.slow_setup
def masked_language_modelling_with_few_labels() -> Run:
    return Run(tiny_bert(BertForMaskedLM), labelled(-100, -100, -100, 9))


@pytest.mark.parametrize("make", TABLE.cases)
def test_an_unusual_setup_trains_as_stock_does(make, tmp_path):
    check_as_stock(make, tmp_path)


@pytest.mark.parametrize("make", TABLE.cases_of("a_model_class_with_its_own_labels_and_ids"))
def test_a_bad_step_of_an_unusual_setup_leaves_no_trace(make, tmp_path):
    check_no_trace(make, tmp_path)


@pytest.mark.parametrize("fault", ["a bad batch", "nan in the parameter", "inf in another parameter"])
def test_a_parameter_with_inf_by_design_hides_no_fault(fault, tmp_path):
    run = Run(Transitions(), arguments={**SAVING, "gradient_accumulation_steps": 1, "max_steps": 4})
    trainer = attached(run, tmp_path, GuardArguments(nanguard_on_halt="stop", nanguard_max_rewinds=0))
    place = {"nan in the parameter": ("transitions", "nan"), "inf in another parameter": ("head.bias", "inf")}.get(
        fault
    )
    planted = (
        Fault("loss", step=1, micro_step=0)
        if place is None
        else Fault("weight", 1, parameter=place[0], value=float(place[1]))
    )
    plant(trainer, planted)
    trainer.train()
    actions = {event["action"] for event in events_of(trainer)}
    assert actions == ({"skipped"} if place is None else {"skipped", "halted"})
    assert trainer.state.global_step == (4 if place is None else 2)


def pair(batch: dict) -> tuple:
    return batch["input_ids"], batch["labels"]


@pytest.mark.parametrize(
    ("make", "pick"),
    [
        pytest.param(lambda batch: Ready(*pair(batch)), lambda batch: (batch.input_ids, batch.labels), id="dataclass"),
        pytest.param(pair, tuple, id="tuple"),
        pytest.param(lambda batch: list(pair(batch)), tuple, id="list"),
        pytest.param(UserDict, AnyInputs.pick, id="user dict"),
        pytest.param(BatchEncoding, AnyInputs.pick, id="encoding"),
        pytest.param(
            lambda batch: {**batch, "none": None, "texts": ["a"], "deep": {"x": [batch]}}, AnyInputs.pick, id="any"
        ),
        pytest.param(
            lambda batch: {**batch, "wave": torch.ones(2, dtype=torch.complex64).conj()}, AnyInputs.pick, id="conj"
        ),
        pytest.param(lambda batch: {**batch, "sparse": torch.eye(2).to_sparse()}, AnyInputs.pick, id="sparse"),
    ],
)
def test_a_bad_row_is_found_whatever_a_batch_is(make, pick, tmp_path):
    class Bad(AnyInputs):
        def compute_loss(self, model, inputs, *args, **kwargs):
            result = super().compute_loss(model, inputs, *args, **kwargs)
            return result * float("nan") if (self.pick(inputs)[0][:, 0] == 3 + 5).any() else result

    Bad.pick = staticmethod(pick)
    run = Run(PlainModel(), trainer_class=Bad, arguments={"train_sampling_strategy": "sequential"})
    run.extra["data_collator"] = lambda examples: make(default_data_collator(examples))
    trainer = attached(run, tmp_path, GuardArguments())
    trainer.train()
    [event] = events_of(trainer)
    assert (event["signal"], event["action"]) == ("loss_nonfinite", "dropped")
    assert event["culprit"]["rows"] in ([5], [4, 5])  # both if the batch cannot be split
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
