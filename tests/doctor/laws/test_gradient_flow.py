"""The law `backward`: which differences between a gradient and what is measured count."""

import torch
from torch import nn

from hf_nanguard.doctor.laws import gradient_flow

SAID = 1.0  # by the gradient of one parameter of norm 1


def differentiate(monkeypatch, measured, noise=1e-9):
    """Returns the derivative that these measurements give, one for each shift."""
    values = iter(measured)
    monkeypatch.setattr(gradient_flow, "_measure", lambda *_: next(values))
    weight, gradient = nn.Parameter(torch.tensor([1.0])), torch.tensor([SAID])
    return gradient_flow._differentiate(None, {"w": weight}, {"w": gradient}, noise)


def test_two_large_shifts_that_agree_by_chance_do_not_count(monkeypatch):
    assert differentiate(monkeypatch, [0.7, 0.701, 0.9, 1.0]).measured == 1.0  # a router changed its mind in both
    assert differentiate(monkeypatch, [0.7, 0.701, 0.9, 0.8, 1.2]) is None


def test_another_value_at_all_smaller_shifts_counts(monkeypatch):
    assert differentiate(monkeypatch, [0.4, 0.49, 0.5, 0.5, 0.5]).measured == 0.5
    assert (
        differentiate(monkeypatch, [0.5, 0.5, 0.3, 0.3, 0.3], noise=4e-6).measured == 0.5
    )  # then rounding is too large
