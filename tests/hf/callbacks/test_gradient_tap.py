"""The tap sees gradients as they are at the end of the backward, once a group, and costs nothing when it is not asked."""

import pytest
import torch
from accelerate.state import GradientState
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from hf_nanguard.hf.callbacks.gradient_tap import GradientTap


class Net(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(self.last(self.first(x)))


OUTPUTS = {
    "tensor": (lambda y: y, lambda out: out),
    "tuple": (lambda y: (1, y), lambda out: out[1]),
    "list": (lambda y: [None, y], lambda out: out[1]),
    "dict": (lambda y: {"logits": y}, lambda out: out["logits"]),
    "output": (lambda y: CausalLMOutput(loss=y.mean(), logits=y), lambda out: out.loss),
}


@pytest.fixture(autouse=True)
def synced():
    GradientState()._set_sync_gradients(True)
    yield
    GradientState._reset_state()


@pytest.mark.parametrize("kind", OUTPUTS)
def test_it_measures_what_torch_measures(kind):
    wrap, find = OUTPUTS[kind]
    net = Net(wrap)
    tap = GradientTap(net)
    tap.arm()
    find(net(torch.randn(5, 3))).square().mean().backward()
    gradients = {name: p.grad for name, p in net.named_parameters()}
    assert torch.equal(tap.norm, torch.nn.utils.get_total_norm(list(gradients.values())))
    assert {name: float(value) for name, value in tap.magnitudes} == {
        name: float(gradient.abs().max()) for name, gradient in gradients.items()
    }


def test_gradients_that_appear_later_in_the_backward_are_seen():
    """The hook fires when the backward begins; what it measures is the end."""
    net = Net(lambda y: y)
    tap = GradientTap(net)
    tap.arm()
    (net(torch.ones(1, 3)).sum() + net.first.weight.sum() * float("inf")).backward()
    bad = {name: float(value) for name, value in tap.magnitudes if not torch.isfinite(value)}
    assert bad == {"first.weight": float("inf")}


def test_only_the_backward_that_ends_the_group_is_measured():
    net = Net(lambda y: {"loss": y.mean()})
    tap = GradientTap(net)
    tap.arm()
    GradientState()._set_sync_gradients(False)
    net(torch.ones(1, 3))["loss"].backward()
    assert tap.norm is None
    GradientState()._set_sync_gradients(True)
    net(torch.ones(1, 3))["loss"].backward()
    assert torch.equal(tap.norm, torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]))
    assert len(tap.losses) == 2


def test_unarmed_or_without_gradients_nothing_is_kept():
    net = Net(lambda y: {"loss": y.mean()})
    tap = GradientTap(net)
    net(torch.ones(1, 3))["loss"].backward()
    assert (tap.norm, tap.losses) == (None, [])
    tap.arm()
    with torch.no_grad():
        net(torch.ones(1, 3))
    assert (tap.norm, tap.losses) == (None, [])


def test_arming_forgets_the_last_group():
    net = Net(lambda y: {"loss": y.mean()})
    tap = GradientTap(net)
    tap.arm()
    net(torch.ones(1, 3))["loss"].backward()
    assert tap.norm is not None
    tap.arm()
    assert (tap.norm, tap.losses, tap.magnitudes) == (None, [], [])


def test_a_forward_that_is_used_twice_is_measured_at_its_last_backward():
    net = Net(lambda y: y)
    tap = GradientTap(net)
    tap.arm()
    out = net(torch.ones(1, 3)).sum()
    out.backward(retain_graph=True)
    first = tap.norm.clone()
    out.backward()
    assert torch.allclose(tap.norm, 2 * first)


def test_a_frozen_parameter_has_no_gradient_to_look_at():
    net = Net(lambda y: y)
    net.first.weight.requires_grad_(False)
    tap = GradientTap(net)
    tap.arm()
    net(torch.ones(1, 3)).sum().backward()
    assert [name for name, _ in tap.magnitudes] == ["first.bias", "last.weight", "last.bias"]


def test_the_model_has_a_hook_only_while_a_measurement_is_requested():
    net = Net(lambda y: y)
    tap = GradientTap(net)
    assert net._forward_hooks == {}
    tap.arm()
    tap.arm()
    assert len(net._forward_hooks) == 1
    tap.disarm()
    assert net._forward_hooks == {}


@pytest.mark.parametrize("place", ["forward", "loss", "backward"])
def test_an_error_leaves_no_hook(place):
    def fail(*args):
        raise ZeroDivisionError

    net = Net(lambda y: y)
    tap = GradientTap(net)
    if place == "forward":
        net.last.register_forward_pre_hook(fail)
    if place == "backward":
        net.last.weight.register_hook(fail)
    tap.arm()
    with pytest.raises(ZeroDivisionError):
        (net(torch.ones(1, 3)).sum() if place != "loss" else fail(net(torch.ones(1, 3)))).backward()
    assert net._forward_hooks == {}


def test_every_forward_of_a_group_is_hooked_until_the_measurement_ends():
    net = Net(lambda y: {"loss": y.mean()})
    tap = GradientTap(net)
    tap.arm()
    for syncs in (False, False, True, True):  # the last one is run again by somebody
        GradientState()._set_sync_gradients(syncs)
        net(torch.ones(1, 3))["loss"].backward()
        assert (tap.norm is not None) == syncs
    assert len(tap.losses) == 4
    tap.disarm()
    assert net._forward_hooks == {}
