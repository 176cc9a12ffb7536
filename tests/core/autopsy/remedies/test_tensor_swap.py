"""Nested values with every tensor changed, whatever they are nested in."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from hf_nanguard.core.autopsy.remedies.tensor_swap import map_tensors

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


def double(tensor):
    return tensor * 2


@pytest.mark.parametrize("wrap", [
    lambda t: [t], lambda t: (t,), lambda t: {"a": t}, lambda t: OrderedDict(a=t), lambda t: Pair(t, "x"),
    lambda t: Batch(t), lambda t: Frozen(t), lambda t: Batch("none", others=[{"a": t}]), lambda t: {"a": Frozen([t])},
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
