"""The guard as a callback: one guard per trainer, and the reduced way for a trainer with a loop of its own.

That it guards as the other ways do is proved for all of them together, in tests/laws/test_ways.py.
"""

import copy
import logging
import pickle

import pytest
import torch
from transformers import Trainer

from hf_nanguard import GuardArguments, NanGuardCallback, attach
from hf_nanguard.hf.trainer.mixin import GuardedTrainerMixin
from hf_nanguard.takeover.takeover import Takeover
from hf_nanguard.testing import Fault, plant
from tests.reference import assert_same, tensors_of
from tests.trainers import build, events_of

SKIP, FLOOR = GuardArguments(nanguard_on_nonfinite="skip"), GuardArguments(nanguard_on_nonfinite="floor")


def _build(tmp_path, *callbacks, **settings):
    return build("plain", tmp_path, guard=False, extra={"callbacks": list(callbacks)}, **settings)


def test_it_attaches_when_the_trainer_is_built(tmp_path):
    trainer = _build(tmp_path, NanGuardCallback(SKIP))
    assert isinstance(trainer, GuardedTrainerMixin)
    assert type(trainer).__name__ == "Trainer"
    assert trainer.nanguard.arguments is SKIP


def test_a_class_given_in_the_list_will_do(tmp_path):
    assert isinstance(_build(tmp_path, NanGuardCallback), GuardedTrainerMixin)


def test_added_later_it_attaches_when_training_begins(tmp_path):
    trainer = _build(tmp_path)
    trainer.add_callback(NanGuardCallback(SKIP))
    assert not isinstance(trainer, GuardedTrainerMixin)
    trainer.train()
    assert trainer.nanguard.arguments is SKIP
    assert trainer.nanguard.guard.counter.seen == 12


def test_one_callback_in_two_trainers(tmp_path):
    callback = NanGuardCallback()
    first, second = (_build(tmp_path / name, callback) for name in "ab")
    for trainer in (first, second):
        plant(trainer, Fault("loss", step=1, micro_step=1))
        trainer.train()
    assert [len(events_of(trainer)) for trainer in (first, second)] == [1, 1]
    assert first.nanguard is not second.nanguard


def test_a_second_run_is_guarded_too(tmp_path):
    trainer = _build(tmp_path)
    trainer.add_callback(NanGuardCallback())
    trainer.train()
    plant(trainer, Fault("loss", step=1, micro_step=1))
    trainer.train()
    assert [event["action"] for event in events_of(trainer)] == ["dropped"]


