"""Buffers that a forward writes are kept, and only those."""

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
    keeper.keep()
    assert {name for _, name, *_ in keeper.kept} == {"written", "replaced"}


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
