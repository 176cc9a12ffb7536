"""Events name the rows of the dataset that was passed in, whatever TRL has made of it."""

import pytest
from datasets import Dataset

from hf_nanguard import attach
from hf_nanguard.hf.compat.prepared_dataset import find_prepared_rows
from hf_nanguard.testing import Fault, plant
from tests.models import token_dataset
from tests.trainers import build, events_of

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


def test_nothing_is_reported_if_no_row_is_removed(tmp_path):
    trainer = build("sft", tmp_path, extra={"train_dataset": dataset(())}, max_length=8)
    trainer.train()
    assert events_of(trainer) == []


def test_rows_of_a_packed_dataset_are_its_own(tmp_path):
    trainer = build("sft", tmp_path, extra={"train_dataset": dataset()}, max_length=8, packing=True, guard=False)
    assert find_prepared_rows(trainer).is_rebuilt


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