@pytest.mark.parametrize("make", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
def test_a_copy_guards_another_trainer(make, tmp_path):
    callback = NanGuardCallback(SKIP)
    _build(tmp_path / "a", callback)
    other = _build(tmp_path / "b", make(callback))
    assert other.nanguard.policy.on_nonfinite == "skip"


# ---- one guard ----


def test_two_callbacks_are_one_guard(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        trainer = _build(tmp_path, NanGuardCallback(SKIP), NanGuardCallback(FLOOR))
    assert [record.message for record in caplog.records if "guarded already" in record.message]
    assert trainer.nanguard.arguments is FLOOR
    plant(trainer, Fault("loss", step=1, micro_step=1))
    trainer.train()
    assert trainer.nanguard.guard.counter.dropped == 1
    assert len(events_of(trainer)) == 1


def test_settings_of_attach_replace_those_of_the_callback(tmp_path, caplog):
    trainer = _build(tmp_path, NanGuardCallback(SKIP))
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        attach(trainer, FLOOR)
    assert "guarded already" in caplog.text
    trainer.train()
    assert trainer.nanguard.arguments is FLOOR


def test_a_callback_without_settings_leaves_the_guard_as_it_is(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        trainer = build("plain", tmp_path, extra={"guard": SKIP, "callbacks": [NanGuardCallback()]})
        guard = trainer.nanguard
        trainer.train()
    assert trainer.nanguard is guard
    assert trainer.nanguard.arguments is SKIP
    assert caplog.text == ""


def test_settings_of_a_callback_win_over_those_of_the_class(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        trainer = build("plain", tmp_path, extra={"guard": SKIP, "callbacks": [NanGuardCallback(FLOOR)]})
        trainer.train()
    assert trainer.nanguard.arguments is FLOOR
    assert caplog.text.count("guarded already") == 1


def test_settings_of_nanguard_run_win_over_those_of_the_callback(tmp_path):
    said = []
    with Takeover({"nanguard_on_nonfinite": "halt"}, said.append):
        trainer = _build(tmp_path, NanGuardCallback(GuardArguments(nanguard_max_bad_steps=3)))
    trainer.train()
    assert trainer.nanguard.policy.on_nonfinite == "halt"
    assert trainer.nanguard.policy.max_bad_steps == 3
    assert "was already guarded" in said[0]


# ---- a loop of its own ----


class OwnLoop(Trainer):
    """A trainer that does not use the training loop of transformers, but calls its callbacks."""

    def train(self):
        self.create_optimizer_and_scheduler(4)
        model, optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self.callback_handler.model, self.callback_handler.optimizer = model, optimizer
        self.optimizer = optimizer
        self.callback_handler.on_train_begin(self.args, self.state, self.control)
        for batch in list(self.get_train_dataloader())[:4]:
            self.callback_handler.on_step_begin(self.args, self.state, self.control)
            loss = self.compute_loss(model, batch)
            self.accelerator.backward(loss * (torch.nan if self.state.global_step == 2 else 1.0))
            self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
            optimizer.step()
            optimizer.zero_grad()
            self.state.global_step += 1
            self.callback_handler.on_step_end(self.args, self.state, self.control)
        self.callback_handler.on_train_end(self.args, self.state, self.control)


@pytest.mark.parametrize("later", [False, True])
def test_a_loop_of_its_own_is_guarded_in_a_reduced_way(later, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        trainer = build(
            "plain", tmp_path, OwnLoop, guard=False, extra={"callbacks": [] if later else [NanGuardCallback()]}
        )
        if later:
            trainer.add_callback(NanGuardCallback())
        trainer.train()
    assert not isinstance(trainer, GuardedTrainerMixin)
    assert caplog.text.count("guarded in a reduced way because its train runs a training loop of its own") == 1
    assert caplog.text.count("events of this run") == 1
    [event] = events_of(trainer)
    assert (event["signal"], event["action"], event["step"]) == ("grad_nonfinite", "skipped", 2)
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    assert {float(state["step"]) for state in trainer.optimizer.state.values()} == {3.0}
    assert not any(module._forward_hooks for module in trainer.model.modules())


def test_a_reduced_guard_that_observes_changes_nothing(tmp_path):
    runs = []
    for callbacks in ([], [NanGuardCallback(GuardArguments(nanguard_mode="observe"))]):
        trainer = build("plain", tmp_path / str(len(callbacks)), OwnLoop, guard=False, extra={"callbacks": callbacks})
        trainer.train()
        runs.append(tensors_of(trainer))
    assert_same(
        {name: value.nan_to_num() for name, value in runs[1].items()},
        {name: value.nan_to_num() for name, value in runs[0].items()},
    )
    assert [(event["action"], event["step"]) for event in events_of(trainer)] == [("observed", 2), ("observed", 3)]


def test_a_class_that_cannot_be_changed_is_guarded_in_a_reduced_way(tmp_path, caplog):
    class Registry(type(Trainer)):
        def __new__(cls, name, bases, body):
            if body.get("nanguard_made_here"):
                raise TypeError("only one class of a name")
            return super().__new__(cls, name, bases, body)

    class Registered(Trainer, metaclass=Registry):
        pass

    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        trainer = build("plain", tmp_path, Registered, guard=False, extra={"callbacks": [NanGuardCallback()]})
        plant(trainer, Fault("gradient", step=1, micro_step=2))
        trainer.train()
    assert "because its class cannot be changed (TypeError: only one class of a name)" in caplog.text
    assert [event["action"] for event in events_of(trainer)] == ["skipped"]
