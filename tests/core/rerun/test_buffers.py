"""Buffers that a forward writes are kept, and only those."""

import copy

import pytest
import torch
from torch import nn

from hf_nanguard.core.rerun.buffers import BufferKeeper
from hf_nanguard.testing import NAN, OperationCounter


class Counter(nn.Module):
    """Writes one buffer in place, replaces another, leaves a third and a fourth is absent."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("static", torch.arange(3.0))
        self.register_buffer("absent", None)

    def forward(self, x):
        self.written.add_(x.mean().detach())
        self.replaced = self.replaced + x.mean().detach()
        return x * self.static.sum()


def values_of(model):
    return {name: value.clone() for name, value in model.named_buffers()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_what_a_forward_wrote_is_put_back():
    model = nn.Sequential(nn.BatchNorm1d(4), Counter())
    keeper = BufferKeeper(model)
    for _ in range(3):  # while it learns, and after
        keeper.keep()
        before = values_of(model)
        model(torch.full((3, 4), NAN))
        assert any(value.isnan().any() for value in model.buffers())
        keeper.restore()
        assert_same(values_of(model), before)
        model(torch.randn(3, 4))


def test_restoring_twice_is_restoring():
    model = Counter()
    keeper = BufferKeeper(model)
    keeper.keep()
    before = values_of(model)
    for _ in range(2):
        model(torch.ones(3, 4))
        keeper.restore()
        assert_same(values_of(model), before)


def test_batch_norm_statistics_and_its_counter():
    model = nn.BatchNorm1d(4)
    keeper = BufferKeeper(model)
    for _ in range(3):
        keeper.keep()
        before = values_of(model)
        model(torch.randn(8, 4) * 100)
        assert not torch.equal(model.running_mean, before["running_mean"])
        assert model.num_batches_tracked == before["num_batches_tracked"] + 1
        keeper.restore()
        assert_same(values_of(model), before)
        model(torch.randn(8, 4))


def test_the_same_tensor_is_put_back_not_another():
    model = Counter()
    original = model.replaced
    keeper = BufferKeeper(model)
    keeper.keep()
    model(torch.ones(3, 4))
    assert model.replaced is not original
    keeper.restore()
    assert model.replaced is original


def test_static_buffers_are_not_kept_after_the_first_group():
    model = Counter()
    keeper = BufferKeeper(model)
    keeper.keep()
    model(torch.ones(3, 4))
    keeper.note_writes()
    keeper.keep()
    assert {slot.name for slot, *_ in keeper.kept} == {"written", "replaced"}


def test_a_model_whose_buffers_never_change_pays_nothing():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("table", torch.arange(8.0))
    keeper = BufferKeeper(model)
    keeper.keep()
    model(torch.ones(1, 2))
    with OperationCounter() as counted:
        keeper.keep()  # learns
    assert "aten.clone.default" not in counted.ops
    for _ in range(3):
        model(torch.ones(1, 2))
        with OperationCounter() as counted:
            keeper.keep()
        assert counted.ops == []


def test_a_first_group_that_was_put_back_teaches_the_same():
    """The very first step may be the bad one; what it wrote is written by every later one too."""
    model = Counter()
    keeper = BufferKeeper(model)
    keeper.keep()
    model(torch.full((3, 4), NAN))
    keeper.restore()
    for _ in range(2):
        keeper.keep()
        before = values_of(model)
        model(torch.full((3, 4), NAN))
        keeper.restore()
        assert_same(values_of(model), before)
        model(torch.ones(3, 4))


def test_nothing_is_restored_before_anything_was_kept():
    model = Counter()
    model(torch.ones(3, 4))
    before = values_of(model)
    BufferKeeper(model).restore()
    assert_same(values_of(model), before)


class Codebook(nn.Module):
    """Writes through `.data`, as vector quantizers do; torch does not count that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(2))

    def forward(self, x):
        self.codes.data.add_(x.mean().detach())
        return x


def test_writes_that_torch_does_not_count_are_seen_too():
    model = Codebook()
    keeper = BufferKeeper(model)
    for _ in range(3):
        keeper.keep()
        model(torch.ones(3, 4))
        keeper.keep()
        before = values_of(model)
        model(torch.full((3, 4), NAN))
        keeper.restore()
        assert_same(values_of(model), before)


