"""Taking single samples out of a batch."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from hf_nanguard import GuardArguments, guarded
from hf_nanguard.hf.data.remove_samples import remove_samples

from ...models import tiny_llama, token_rows
from ...trainers import common_arguments, events_of, metric_rows_of


def batch_of_three():
    return {
        "input_ids": torch.arange(6).reshape(3, 2), "labels": torch.arange(3), "texts": ["a", "b", "c"],
        "return_loss": True, "none": None,
    }  # fmt: skip


def test_every_field_loses_the_sample():
    batch = batch_of_three()
    assert remove_samples(batch, {1}, 3) == (0, 2)
    assert batch["input_ids"].tolist() == [[0, 1], [4, 5]]
    assert batch["labels"].tolist() == [0, 2]
    assert batch["texts"] == ["a", "c"]
    assert batch["return_loss"] is True
    assert batch["none"] is None


@pytest.mark.parametrize(
    "field",
    [torch.ones(5, 3), torch.tensor(1.0), ["a"], (1, 2), {"x": torch.ones(3, 2)}, np.ones((3, 2))],
    ids=["patches", "scalar", "list", "tuple", "mapping", "array"],
)
def test_a_batch_that_cannot_be_taken_apart_stays_whole(field):
    batch = batch_of_three() | {"other": field}
    before = dict(batch)
    assert remove_samples(batch, {1}, 3) is None
    assert all(batch[key] is before[key] for key in before)


def test_something_must_be_left():
    batch = batch_of_three()
    assert remove_samples(batch, {0, 1, 2}, 3) is None
    assert len(batch["labels"]) == 3


# ---- in a run ----

BAD_ROW = 9


class Rows:
    """A collator that leaves rows out by itself, as the reference does."""

    def __init__(self, left_out=()):
        self.left_out = left_out

    def __call__(self, examples):
        examples = [example for example in examples if example["row"] not in self.left_out]
        return {key: torch.tensor([example[key] for example in examples]) for key in ("input_ids", "labels")}


def train(path, guard, collator):
    rows = [row | {"row": index} for index, row in enumerate(token_rows(48))]
    rows[BAD_ROW]["labels"][4] = 777 if guard else rows[BAD_ROW]["labels"][4]
    arguments = TrainingArguments(**common_arguments(path, per_device_train_batch_size=4, remove_unused_columns=False))
    cls, extra = (guarded(Trainer), {"guard": guard}) if guard else (Trainer, {})
    trainer = cls(tiny_llama(), arguments, train_dataset=Dataset.from_list(rows), data_collator=collator, **extra)
    trainer.train()
    return trainer


def test_a_run_without_the_bad_sample_is_what_remains(tmp_path):
    guarded_run = train(tmp_path / "a", GuardArguments(nanguard_on_bad_input="drop_samples"), Rows())
    stock = train(tmp_path / "b", None, Rows(left_out=(BAD_ROW,)))
    [event] = events_of(guarded_run)
    assert (event["signal"], event["action"]) == ("label_out_of_range", "dropped")
    assert event["culprit"]["rows"] == [BAD_ROW]
    pairs = zip(guarded_run.model.parameters(), stock.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    rows = [[row["loss"] for row in run.state.log_history if "loss" in row] for run in (guarded_run, stock)]
    assert rows[0] == rows[1]
    assert metric_rows_of(guarded_run)[-1]["nanguard/dropped_microbatches"] == 0
