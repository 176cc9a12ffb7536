"""Tensors are found, named and changed, whatever they are nested in."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from hf_nanguard.core.rerun.nested_inputs import find_tensors, map_tensors, name_tensors

Pair = namedtuple("Pair", "first second")


@dataclass
class Batch:
    ids: Tensor
    name: str = "batch"
    others: list = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    ids: Tensor


@dataclass
class Setting:
    sizes: list


@dataclass
class Point:
    x: Tensor
    y: Tensor


@dataclass(slots=True)
class Slotted:
    x: Tensor
    y: Tensor


def double(tensor):
    return tensor * 2


@pytest.mark.parametrize("wrap", [
    lambda t: [t], lambda t: (t,), lambda t: {"a": t}, lambda t: OrderedDict(a=t), lambda t: Pair(t, "x"),
    lambda t: Batch(t), lambda t: Frozen(t), lambda t: Slotted(t, t), lambda t: Batch("none", others=[{"a": t}]), lambda t: {"a": Frozen([t])},
])  # fmt: skip
def test_every_tensor_is_changed_and_none_of_the_given(wrap):
    tensor = torch.tensor([1.0, 2.0])
    given = wrap(tensor)
    mapped = map_tensors(given, double)
    assert type(mapped) is type(given)
    assert repr(mapped) == repr(wrap(tensor * 2))
    assert repr(given) == repr(wrap(torch.tensor([1.0, 2.0])))


def test_what_holds_no_tensor_stays_the_very_same():
    setting = Setting([1, 2])
    assert map_tensors({"a": setting, "b": Setting}, double) == {"a": setting, "b": Setting}
    assert map_tensors([setting], double)[0] is setting
    assert map_tensors(Setting, double) is Setting


@pytest.mark.parametrize(
    "inputs",
    [
        {"x": torch.zeros(3, 2), "y": torch.ones(3)},
        UserDict({"x": torch.zeros(3, 2), "y": torch.ones(3)}),
        Slotted(torch.zeros(3, 2), torch.ones(3)),
        Point(torch.zeros(3, 2), torch.ones(3)),
    ],
)
def test_tensors_have_the_names_of_their_fields(inputs):
    assert list(name_tensors(inputs)) == ["x", "y"]


def test_nested_tensors_have_dotted_names():
    inputs = [{"kwargs": {"input_ids": torch.zeros(3, 2)}}, (torch.ones(3),)]
    assert list(name_tensors(inputs)) == ["0.kwargs.input_ids", "1.0"]
    assert list(name_tensors(torch.zeros(2))) == ["input"]
    assert name_tensors(7) == {}


def test_tensors_are_found_in_order_at_any_depth():
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert [len(t) for t in find_tensors({"x": [a, "text", (b,)], "y": Frozen(c), "z": None})] == [1, 2, 3]
    assert list(find_tensors(a)) == [a]
