"""A sample of a trainer's rows, each through a copy of its own collator, with the random state restored."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import getitem
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset
from transformers import PreTrainedTokenizerBase

from ...boundary import attempt
from ...core.rng import RngState
from ...hf.compat import trainer as compat
from ...hf.compat.model_config import find_config, find_tokenizer, is_encoder_decoder, without_adapter
from ...hf.compat.own_loss import has_own_batches, is_library_code
from ...hf.compat.prepared_dataset import (
    PreparedRows,
    find_prepared_rows,
    find_training_data,
    is_hf_dataset,
    is_hf_stream,
)
from ...hf.compat.trainer_protocol import HostTrainer
from ...hf.data.batch_limits import Limits, find_limits
from ...plain_text import format_error
from ..facts.model_files import find_model_facts
from ..facts.trainer_inspection import find_trainer_facts
from ..rules.run_facts import Facts

# Called with the number of rows done and of all.
Report = Callable[[int, int], None]
TRIED = 16  # rows by which a collator that draws random numbers is found
CONVERSATIONS = ("messages", "prompt", "completion", "conversations", "chosen", "rejected")
TEXTS = (*CONVERSATIONS, "input_ids", "prompt_ids", "chosen_ids", "rejected_ids")


@dataclass(frozen=True)
class SampledRow:
    number: int  # in the dataset that the user passed in, if that can be known
    example: object  # what the dataset returned
    batch: Mapping[str, object] | None = None  # what the collator made of it alone, `None` if it could not
    error: str | None = None  # why dataset or collator failed
    source: Mapping[str, object] = field(default_factory=dict)  # texts, tokens, and columns the model does not take

    def field(self, name: str) -> Tensor | None:
        value = None if self.batch is None else self.batch.get(name)
        return value if isinstance(value, Tensor) else None


@dataclass
class Sample:
    """Some rows of a trainer's training data, and what it takes to judge them."""

    rows: list[SampledRow]
    num_rows: int | None  # of the whole dataset; None for a stream
    facts: Facts
    limits: Limits
    prepared: PreparedRows
    tokenizer: PreTrainedTokenizerBase | None
    stop_ids: frozenset[int]
    label_names: tuple[str, ...]
    is_packed: bool
    needs_labels: bool  # whether the loss is the model's own, which it computes from labels
    response_template: object = None  # of the collator, if it looks for one
    batch_error: str | None = None  # why the first rows could not be collated together
    is_seq2seq: bool = False
    collator_draws: bool = (
        False  # whether it makes other batches of the same rows each time, as for masked language models
    )
    decoder_start: int | None = None  # the token that a decoder begins with
    first_new_id: int | None = None  # ids from this on have a frozen embedding that no checkpoint has trained
    notes: list[str] = field(default_factory=list)


def take_sample(trainer: HostTrainer, num_rows: int | None, report: Report | None = None) -> Sample:
    """Takes rows (all if `num_rows` is `None`), evenly spread over the dataset or the first of a stream, and collates each
    alone. Nothing of the trainer changes. `report` is called after every row."""
    facts, model = find_trainer_facts(trainer), trainer.accelerator.unwrap_model(trainer.model)
    prepared = find_prepared_rows(trainer)
    processor: object = trainer.processing_class
    tokenizer = find_tokenizer(processor)
    tokenizer = tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None
    own_loss = has_own_batches(trainer)
    with unchanged_randomness(trainer):
        dataset, collator = find_training_data(trainer)
        collator = copy.deepcopy(collator)
        total, numbers = _choose_rows(dataset, num_rows)
        whole = _find_texts(trainer.train_dataset)
        rows = list(_collate(_read(dataset, numbers), collator, prepared, len(numbers), report, whole))
        together = [row.example for row in rows[: trainer.args.per_device_train_batch_size] if row.error is None]
        batch_error = _try(collator, together)[1] if len(together) > 1 else None
        draws = any(_draws(collator, [row.example]) for row in rows[:TRIED] if row.error is None)
    is_seq2seq = is_encoder_decoder(model)
    return Sample(
        rows, total, facts, find_limits(model, compat.loss_shifts_labels(trainer), own_loss), prepared, tokenizer,
        find_stop_ids(model, tokenizer), tuple(getattr(trainer, "label_names", ())), bool(getattr(trainer.args, "packing", False)),
        not own_loss and facts.task == "trainer", getattr(trainer.data_collator, "response_template", None), batch_error,
        is_seq2seq, draws, getattr(find_config(without_adapter(model)), "decoder_start_token_id", None) if is_seq2seq else None, _find_first_new_id(model, facts),
    )  # fmt: skip


