"""Samples without an unmasked label, in batches that have other labels, are counted and named."""

import pytest
from datasets import Dataset
from transformers import Trainer

from hf_nanguard import GuardArguments
from tests.models import token_rows
from tests.trainers import build, events_of

MASKED = (3, 17, 30)


def rows_with(masked, length=8):
    return [
        {**row, "labels": [-100] * length if i in masked else row["labels"]} for i, row in enumerate(token_rows(40))
    ]


def run(folder, trainer_class=None, guard=None, masked=MASKED, **settings):
    trainer = build(
        "plain", folder, trainer_class, extra={"train_dataset": Dataset.from_list(rows_with(masked)), "guard": guard},
        per_device_train_batch_size=4, gradient_accumulation_steps=1, max_steps=-1, train_sampling_strategy="sequential",
        **{"num_train_epochs": 1, **settings},
    )  # fmt: skip
    trainer.train()
    return events_of(trainer)


@pytest.mark.parametrize("policy", ["drop", "drop_samples"])
@pytest.mark.parametrize("workers", [0, 1])
def test_masked_samples_are_reported_at_first_and_at_the_end(policy, workers, tmp_path):
    first, last = run(tmp_path, guard=GuardArguments(nanguard_on_bad_input=policy), dataloader_num_workers=workers)
    assert (first["signal"], first["action"], first["step"]) == ("labels_masked", "observed", 0)
    assert (first["culprit"]["samples"], first["culprit"]["rows"]) == ([3], [3])
    assert (last["signal"], last["action"], last["step"]) == ("labels_masked", "observed", 10)
    assert last["values"] == {"num_samples": 3, "num_rows": 3}
    assert last["culprit"]["rows"] == list(MASKED)
    assert "3 samples of this run had no unmasked label (dataset rows 3, 17, 30)" in last["message"]


def test_two_epochs_count_samples_twice_and_rows_once(tmp_path):
    *_, last = run(tmp_path, num_train_epochs=2)
    assert last["values"] == {"num_samples": 6, "num_rows": 3}


def test_a_batch_that_is_masked_as_a_whole_has_its_own_event(tmp_path):
    events = run(tmp_path, masked=(4, 5, 6, 7))
    assert [(event["action"], event["culprit"]["rows"]) for event in events] == [("skipped", [4, 5, 6, 7])]


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize(("trainer_class", "masked"), [(OwnLoss, MASKED), (None, ())])
def test_nothing_is_said_of_a_loss_of_ones_own_or_of_healthy_data(trainer_class, masked, tmp_path):
    assert run(tmp_path, trainer_class, masked=masked) == []
