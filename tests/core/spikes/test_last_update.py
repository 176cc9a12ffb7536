"""How large the last update was, from what the optimizer keeps."""

import pytest
import torch
from torch import nn

from hf_nanguard.core.spikes.last_update import measure_last_update


def trained(optimizer, **settings):
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    built = optimizer(model.parameters(), **settings)
    for _ in range(5):
        before = model.weight.detach().clone()
        built.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        built.step()
    relative = (model.weight.detach() - before).square().mean().sqrt() / model.weight.detach().square().mean().sqrt()
    return built, model, relative.item()


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (torch.optim.Adam, {"lr": 1e-3}),
        (torch.optim.AdamW, {"lr": 0.3}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_it_is_what_the_update_was(optimizer, settings):
    built, _, relative = trained(optimizer, **settings)
    found = measure_last_update(built)
    assert found.relative == pytest.approx(relative, rel=0.05)
    assert found.is_large == (relative > 0.1)
    assert not found.is_abnormal


def test_moments_that_contradict_each_other_are_abnormal():
    built, model, _ = trained(torch.optim.Adam, lr=1e-3)
    built.state[model.weight]["exp_avg_sq"].mul_(1e-8)
    assert measure_last_update(built).is_abnormal
    built.state[model.weight]["exp_avg"][0, 0] = float("nan")
    assert measure_last_update(built).is_abnormal


def test_an_optimizer_that_keeps_nothing_tells_nothing():
    assert measure_last_update(trained(torch.optim.SGD, lr=0.1)[0]) is None
    assert measure_last_update(None) is None
