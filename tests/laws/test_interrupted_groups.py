"""An accumulation group that a log row, an error or the end of a stream interrupts is neither counted twice nor mixed up."""

import pytest
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from hf_nanguard.testing import Fault, plant

from ..models import token_dataset
from ..reference import assert_same, tensors_of
from ..trainers import build, events_of, stock_class
from .ways import params


class Stream(IterableDataset):
    """Ends inside an accumulation group."""

    def __iter__(self):
        return iter([token_dataset(48)[i] for i in range(10)])


@pytest.mark.parametrize(("step", "micro_step"), params((1, 3), cases=[(0, 0), (1, 0), (1, 3)]))
def test_a_row_inside_a_group_counts_no_loss_twice(step, micro_step, tmp_path):
    """The last two batches of the stream belong to the group that its next pass completes; a row comes in between."""
    means = []
    for strategy in ("no", "epoch"):
        extra = {"train_dataset": Stream()}
        trainer = build("plain", tmp_path / strategy, extra=extra, logging_strategy=strategy, max_steps=3, dropout=0.0)
        planted = plant(trainer, Fault("loss", step, micro_step))
        means.append(trainer.train().training_loss)
        assert len(planted.triggered) == 1
        assert [event["action"] for event in events_of(trainer)] == ["dropped"]
    assert means[0] == pytest.approx(means[1], rel=1e-5)


def test_a_run_may_return_anything(tmp_path):
    class Silent(stock_class("plain")):
        def _finalize_training(self, *args, **kwargs):
            super()._finalize_training(*args, **kwargs)

    trainer = build("plain", tmp_path, Silent, max_steps=1)
    planted = plant(trainer, *(Fault("loss", step=0, micro_step=micro) for micro in range(3)))
    assert trainer.train() is None
    assert len(planted.triggered) == 3


@pytest.mark.parametrize(
    "event", params("on_substep_end", cases=("on_substep_end", "on_pre_optimizer_step", "on_step_end"))
)
def test_a_smaller_batch_size_begins_with_an_empty_group(event, tmp_path):
    class OutOfMemory(TrainerCallback):
        has_failed = False

    def fail(self, *args, **kwargs):
        if not self.has_failed:
            self.has_failed = True
            raise RuntimeError("CUDA out of memory.")

    setattr(OutOfMemory, event, fail)
    ends = []
    for guard in (False, True):
        extra = {"callbacks": [OutOfMemory()]}
        trainer = build("plain", tmp_path / str(guard), guard=guard, extra=extra, auto_find_batch_size=True)
        trainer.train()
        ends.append(tensors_of(trainer))
    assert_same(*ends)
    assert events_of(trainer) == []
    done = 3 if event != "on_substep_end" else 0
    assert trainer.nanguard.guard.counter.seen == 12 + done


def test_a_loss_that_runs_out_of_memory_is_the_hosts_business_if_it_finds_the_batch_size(tmp_path):
    class Hungry(stock_class("plain")):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if len(inputs["input_ids"]) > 1:
                raise RuntimeError("CUDA out of memory.")
            return super().compute_loss(model, inputs, *args, **kwargs)

    ends = []
    for guard in (False, True):
        trainer = build("plain", tmp_path / str(guard), Hungry, guard=guard, auto_find_batch_size=True)
        trainer.train()
        ends.append(tensors_of(trainer))
    assert_same(*ends)
    assert events_of(trainer) == []
