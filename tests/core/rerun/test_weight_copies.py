"""Which things are copies of the weights, and how they are put back."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_nanguard.core.rerun.weight_copies import WeightCopies


def make():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    owner, told = SimpleNamespace(), []
    return model, owner, told, WeightCopies(model, lambda: {"owner": owner}, ["owner.ignored"], told.append)


def shadow(model):
    return [value.detach().clone() for value in model.parameters()]


PLACES = {
    "a module": lambda model: copy.deepcopy(model),
    "a list": shadow,
    "a tuple": lambda model: tuple(shadow(model)),
    "a dictionary in an object": lambda model: SimpleNamespace(ema=dict(enumerate(shadow(model)))),
    "a module in a dictionary": lambda model: {"ema": nn.ModuleDict({"inner": copy.deepcopy(model)})},
}


def read(value):
    if isinstance(value, nn.Module):
        return [tensor.clone() for tensor in value.state_dict().values()]
    if isinstance(value, SimpleNamespace):
        return read(value.ema)
    if isinstance(value, dict):
        return [each for item in value.values() for each in ([item.clone()] if torch.is_tensor(item) else read(item))]
    return [tensor.clone() for tensor in value]


@torch.no_grad()
def write(value):
    for tensor in value.parameters() if isinstance(value, nn.Module) else ():
        tensor.data.add_(1.0)


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("name", PLACES)
def test_a_copy_goes_back(name, is_replaced):
    model, owner, told, copies = make()
    owner.kept = PLACES[name](model)
    before, saved = read(owner.kept), copies.copy(None)
    assert len(saved) == 1
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 1.0
    if is_replaced:
        owner.kept = PLACES[name](model)
    elif isinstance(owner.kept, nn.Module):
        write(owner.kept)
    copies.restore(saved, 0)
    assert all(torch.equal(one, two) for one, two in zip(read(owner.kept), before, strict=True))
    assert copies.copy(saved)[0].copies.keys() == saved[0].copies.keys()
    assert told == []


def test_what_is_no_copy_is_left_alone():
    model, owner, told, copies = make()
    owner.model = model
    owner.views = list(model.parameters())
    owner.teacher = nn.Linear(500, 3)
    owner.ignored = copy.deepcopy(model)
    owner.steps = list(range(100))
    owner.ids = torch.zeros(1000, dtype=torch.long)
    owner.owner = owner
    assert copies.find() == []
    assert copies.num_bytes() == 0
    assert told == []


def test_what_is_as_large_and_unknown_is_named_once():
    _, owner, told, copies = make()
    owner.flat = torch.zeros(100)
    copies.find()
    copies.find()
    assert told == ["owner.flat"]


def test_a_property_is_not_asked():
    model, _, told, _ = make()

    class Owner:
        @property
        def ema(self):
            raise AssertionError

    assert WeightCopies(model, lambda: {"owner": Owner()}, [], told.append).find() == []
