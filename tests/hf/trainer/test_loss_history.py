"""Divergence in finite numbers is observed in a guarded run, with numbers, and changes nothing."""

import pytest

from ...reference import assert_same, tensors_of
from ...trainers import build, events_of


def signals_of(trainer):
    return [event["signal"] for event in events_of(trainer)]


def test_a_learning_rate_that_is_far_too_high_is_reported_and_nothing_is_done_about_it(tmp_path):
    settings = {"max_steps": 15, "learning_rate": 10.0, "warmup_steps": 0, "gradient_accumulation_steps": 2}
    stock = build("plain", tmp_path / "stock", guard=False, **settings)
    stock.train()
    ours = build("plain", tmp_path / "ours", **settings)
    ours.train()
    assert_same(tensors_of(ours), tensors_of(stock))
    assert {"grad_spike", "loss_diverged"} <= set(signals_of(ours))
    [diverged] = [event for event in events_of(ours) if event["signal"] == "loss_diverged"]
    losses = [row["loss"] for row in ours.state.log_history if "loss" in row]
    assert diverged["values"]["usual"] == pytest.approx(losses[0], rel=0.01), "losses are those of the log"
    assert diverged["values"]["loss"] > 5 * losses[0]
    assert diverged["values"]["since_step"] == 1


def test_a_group_of_another_size_at_the_end_of_an_epoch_is_no_spike(tmp_path):
    """14 batches in groups of 4: the last group of every epoch has 2."""
    settings = {"gradient_accumulation_steps": 4, "max_steps": 48, "learning_rate": 1e-4}
    trainer = build("plain", tmp_path, **settings)
    trainer.train_dataset = trainer.train_dataset.select(range(28))
    trainer.train()
    assert signals_of(trainer) == []
    assert trainer.nanguard.guard.loss_watch.num_seen == 48
    values = trainer.nanguard.guard.loss_watch.spikes.values
    assert max(values) < 1.2 * min(values)
