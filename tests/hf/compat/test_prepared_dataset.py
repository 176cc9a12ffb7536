"""Events name the rows of the dataset that was passed in, whatever TRL has made of it."""

import json
from types import SimpleNamespace

import pytest
from datasets import Dataset, load_dataset
from torch import nn
from transformers import TrainingArguments

from hf_nanguard import GuardedTrainer, attach
from hf_nanguard.hf.compat.prepared_dataset import find_ids, find_prepared_rows
from hf_nanguard.hf.trainer import step_recorder
from hf_nanguard.testing import Fault, plant
from tests.models import token_dataset, token_rows
from tests.trainers import build, common_arguments, events_of

LONG = (0, 5, 11, 12, 30)
FIRST_WORD = 7  # word w<i> of the tiny tokenizer is token 7 + i


def dataset(long=LONG):
    """Prompts and completions; a completion begins with the word of its row, and a long prompt leaves none of it."""
    return Dataset.from_list(
        [{"prompt": "w1 w2" + " w3" * (40 if i in long else 0), "completion": f" w{i} w4 w5"} for i in range(40)]
    )


@pytest.mark.parametrize(
    ("settings", "given"),
    [({}, dataset()), ({"shuffle_dataset": True}, dataset()), ({"dataset_num_proc": 2}, dataset()),
     ({}, dataset().shuffle(seed=1))],
    ids=["filtered", "shuffled", "by two processes", "from an index"],
)  # fmt: skip
def test_events_name_the_rows_that_were_passed_in(settings, given, tmp_path):
    trainer = attach(build("sft", tmp_path, guard=False, extra={"train_dataset": given}, max_length=8, **settings))
    planted = plant(trainer, Fault("loss", step=1, micro_step=1), Fault("loss", step=2, micro_step=0))
    trainer.train()
    removed, *events = events_of(trainer)
    words = [text.split()[0] for text in given["completion"]]
    for event in events:
        ids = planted.batches[event["step"], event["micro_step"]]
        assert [words[row] for row in event["culprit"]["rows"]] == [f"w{i}" for i in (ids[:, 2] - FIRST_WORD).tolist()]
    assert len(events) == 2
    expected = [i for i, text in enumerate(given["prompt"]) if len(text) > 20]
    assert (removed["signal"], removed["action"]) == ("labels_masked", "observed")
    assert removed["culprit"]["rows"] == expected
    assert "removed 5 of 40 rows" in removed["message"]


@pytest.mark.parametrize("settings", [{}, {"shuffle_dataset": True}])
def test_the_ids_of_a_row_are_those_of_the_users_row(settings, tmp_path):
    given = dataset().add_column("doc_id", [f"d{i}" for i in range(40)]).add_column("valid", list(range(40)))
    trainer = build("sft", tmp_path, guard=False, extra={"train_dataset": given}, max_length=8, **settings)
    assert [find_ids(trainer, row) for row in range(40)] == [
        {} if i in LONG else {"doc_id": f"d{i}"} for i in range(40)
    ]


