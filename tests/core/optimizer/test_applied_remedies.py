"""Settings that a rewind changes: eps, and the learning rate of any schedule."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from hf_nanguard.core.event import Remedy
from hf_nanguard.core.optimizer.applied_remedies import choose_remedy, raise_eps, scale_rates

SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "step": lambda o: lr_scheduler.StepLR(o, 3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 12),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
}


def rates(name, scaled_at=None):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler, found = SCHEDULES[name](optimizer), []
    for step in range(10):
        if step == scaled_at:
            scale_rates(optimizer, scheduler, 0.1)
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")  # SequentialLR of torch 2.8
def test_every_later_rate_is_scaled(name):
    plain, scaled = rates(name), rates(name, scaled_at=4)
    assert scaled[:4] == plain[:4]
    assert scaled[4:] == pytest.approx([rate / 10 for rate in plain[4:]])


def test_a_rate_that_is_a_tensor_is_scaled_in_place():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=rate)
    scale_rates(optimizer, None, 0.1)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.05)


def test_eps_is_raised_where_it_is_zero_only():
    groups = [{"params": [nn.Parameter(torch.zeros(2, dtype=dtype))]} for dtype in (torch.float16, torch.float32)]
    optimizer = torch.optim.AdamW(groups)
    raise_eps(optimizer)
    assert [group["eps"] for group in optimizer.param_groups] == [1e-4, 1e-8]


@pytest.mark.parametrize(
    ("remedies", "chosen"),
    [
        ((), None),
        ((Remedy("larger_eps", True, True), Remedy("smaller_lr", True, True)), "larger_eps"),
        ((Remedy("larger_eps", True, False), Remedy("smaller_lr", True, True)), "smaller_lr"),
        ((Remedy("larger_eps", False),), None),
        ((Remedy("fused", True, True), Remedy("float32_state", True, True)), None),
    ],
)
def test_the_first_that_worked_and_can_be_applied(remedies, chosen):
    assert choose_remedy(remedies) == chosen
