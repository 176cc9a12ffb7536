"""Copies in host memory, and how they are put back in place."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from hf_nanguard.core.rerun.host_copy import (
    HostCopy,
    copy_tensor,
    copy_tree,
    find_tensors,
    restore_tensor,
    restore_tree,
)


class Part:
    def __init__(self):
        self.mean = torch.ones(2)
        self.count = 3


def test_a_copy_does_not_follow_and_is_restored_in_place():
    live = nn.Parameter(torch.arange(4.0))
    saved = copy_tensor(live)
    with torch.no_grad():
        live.fill_(9.0)
    assert restore_tensor(live, saved) is live
    assert torch.equal(live, torch.arange(4.0))


def test_memory_of_the_same_shape_is_used_again():
    first = copy_tensor(torch.ones(3))
    assert copy_tensor(torch.zeros(3), first).value is first.value
    assert copy_tensor(torch.zeros(4), first).value is not first.value
    assert copy_tensor(torch.zeros(3, dtype=torch.int64), first).value is not first.value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(3, 2).t(),
        torch.ones(()),
        torch.empty(0),
    ],
    ids=["channels_last", "transposed", "scalar", "empty"],
)
def test_layouts_stay(tensor):
    saved, strides = copy_tensor(tensor), tensor.stride()
    tensor.mul_(0)
    restore_tensor(tensor, saved)
    assert tensor.stride() == strides
    assert torch.equal(tensor, torch.ones_like(tensor))


def test_a_wrapper_of_tensors_is_copied_as_what_it_is():
    live = TwoTensor(torch.ones(3), torch.full((3,), 2.0))
    saved = copy_tensor(live)
    live.mul_(5)
    restore_tensor(live, saved)
    assert (live.a.tolist(), live.b.tolist()) == ([1.0] * 3, [2.0] * 3)


def test_a_tensor_that_is_gone_is_made_anew():
    assert torch.equal(restore_tensor(None, HostCopy(torch.ones(2), torch.device("cpu"))), torch.ones(2))


def test_trees_are_restored_in_place_and_what_was_added_is_removed():
    part, tensor = Part(), torch.zeros(2)
    live = {"a": [tensor, {"b": torch.ones(1)}], "c": (1, torch.ones(1)), "part": part, "d": 0.5}
    inner = live["a"]
    saved = copy_tree(live)
    tensor.fill_(7)
    inner.append(torch.ones(9))
    part.mean.fill_(0)
    part.count, part.more = 8, torch.ones(1)
    live |= {"c": None, "d": 0.1, "new": torch.ones(3)}
    assert restore_tree(live, saved) is live
    assert [*live] == ["a", "c", "part", "d"]
    assert live["a"] is inner
    assert inner[0] is tensor
    assert (tensor.tolist(), len(inner), live["d"]) == ([0.0, 0.0], 2, 0.5)
    assert (live["c"][0], live["c"][1].tolist()) == (1, [1.0])
    assert live["part"] is part
    assert (part.mean.tolist(), part.count, hasattr(part, "more")) == ([1.0, 1.0], 3, False)


def test_what_refers_to_itself_is_copied_to_a_depth():
    live = {"x": torch.ones(1)}
    live["self"] = live
    saved = copy_tree(live)
    live["x"].fill_(3)
    restore_tree(live, saved)
    assert live["x"].item() == 1
    assert live["self"] is live


def test_tensors_of_nested_values_are_found():
    found = list(find_tensors({"a": [torch.ones(1), (torch.ones(2),)], "b": Part(), "c": "text"}))
    assert [tensor.numel() for tensor in found] == [1, 2, 2]