def _draws(collator: Callable, rows: list[object]) -> bool:
    """Returns whether a collator makes two different batches of the same rows."""
    one, other = (_try(collator, rows)[0] for _ in range(2))
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    pairs = [(value, other.get(name)) for name, value in one.items() if isinstance(value, Tensor)]
    return any(isinstance(b, Tensor) and not (a.shape == b.shape and bool((a == b).all())) for a, b in pairs)


def _find_first_new_id(model: object, facts: Facts) -> int | None:
    """Returns the number of rows that the embedding has in the checkpoint, if it has more now and none of them is trained."""
    base = without_adapter(model)
    name = getattr(find_config(base), "name_or_path", None)
    known = find_model_facts(name).embedding_rows if name else None
    if known is None or facts.embedding_rows is None or facts.embedding_rows <= known:
        return None
    embedding = base.get_input_embeddings()
    return None if any(parameter.requires_grad for parameter in embedding.parameters()) else known


@contextmanager
def unchanged_randomness(trainer: HostTrainer) -> Iterator[None]:
    """Restores every generator at the end of the block."""
    state = RngState.capture(trainer.args.device.type)
    try:
        yield
    finally:
        state.restore()


def is_repeatable(trainer: HostTrainer) -> bool:
    """Returns whether reading rows leaves no trace: only datasets and collators of libraries, without transforms of the user's."""
    collator, loader = trainer.data_collator, type(trainer).get_train_dataloader  # type: ignore[attr-defined]
    is_function = hasattr(collator, "__qualname__")  # which a copy cannot protect from what it changes
    return _is_plain(trainer.train_dataset) and all(
        map(is_library_code, (collator if is_function else type(collator), loader))
    )


def _is_plain(dataset: Any) -> bool:
    if isinstance(dataset, Subset):
        return _is_plain(dataset.dataset)
    if is_hf_dataset(dataset):
        return dataset.format["type"] != "custom"  # set_transform calls code of the user's
    return type(dataset) in (list, TensorDataset)


def _choose_rows(dataset: object, num_rows: int | None) -> tuple[int | None, Sequence[int]]:
    """Returns the size of the dataset and the rows to read, evenly spread; of a stream the first ones."""
    if isinstance(dataset, IterableDataset) or is_hf_stream(dataset) or not isinstance(dataset, Sized):
        return None, range(num_rows or 2**62)
    total = len(dataset)
    count = total if num_rows is None else min(num_rows, total)
    return total, [index * total // count for index in range(count)]


def _find_texts(dataset: Any) -> object:
    """Returns the columns with the texts and tokens of rows, which the dataloader may leave out; not those with images."""
    if not is_hf_dataset(dataset) or dataset.format["type"] == "custom":
        return None
    columns = [name for name in TEXTS if name in dataset.column_names]
    return dataset.select_columns(columns) if columns else None


def _read(dataset: Any, numbers: Sequence[int]) -> Iterator[tuple[int, object, str | None]]:
    """Yields number, example and error of each row."""
    if isinstance(numbers, range):  # a stream
        yield from ((number, example, None) for number, example in enumerate(islice(iter(dataset), len(numbers))))
        return
    for number in numbers:
        example, problem = _try(partial(getitem, dataset), number)
        yield number, example, problem


def _collate(
    rows: Iterator[tuple[int, object, str | None]],
    collator: Callable,
    prepared: PreparedRows,
    total: int,
    report: Report | None,
    whole: Any,
) -> Iterator[SampledRow]:
    for done, (number, example, problem) in enumerate(rows, 1):
        batch, error = (None, problem) if problem is not None else _try(collator, [example])
        [named] = prepared.name([number]) or [number]
        source = example if isinstance(example, Mapping) else {}
        if whole is not None and problem is None:
            source = whole[number]
        yield SampledRow(named, example, batch if isinstance(batch, Mapping) else None, error, source)
        if report is not None:
            report(done, total)


def _try(function: Callable, argument: object) -> tuple[object, str | None]:
    """Returns what a function of the user's returns for a copy of an argument, which it may change, and why it could not."""
    return attempt(lambda: (function(copy.deepcopy(argument)), None), lambda error: (None, format_error(error)))


def find_stop_ids(model: object, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Returns the tokens at which generation stops: those of the model's generation config, else that of the tokenizer."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ids is None:
        ids = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())
