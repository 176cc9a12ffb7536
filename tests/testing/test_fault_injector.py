"""The fault injector on stock trainers: each fault occurs in its batch, and in no other."""

import math

import pytest
import torch

from hf_nanguard.testing import INF, NAN, Fault, add_bad_gradient, plant
from tests.trainers import build

LAYER = "model.layers.1.mlp.up_proj.weight"


def _losses(tmp_path, *faults):
    """Returns the losses of the micro-batches, the names of bad gradients after each, and the faults that occurred."""
    trainer = build("plain", tmp_path, guard=False, gradient_accumulation_steps=2, max_steps=2)
    planted = plant(trainer, *faults)
    losses, bad = [], []
    training_step = trainer.training_step

    def watch(model, inputs, num_items=None):
        loss = training_step(model, inputs, num_items)
        losses.append(loss.item())
        bad.append([name for name, p in model.named_parameters() if not torch.isfinite(p.grad).all()])
        return loss

    trainer.training_step = watch
    trainer.train()
    return losses, bad, planted.triggered


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_loss_fault_is_in_its_micro_batch_only(value, tmp_path):
    fault = Fault("loss", 0, 1, value=value)
    losses, _, triggered = _losses(tmp_path, fault)
    assert triggered == [fault]
    assert math.isfinite(losses[0])
    assert not math.isfinite(losses[1])


def test_a_gradient_fault_names_one_parameter_and_keeps_the_loss(tmp_path):
    healthy, *_ = _losses(tmp_path / "healthy")
    fault = Fault("gradient", 1, 1, parameter=LAYER)
    losses, bad, triggered = _losses(tmp_path / "faulty", fault)
    assert triggered == [fault]
    assert losses == healthy
    assert bad == [[], [], [], [LAYER]]


def test_a_fault_of_another_rank_or_a_later_step_does_not_occur(tmp_path):
    losses, bad, triggered = _losses(tmp_path, Fault("loss", 0, rank=1), Fault("loss", 9))
    assert triggered == []
    assert all(map(math.isfinite, losses))
    assert bad == [[]] * 4


@pytest.mark.parametrize(("value", "expected"), [(None, {-100}), (9, {9})])
def test_a_label_fault_is_in_the_batch(value, expected, tmp_path):
    trainer = build("plain", tmp_path, guard=False, gradient_accumulation_steps=1, max_steps=2)
    planted = plant(trainer, Fault("label", 1, value=value))
    rows = [trainer.train_dataset[i] for i in range(2)]
    batches = [trainer.data_collator(rows)["labels"][:, -1] for _ in range(3)]
    assert set(batches[1].tolist()) == expected
    assert torch.equal(batches[0], batches[2])
    assert len(planted.triggered) == 1


def test_add_bad_gradient():
    weight = torch.ones(3, requires_grad=True)
    loss = add_bad_gradient(weight.sum(), weight)
    loss.backward()
    assert loss.item() == 3.0
    assert weight.grad.isnan().tolist() == [True, False, False]