class Late(nn.Module):
    """Writes a buffer from its third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 2:
            self.mean.mul_(0.9).add_(x.mean().detach())
        return x


def test_a_buffer_that_is_written_late_is_learned_then():
    model = Late()
    keeper = BufferKeeper(model)
    for _ in range(4):
        keeper.keep()
        model(torch.ones(3))
        keeper.note_writes()
    keeper.keep()
    before = values_of(model)
    model(torch.full((3,), NAN))
    keeper.restore()
    assert_same(values_of(model), before)
    assert model.calls == 4


class Momentum(nn.Module):
    """Follows another layer by a frozen copy, as contrastive learning does."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.layer, self.follower = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
        self.replaces = replaces

    def forward(self, x):
        for slow, fast in zip(self.follower.parameters(), self.layer.parameters(), strict=True):
            if self.replaces:
                slow.data = slow.data * 0.9 + fast.data * 0.1
            else:
                slow.data.mul_(0.9)
                slow.copy_(slow + 0.1 * fast.detach())
        return self.layer(x) + self.follower(x)


@pytest.mark.parametrize("replaces", [False, True])
def test_frozen_parameters_that_a_forward_writes_are_put_back(replaces):
    model = Momentum(replaces)
    keeper = BufferKeeper(model)
    for _ in range(2):
        keeper.keep()
        model(torch.ones(1, 2))
        keeper.note_writes()
    keeper.keep()
    before = [parameter.clone() for parameter in model.follower.parameters()]
    for _ in range(3):
        model(torch.ones(1, 2))
        keeper.restore()
    assert all(map(torch.equal, model.follower.parameters(), before))


def test_parameters_that_only_the_optimizer_writes_are_not_copied():
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = BufferKeeper(model)
    for _ in range(3):
        with OperationCounter() as counted:
            keeper.keep()
        assert counted.ops == []
        model(torch.ones(1, 2)).sum().backward()
        with OperationCounter() as counted:
            keeper.note_writes()
        assert counted.ops == []
        optimizer.step()


def test_parameters_that_a_pass_writes_are_put_back():
    model = nn.Embedding(4, 2, max_norm=1.0)  # scales the rows that it looks up
    nn.init.constant_(model.weight, 3.0)
    keeper = BufferKeeper(model)
    for row in range(2):
        keeper.keep()
        before = model.weight.detach().clone()
        model(torch.tensor([row]))
        assert not torch.equal(model.weight, before)
        keeper.note_writes()
    keeper.restore()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_an_optimizer_that_steps_inside_the_group_is_put_back(steps_before):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(other.parameters())
    keeper = BufferKeeper(model)

    def step(value):
        optimizer.zero_grad()
        (other(torch.ones(1, 2)).sum() * value).backward()
        keeper.keep_optimizer(optimizer)
        optimizer.step()

    def state():
        return copy.deepcopy([other.state_dict(), optimizer.state_dict()["state"]])

    for _ in range(steps_before):
        keeper.keep()
        step(1.0)
    keeper.keep()
    before = state()
    step(1.0)
    step(NAN)
    assert all(parameter.isnan().all() for parameter in other.parameters())
    keeper.restore()
    assert str(state()) == str(before)
    assert keeper.keep_apart().optimizers.keys() == {optimizer}


class Queue(nn.Module):
    """Keeps a large queue and a count as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.calls = torch.zeros(60_000, 2), 0

    def forward(self, x):
        self.queue, self.calls = torch.cat([self.queue[1:], x.detach()]), self.calls + 1
        return x


def test_attributes_are_put_back_also_large_ones_and_after_a_bad_first_group():
    model = Queue()
    keeper = BufferKeeper(model)
    for number in range(3):
        keeper.keep()
        before = model.queue
        model(torch.full((1, 2), NAN))
        keeper.restore()
        assert model.queue is before
        assert model.calls == number
        model(torch.ones(1, 2))


def test_nothing_is_learned_from_a_first_group_that_was_not_completed():
    model = Queue()
    keeper = BufferKeeper(model)
    keeper.keep()
    keeper.abandon()
    for number in range(3):
        keeper.keep()
        model(torch.full((1, 2), NAN))
        keeper.restore()
        assert model.calls == number
        model(torch.ones(1, 2))
