"""The mark of a non-finite loss: seen in the gradients, and not one bit of a healthy gradient is changed."""

import pytest
import torch
from torch import nn

from hf_nanguard.boundary import Boundary
from hf_nanguard.core.rerun.loss_mark import mark_shard, marked_backward
from hf_nanguard.testing import INF, NAN


def make_net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    net.unused = nn.Parameter(torch.ones(1))  # the smallest one, and no gradient reaches it
    return net


def bits_of(net):
    return [None if p.grad is None else p.grad.view(torch.int32).clone() for p in net.parameters()]


def backward(net, value=None, marked=True):
    loss = net(torch.ones(2, 4)).sum()
    loss = loss if value is None else loss + value
    if not marked:
        loss.backward()
        return
    with marked_backward(list(net.parameters()), loss, Boundary()):
        loss.backward()


def test_a_finite_loss_leaves_every_bit():
    plain, ours = make_net(), make_net()
    for _ in range(2):
        backward(plain, marked=False)
        backward(ours)
    for expected, found in zip(bits_of(plain), bits_of(ours), strict=True):
        assert (expected is None and found is None) or torch.equal(expected, found)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_bad_loss_shows_in_the_gradients_that_exist(value):
    net = make_net()
    backward(net, value)
    assert net.unused.grad is None
    bad = [name for name, p in net.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    assert len(bad) == 1
    assert net.get_parameter(bad[0]).numel() <= 8


def test_a_mark_survives_accumulation():
    net = make_net()
    backward(net, NAN)
    backward(net)
    assert not torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]).isfinite()


def test_no_hook_is_left_also_after_an_error():
    net = make_net()
    with pytest.raises(ZeroDivisionError), marked_backward(list(net.parameters()), torch.tensor(1.0), Boundary()):
        raise ZeroDivisionError
    assert not any(p._backward_hooks for p in net.parameters())


def test_a_sparse_gradient_does_not_carry_the_mark():
    table, scale = nn.Embedding(3, 1, sparse=True), nn.Parameter(torch.ones(8))
    loss = table(torch.tensor([1])).sum() * scale.sum() + NAN
    with marked_backward([*table.parameters(), scale], loss, Boundary()):
        loss.backward()
    assert table.weight.grad.is_sparse
    assert not scale.grad.isfinite().all()


@pytest.mark.parametrize("value", [None, NAN, INF])
def test_a_shard_is_marked_in_one_entry_and_only_if_a_loss_is_bad(value):
    net = make_net()
    backward(net, marked=False)
    before = bits_of(net)
    mark_shard(list(net.parameters()), [torch.tensor(1.0), torch.tensor(2.0 if value is None else value)])
    num_changed = sum(
        int((found != expected).sum())
        for found, expected in zip(bits_of(net), before, strict=True)
        if found is not None
    )
    assert num_changed == (0 if value is None else 1)
    assert sum(int(p.grad.isnan().sum()) for p in net.parameters() if p.grad is not None) == num_changed
