"""The law `backward`: which differences between a gradient and what is measured count, and how much."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_nanguard import prove
from hf_nanguard.doctor.laws import gradient_flow
from hf_nanguard.doctor.trial.stopped_gradients import Detaches

from ...models import VOCAB, token_dataset
from .setups import build_plain

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
    assert differentiate(monkeypatch, [0.5, 0.5, 0.3], noise=4e-6).measured == 0.5  # the rest is below the rounding


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return -grad


def share_branch(x):
    with torch.no_grad():
        other = x.tanh()
    return x * other.mean(1, keepdim=True)


def choose_one(x):
    return x * F.gumbel_softmax(x, hard=True)


def halve_gradient(x):
    y = x * 1.0
    if y.requires_grad:
        y.register_hook(lambda grad: grad / 2)
    return y


PARTS = {
    "no_grad": (share_branch, "warning", __name__),
    "data": (lambda x: x / x.data.norm(dim=-1, keepdim=True), "warning", __name__),
    "hard choice": (choose_one, "warning", __name__),
    "reversal": (lambda x: x + Reversed.apply(x) / 2, "warning", "Reversed"),
    "wrong gradient": (halve_gradient, "error", "does not belong"),
}


class Classifier(nn.Module):
    """A small model of one's own, with a part in its middle."""

    def __init__(self, part):
        super().__init__()
        torch.manual_seed(0)
        self.part, self.embedding, self.inner, self.head = (
            part,
            nn.Embedding(VOCAB, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 3),
        )

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        x = self.embedding(input_ids)
        logits = self.head(self.part(x + self.inner(x).tanh()).mean(1))
        loss = {} if labels is None else {"loss": F.cross_entropy(logits, labels[:, 0] % 3)}
        return {**loss, "logits": logits}


@pytest.mark.parametrize("name", PARTS)
def test_a_gradient_that_is_stopped_or_changed_by_code_is_a_warning(name, tmp_path):
    part, severity, named = PARTS[name]
    trainer = build_plain(tmp_path, Classifier(part), token_dataset(16))
    (result,) = prove(trainer, only=["backward"])
    assert (result.status, str(result.severity)) == ("broken", severity), result.message
    assert named in result.message


def test_what_needs_no_gradient_is_not_noted():
    x = torch.ones(3, requires_grad=True)
    with Detaches() as detaches:
        Reversed.apply(x)  # its forward pass has no graph
        checkpoint(lambda value: (value * 2).exp(), x, use_reentrant=True)
        with torch.no_grad():
            x.shape, x.argmax(), torch.ones(3) * 2
    assert detaches.modules == set()


class Normed(Classifier):
    """Has a power iteration, which changes the loss from one forward to the next, and a layer that is not called."""

    def __init__(self, detaches):
        super().__init__(nn.Identity())
        self.inner = nn.utils.parametrizations.spectral_norm(self.inner)
        self.spare, self.detaches = nn.Linear(4, 4), detaches

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        out = super().forward(input_ids, attention_mask, labels)
        # Its values count, but nothing flows back.
        return {**out, "loss": out["loss"] * self.spare.weight.detach().square().mean()} if self.detaches else out


@pytest.mark.parametrize("detaches", [False, True])
def test_a_loss_that_changes_by_itself_makes_no_parameter_needed(detaches, tmp_path):
    trainer = build_plain(tmp_path, Normed(detaches), token_dataset(16))
    (result,) = prove(trainer, only=["gradients"])
    assert str(result.severity) == ("error" if detaches else "note"), result.message
    assert "spare.weight" in result.message
    assert ("nothing flows back" in result.message) == detaches
