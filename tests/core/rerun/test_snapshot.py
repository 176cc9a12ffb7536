"""What a snapshot holds, and what it leaves out."""

import pytest
import torch
from torch import nn

from hf_nanguard.core.rerun.host_copy import find_tensors
from hf_nanguard.core.rerun.runner import LoopRunner
from hf_nanguard.core.rerun.snapshot import SMALL, Snapshot, estimate_bytes, list_parts


class Adapter(nn.Module):
    """A large frozen weight, a large quantised one in a buffer, and a small trainable part."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(400, 400).requires_grad_(False)
        self.register_buffer("quantised", torch.zeros(SMALL + 1, dtype=torch.int32))
        self.down, self.up = nn.Linear(400, 2, bias=False), nn.Linear(2, 400, bias=False)


def make(model=None):
    model = model or Adapter()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return model, optimizer, LoopRunner(model, optimizer)


def step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()


def test_only_what_is_trained_is_copied():
    model, optimizer, runner = make()
    step(model, optimizer)
    snapshot = Snapshot.take(0, 0, list_parts(runner, optimizer))
    held = sum(tensor.numel() * tensor.element_size() for tensor in find_tensors(snapshot.copies[:3]))
    adapters = 3 * 1600 * 4  # weights and two moments
    assert adapters <= held < adapters + 1000


@pytest.mark.parametrize("steps", [0, 1])
def test_the_size_is_known_before_the_first_step(steps):
    model, optimizer, runner = make()
    for _ in range(steps):
        step(model, optimizer)
    assert estimate_bytes(runner, optimizer) == pytest.approx(3 * 1600 * 4, rel=0.01)


def test_state_that_did_not_exist_is_removed():
    model, optimizer, runner = make()
    snapshot = Snapshot.take(0, 0, list_parts(runner, optimizer))
    before = model.up.weight.clone()
    step(model, optimizer)
    snapshot.restore(1)
    assert not optimizer.state
    assert torch.equal(model.up.weight, before)
    assert model.up.weight.grad is None


def test_settings_of_groups_and_the_schedule_go_back():
    model, optimizer, runner = make()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    snapshot = Snapshot.take(0, 0, list_parts(runner, optimizer, scheduler))
    rate = optimizer.param_groups[0]["lr"]
    step(model, optimizer)
    scheduler.step()
    optimizer.param_groups[0]["eps"] = 1.0
    snapshot.restore(1)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["eps"]) == (rate, 1e-8)
    assert scheduler.last_epoch == 0


def test_a_snapshot_can_be_restored_twice():
    model, optimizer, runner = make()
    step(model, optimizer)
    snapshot = Snapshot.take(1, 1, list_parts(runner, optimizer))
    kept = model.up.weight.clone(), optimizer.state[model.up.weight]["exp_avg"].clone()
    for _ in range(2):
        step(model, optimizer)
        assert not torch.equal(model.up.weight, kept[0])
        snapshot.restore(2)
        assert torch.equal(model.up.weight, kept[0])
        assert torch.equal(optimizer.state[model.up.weight]["exp_avg"], kept[1])
