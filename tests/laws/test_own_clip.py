"""However gradients are clipped, a guarded run is the stock run: no clip of the user's is passed by."""

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerCallback

from hf_nanguard.testing import Fault, plant
from tests.reference import assert_same, losses_of, tensors_of, without
from tests.trainers import build, events_of, stock_class

calls = []


class OwnAccelerator(Accelerator):
    """Clips to half of what it is asked for."""

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        calls.append("accelerator")
        return super().clip_grad_norm_(parameters, max_norm / 2, norm_type)


def use_own_accelerator(trainer, monkeypatch):
    trainer.accelerator.__class__ = OwnAccelerator


def use_patched_function(trainer, monkeypatch):
    clip = torch.nn.utils.clip_grad_norm_

    def patched(parameters, max_norm, *args, **kwargs):
        calls.append("function")
        return clip(parameters, max_norm / 2, *args, **kwargs)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", patched)


def use_patched_method(trainer, monkeypatch):
    clip = Accelerator.clip_grad_norm_

    def patched(self, parameters, max_norm, norm_type=2):
        calls.append("method")
        return clip(self, parameters, max_norm / 2, norm_type)

    monkeypatch.setattr(Accelerator, "clip_grad_norm_", patched)


def freeze_with_gradients(trainer, monkeypatch):
    """Freezes an embedding after its gradient has arrived: the host's norm counts it."""
    step = trainer.training_step

    def training_step(model, *args, **kwargs):
        calls.append("freeze")
        weight = model.model.embed_tokens.weight
        weight.requires_grad_(True)
        loss = step(model, *args, **kwargs)
        weight.requires_grad_(False)
        return loss

    trainer.training_step = training_step


SETUPS = [use_own_accelerator, use_patched_function, use_patched_method, freeze_with_gradients]


@pytest.mark.parametrize("setup", SETUPS)
def test_a_healthy_run_is_clipped_as_stock_clips_it(setup, tmp_path, monkeypatch):
    runs = []
    for name in ("stock", "ours"):
        with monkeypatch.context() as patch:
            trainer = build("plain", tmp_path / name, guard=name == "ours", max_grad_norm=0.1)
            setup(trainer, patch)
            calls.clear()
            trainer.train()
            assert calls
            runs.append(
                (tensors_of(trainer), losses_of(trainer), [row.get("grad_norm") for row in trainer.state.log_history])
            )
    assert_same(runs[1][0], runs[0][0])
    assert runs[1][1:] == runs[0][1:]
    assert events_of(trainer) == []


@pytest.mark.parametrize("setup", SETUPS[:3])
def test_what_is_left_of_a_bad_step_is_clipped_as_stock_clips_it(setup, tmp_path, monkeypatch):
    fault = Fault("loss", step=1, micro_step=1)
    with monkeypatch.context() as patch:
        reference = build(
            "plain", tmp_path / "reference", without(stock_class("plain"), (1, 1)), guard=False, max_grad_norm=0.1
        )
        setup(reference, patch)
        reference.train()
        expected = tensors_of(reference)
    with monkeypatch.context() as patch:
        trainer = build("plain", tmp_path / "ours", max_grad_norm=0.1)
        setup(trainer, patch)
        plant(trainer, fault)
        trainer.train()
    assert_same(tensors_of(trainer), expected)
    assert [event["action"] for event in events_of(trainer)] == ["dropped"]


def test_a_callback_that_changes_gradients_before_the_optimizer_is_left_alone(tmp_path):
    class Halve(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    runs = []
    for name in ("stock", "ours"):
        trainer = build("plain", tmp_path / name, guard=name == "ours", extra={"callbacks": [Halve()]})
        trainer.train()
        runs.append(tensors_of(trainer))
    assert_same(runs[1], runs[0])
