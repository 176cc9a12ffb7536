"""Whether code of the user's stands between a batch and its loss."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from transformers import Trainer

from hf_nanguard.hf.compat.own_loss import find_loss_state, has_own_batches, is_library_module
from hf_nanguard.testing import Fault, plant
from tests.models import tiny_llama
from tests.trainers import build, events_of


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("kind", ["plain", "sft", "dpo"])
def test_the_hosts_trainers_have_no_code_of_the_users(kind, guard, tmp_path):
    trainer = build(kind, tmp_path, guard=guard)
    assert not has_own_batches(trainer)
    plant(trainer, Fault("loss"))  # ours
    assert not has_own_batches(trainer)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("name", ["compute_loss", "training_step", "_prepare_inputs", "get_batch_samples"])
@pytest.mark.parametrize("place", ["class", "trainer", "host"])
def test_a_method_of_the_users_is_seen_wherever_it_is(place, name, guard, tmp_path, monkeypatch):
    original = getattr(Trainer, name)

    def own(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    cls = type("Mine", (Trainer,), {name: own}) if place == "class" else Trainer
    if place == "host":
        monkeypatch.setattr(Trainer, name, own)
    trainer = build("plain", tmp_path, cls, guard=guard)
    if place == "trainer":
        setattr(trainer, name, own.__get__(trainer))
    assert has_own_batches(trainer)


def test_other_methods_and_a_loss_function(tmp_path):
    class Logs(Trainer):
        def log(self, *args, **kwargs):
            super().log(*args, **kwargs)

    assert not has_own_batches(build("plain", tmp_path, Logs))
    assert has_own_batches(build("plain", tmp_path, extra={"compute_loss_func": lambda *args, **kwargs: None}))


def test_modules_whose_inputs_the_user_changes():
    class Own(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids % 4)

    class Renamed(nn.Embedding):
        pass

    hooked, replaced = nn.Embedding(4, 2), nn.Embedding(4, 2)
    hooked.register_forward_pre_hook(lambda module, args: None)
    replaced.forward = lambda ids: torch.zeros(1)
    assert is_library_module(tiny_llama())
    assert is_library_module(nn.Embedding(4, 2))
    assert is_library_module(Renamed(4, 2))
    assert not any(map(is_library_module, (Own(4, 2), hooked, replaced)))


class Center(nn.Module):
    """A criterion with state."""

    def forward(self, outputs, labels, num_items_in_batch=None):
        return outputs["logits"].mean()


class Counted:
    """A loss that is an object."""

    def loss(self, outputs, labels, num_items_in_batch=None):
        return outputs["logits"].mean()


class OwnLoss(Trainer):
    """Has a criterion, and a second name for its model."""

    def __init__(self, model, *args, **kwargs):
        super().__init__(model, *args, **kwargs)
        self.criterion, self.student, self.wrapped = Center(), model, nn.ModuleList([model])

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def test_what_a_loss_of_the_users_may_write_is_found(tmp_path):
    assert find_loss_state(build("plain", tmp_path)) == ([], [])
    counting = build("sft", tmp_path)  # TRL counts tokens in its loss
    assert find_loss_state(counting) == ([], [counting])
    trainer = build("plain", tmp_path, OwnLoss)
    assert find_loss_state(trainer) == ([trainer.criterion], [trainer])
    counted, center = Counted(), Center()
    for function, modules, objects in ((partial(counted.loss), [], [counted]), (center, [center], []), (max, [], [])):
        trainer = build("plain", tmp_path, extra={"compute_loss_func": function})
        assert find_loss_state(trainer) == (modules, [trainer, *objects])


@dataclass(eq=True)
class WithoutHash(nn.Module):
    gamma: float = 2.0

    def __post_init__(self):
        super().__init__()


def make_odd(kind):
    if kind == "inference":
        with torch.inference_mode():
            return nn.Linear(2, 2)
    made = {
        "without a hash": WithoutHash, "scripted": lambda: torch.jit.script(nn.Linear(2, 2)), "lazy": lambda: nn.LazyLinear(2),
        "meta": lambda: nn.BatchNorm1d(2, device="meta"), "sparse": nn.Module, "nested": nn.Module,
    }[kind]()  # fmt: skip
    if kind == "sparse":
        made.register_buffer("table", torch.eye(2).to_sparse())
    if kind == "nested":
        made.register_buffer("table", torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged))
    return made


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("kind", ["without a hash", "scripted", "inference", "lazy", "meta", "sparse", "nested"])
def test_a_module_that_cannot_be_kept_costs_nothing_but_itself(kind, tmp_path):
    """A trainer may hold any module; what happens to it must not turn the guard off."""
    trainer = build("plain", tmp_path, OwnLoss, max_steps=3)
    plant(trainer, Fault("loss", step=1, micro_step=1))
    trainer.odd = make_odd(kind)
    assert find_loss_state(trainer)[0] == [trainer.criterion]
    trainer.train()
    dropped = [event for event in events_of(trainer) if event["signal"] == "loss_nonfinite"]
    assert [(event["step"], event["action"]) for event in dropped] == [(1, "dropped")]
    assert all(map(torch.Tensor.all, (parameter.isfinite() for parameter in trainer.model.parameters())))