class Quotient(nn.Module):
    """A loss that divides by its label."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x, labels):
        return {"loss": (self.linear(x)[:, 0] / labels).mean()}


def test_an_autopsy_shows_the_ids_of_the_row(tmp_path):
    rows = [{"x": [1.0, 2.0], "labels": float(i != 5), "key": f"k{i}", "note": "unused"} for i in range(8)]
    args = common_arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=1, max_steps=2)
    trainer = GuardedTrainer(Quotient(), TrainingArguments(**args), train_dataset=Dataset.from_list(rows))
    trainer.train()
    [event] = events_of(trainer)
    assert event["culprit"]["rows"] == [5]
    assert list(event["values"]["autopsy"]["texts"].values()) == ["(key: k5)"]


def test_nothing_is_reported_if_no_row_is_removed(tmp_path):
    trainer = build("sft", tmp_path, extra={"train_dataset": dataset(())}, max_length=8)
    trainer.train()
    assert events_of(trainer) == []


def test_a_host_whose_rows_cannot_be_found_is_guarded_all_the_same(tmp_path, monkeypatch):
    def fail(trainer):
        raise AttributeError("a setting that this host does not have")

    monkeypatch.setattr(step_recorder, "find_prepared_rows", fail)
    trainer = build("plain", tmp_path)
    plant(trainer, Fault("loss", step=1, micro_step=1))
    trainer.train()
    found = [(event["signal"], event["action"]) for event in events_of(trainer)]
    assert found == [("guard_failed", "observed"), ("loss_nonfinite", "dropped")]
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_an_older_config_without_a_shuffle_is_known(tmp_path):
    trainer = build("sft", tmp_path, guard=False, max_length=None)
    vars(trainer.args).pop("shuffle_dataset", None)
    trainer.args = SimpleNamespace(**vars(trainer.args))  # the class has a default for it
    assert not find_prepared_rows(trainer).is_rebuilt


def test_rows_of_a_packed_dataset_are_its_own(tmp_path):
    trainer = build("sft", tmp_path, extra={"train_dataset": dataset()}, max_length=8, packing=True, guard=False)
    assert find_prepared_rows(trainer).is_rebuilt


@pytest.mark.parametrize(
    "settings",
    [
        {"padding_free": True, "max_length": None},
        pytest.param({"packing": True, "max_length": 24}, marks=pytest.mark.slow),
    ],
)
def test_the_document_of_a_flat_batch_is_named(settings, tmp_path, caplog):
    given = [{"text": f"w{i} w1 w2" + " w3" * (i % 3)} for i in range(40)]
    arguments = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": 1, "max_steps": 12}
    extra = {"train_dataset": Dataset.from_list(given)}
    trainer = attach(build("sft", tmp_path, guard=False, extra=extra, **arguments, **settings))
    bad = FIRST_WORD + 11
    trainer.model.get_input_embeddings().register_forward_hook(
        lambda module, ids, output: output.masked_fill((ids[0] == bad)[..., None], float("nan"))
    )
    trainer.train()
    event = next(event for event in events_of(trainer) if event["bundle"])
    culprit = event["culprit"]
    [row] = [row for row, ids in enumerate(trainer.train_dataset["input_ids"]) if bad in ids]
    assert culprit["rows"] == [row]
    [document] = culprit["samples"]
    assert culprit["tokens"] == [[document, 0]]
    assert f"text:    [{document}] {given[11]['text']}\n" in caplog.text
    assert ("rows are those of the prepared dataset that SFTTrainer trains on" in caplog.text) == (
        "packing" in settings
    )
    assert [remedy["name"] for remedy in event["remedies"] if remedy["works"]] == ["drop_rows"]


@pytest.mark.parametrize("settings", [{}, {"dataloader_num_workers": 2}, {"shuffle": True}], ids=str)
def test_a_row_of_a_filtered_stream_is_named_by_its_ids_and_its_dataset(settings, tmp_path, caplog):
    """TRL has left out rows before it, so its number is one of the prepared stream."""
    given = dataset().add_column("doc_id", [f"d{i}" for i in range(40)])
    stream = given.to_iterable_dataset(num_shards=2)
    stream = stream.shuffle(seed=1, buffer_size=8) if settings.pop("shuffle", False) else stream
    arguments = {"max_length": 8, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4, "max_steps": 9}
    trainer = attach(build("sft", tmp_path, guard=False, extra={"train_dataset": stream}, **arguments, **settings))
    bad = FIRST_WORD + 13
    trainer.model.get_input_embeddings().register_forward_hook(
        lambda module, ids, output: output.masked_fill((ids[0] == bad)[..., None], float("nan"))
    )
    trainer.train()
    [event] = events_of(trainer)
    culprit, rows_of = event["culprit"], "the prepared stream that SFTTrainer trains on"
    prepared = list(trainer.train_dataset)
    assert "dataloader_num_workers" in settings or [bad in prepared[row]["input_ids"] for row in culprit["rows"]] == [
        True
    ]
    assert [text[:13] for text in event["values"]["autopsy"]["texts"].values()] == ["(doc_id: d13)"]
    assert event["values"].get("rows_of") == (rows_of if culprit["rows"] else None)
    assert caplog.text.count(f"dataset rows are those of {rows_of}") == (
        2 if culprit["rows"] else 1
    )  # at once and in the end


def test_filtered_rows_of_a_file_are_those_of_the_file(tmp_path, caplog):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(dataset().to_list()))
    given = load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path))
    trainer = attach(build("sft", tmp_path / "run", guard=False, extra={"train_dataset": given}, max_length=8))
    plant(trainer, Fault("loss", step=1, micro_step=1))
    trainer.train()
    assert len(trainer.train_dataset) == 35
    assert "events of this run" in caplog.text
    assert "rows are those of" not in caplog.text


@pytest.mark.parametrize("groups", [False, True])
def test_a_dataset_that_does_not_have_the_rows_of_its_file_is_told_apart(groups, tmp_path, caplog):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(token_rows(24)))
    given = load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path))
    if groups:  # as a framework that packs does
        given = given.map(lambda batch: {name: column[::2] for name, column in batch.items()}, batched=True)
    trainer = build("plain", tmp_path / "run", extra={"train_dataset": given})
    plant(trainer, Fault("loss", step=1, micro_step=1))
    trainer.train()
    note = (
        "dataset rows are those of the prepared dataset that GuardedTrainer trains on: it has 12 rows, its files had 24"
    )
    assert (note in caplog.text) == groups


def test_an_index_of_the_users_own_is_left_alone(tmp_path):
    trainer = build("plain", tmp_path, extra={"train_dataset": token_dataset(24).shuffle(seed=1)})
    assert find_prepared_rows(trainer).name([3, 4]) == [3, 4]
    assert find_prepared_rows(trainer).removed == []


def test_prompts_of_preferences_that_are_too_long(tmp_path):
    trainer = build("dpo", tmp_path, guard=False, max_length=24)
    rows = trainer.train_dataset
    assert find_prepared_rows(trainer).removed == []
    trainer.train_dataset = rows.filter(lambda row, i: i != 2, with_indices=True)  # as TRL does
    assert find_prepared_rows(trainer).removed == []  # its prompt is short, so somebody else has left it out
    assert find_prepared_rows(trainer).name([1, 2]) == [1, 3]
    trainer.args.max_length = len(rows[2]["prompt_ids"])
    assert find_prepared_rows(trainer).removed == [2]
