"""Rows are held out of every kind of training data, and no row is on both sides."""

import pytest
from datasets import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments

from hf_nanguard.verification.held_out_rows import hold_out

from ..models import tiny_llama, token_dataset, token_rows
from ..trainers import common_arguments


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make(train, test=None):
    args = TrainingArguments(**common_arguments("unused"))
    return Trainer(tiny_llama(), args, train_dataset=train, eval_dataset=test)


def first_tokens(rows):
    return [row["input_ids"][0] for row in rows]


@pytest.mark.parametrize("form", ["dataset", "list", "stream"])
def test_rows_are_held_out_of_the_training_data(form):
    rows = token_rows(20)
    stream = IterableDataset.from_generator(lambda: iter(rows))
    data = {"dataset": Dataset.from_list(rows), "list": rows, "stream": stream}[form]
    trainer = make(data)
    assert hold_out(trainer, 3)
    held, left = first_tokens(trainer.eval_dataset), first_tokens(trainer.train_dataset)
    assert len(held) == 3
    assert held + left == first_tokens(rows)


def test_no_more_than_a_fifth_is_held_out():
    trainer = make(token_dataset(10))
    assert hold_out(trainer, 32)
    assert (len(trainer.eval_dataset), len(trainer.train_dataset)) == (2, 8)


@pytest.mark.parametrize(("num_rows", "num_held"), [(0, 0), (4, 0), (20, 4), (500, 32)])
def test_a_short_stream_is_not_used_up(num_rows, num_held):
    rows = token_rows(num_rows)
    trainer = make(IterableDataset.from_generator(lambda: iter(rows)))
    assert hold_out(trainer, 32) == (num_held > 0)
    assert len(list(trainer.train_dataset)) == num_rows - num_held
    assert num_held == 0 or len(list(trainer.eval_dataset)) == num_held


def test_evaluation_data_of_the_user_comes_first():
    for test in (token_dataset(9, seed=1), {"a": token_dataset(9, seed=1), "b": token_dataset(9, seed=2)}):
        trainer = make(token_dataset(20), test)
        assert hold_out(trainer, 4)
        assert trainer.eval_dataset[:]["input_ids"] == token_dataset(4, seed=1)[:]["input_ids"]
        assert len(trainer.train_dataset) == 20
