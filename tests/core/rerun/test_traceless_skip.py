"""A skip leaves parameters, moments, step counts and the loss scale as they were."""

import copy

import pytest
import torch
from torch import nn
from transformers import Adafactor

from hf_nanguard.core.rerun.traceless_skip import ScalerState, clear_gradients, forget_unscale
from hf_nanguard.testing import NAN

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Adafactor": lambda p: Adafactor(p, lr=0.1, relative_step=False, scale_parameter=False, weight_decay=0.1),
    "Adafactor relative": lambda p: Adafactor(p, lr=None),
}


def build(make, seed=0):
    torch.manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))]
    return parameters, make(parameters)


def fill(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def everything(parameters, optimizer):
    return copy.deepcopy([[p.detach() for p in parameters], optimizer.state_dict()])


def assert_equal(first, second):
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_equal(first[key], second[key])
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_equal(one, other)
    else:
        assert first == second


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("warm", [0, 3], ids=["at the first step", "with moments"])
def test_cleared_gradients_make_a_step_a_true_no_op(name, warm):
    parameters, optimizer = build(OPTIMIZERS[name])
    for step in range(warm):
        fill(parameters, step)
        optimizer.step()
    before = everything(parameters, optimizer)
    parameters[0].grad = torch.full_like(parameters[0], NAN)
    clear_gradients(parameters)
    optimizer.step()
    assert_equal(everything(parameters, optimizer), before)


def test_zeroed_gradients_are_not_a_skip():
    parameters, optimizer = build(OPTIMIZERS["AdamW"])
    fill(parameters, 0)
    optimizer.step()
    before = everything(parameters, optimizer)
    for parameter in parameters:
        parameter.grad.zero_()
    optimizer.step()
    assert not torch.equal(parameters[0], before[0][0])


def test_an_update_times_zero_is_not_a_skip():
    parameter = torch.ones(3)
    assert (parameter + 0 * torch.tensor(NAN)).isnan().all()


def scaled(scale=8.0, interval=3):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)


def good_step(model, optimizer, scaler):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(3, 2)).mean()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_a_contained_step_leaves_the_loss_scale_and_its_growth():
    model, optimizer, scaler = scaled()
    good_step(model, optimizer, scaler)
    before = scaler.state_dict()
    assert before["_growth_tracker"] == 1
    state = ScalerState(scaler)
    scaler.scale(model(torch.ones(3, 2)).mean() * NAN).backward()
    scaler.unscale_(optimizer)
    clear_gradients(model.parameters())
    scaler.step(optimizer)
    scaler.update()
    assert scaler.state_dict() != before, "without the restore the scale would have halved"
    state.restore()
    assert scaler.state_dict() == before
    good_step(model, optimizer, scaler)
    assert scaler.state_dict()["_growth_tracker"] == 2
    good_step(model, optimizer, scaler)
    assert scaler.get_scale() == 16.0


def test_unscale_can_run_again_after_a_contained_step():
    model, optimizer, scaler = scaled()
    scaler.scale(model(torch.ones(3, 2)).mean() * NAN).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    forget_unscale(scaler)
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(3, 2)).mean()).backward()
    scaler.unscale_(optimizer)
    assert torch.equal(model.bias.grad, torch.ones(1))


def test_a_scaler_that_was_never_used():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    state = ScalerState(scaler)
    state.restore()
    assert scaler.get_scale() == 4.0
