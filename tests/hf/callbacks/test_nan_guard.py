"""The guard as a callback: one guard per trainer, and the reduced way for a trainer with a loop of its own.

That it guards as the other ways do is proved for all of them together, in tests/laws/test_ways.py.
"""

import copy
import logging
import pickle
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from hf_nanguard import GuardArguments, NanGuardCallback, NonFiniteError, attach
from hf_nanguard.hf.trainer.mixin import GuardedTrainerMixin
from hf_nanguard.report.run_files import events_path, read_jsonl
from hf_nanguard.takeover.built_trainers import Takeover
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
    assert caplog.text.count("guarded already; its settings stay as they are") == len(caplog.records) == 1


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


def _ask_twice(first, second, folder):
    """Guards a trainer by two requests, the second without settings."""
    callbacks = [NanGuardCallback(SKIP)] * (first == "callback") + [NanGuardCallback()] * (second == "callback")
    if first == "class":
        trainer = build("plain", folder, extra={"guard": SKIP, "callbacks": callbacks}, max_steps=1)
    else:
        trainer = _build(folder, *callbacks, max_steps=1)
    if first == "attach":
        attach(trainer, SKIP)
    if second == "attach":
        attach(trainer)
    if second == "later":
        trainer.add_callback(NanGuardCallback())
    return trainer


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("class", "attach"), ("class", "callback"), ("class", "later"), ("attach", "attach"), ("attach", "later"),
        ("callback", "attach"), ("callback", "callback"), ("callback", "later"),
    ],
)  # fmt: skip
def test_a_second_request_says_so_once_and_leaves_the_guard(first, second, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        trainer = _ask_twice(first, second, tmp_path)
        trainer.train()
        trainer.train()
    assert trainer.nanguard.arguments is SKIP
    said = [record.message for record in caplog.records if record.name == "hf_nanguard"]
    assert said == ["hf_nanguard: this trainer is guarded already; its settings stay as they are."]


@pytest.mark.parametrize("later", [False, True])
def test_nanguard_run_says_in_one_sentence_that_a_callback_guards_already(later, tmp_path, caplog):
    said = []
    with caplog.at_level(logging.WARNING, "hf_nanguard"), Takeover({"nanguard_max_bad_steps": 3}, said.append):
        trainer = _build(tmp_path, *([] if later else [NanGuardCallback(SKIP)]), max_steps=1)
        if later:
            trainer.add_callback(NanGuardCallback())
        trainer.train()
    assert trainer.nanguard.policy.max_bad_steps == 3
    assert [("was already guarded" in said[0]), "guarded already" in caplog.text] == [not later, later]


@pytest.mark.parametrize("later", [False, True])
def test_without_its_callback_a_trainer_is_a_stock_one_again(later, tmp_path, caplog):
    trainer = _build(tmp_path, *([] if later else [NanGuardCallback(SKIP)]))
    if later:
        trainer.add_callback(NanGuardCallback(SKIP))
        trainer.train()
    trainer.remove_callback(NanGuardCallback)
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        plant(trainer, Fault("loss", step=1, micro_step=1))
        trainer.train()
    assert [record.message for record in caplog.records] == [
        "hf_nanguard: this run is not guarded because its NanGuardCallback was removed."
    ]
    assert type(trainer) is Trainer
    assert not {"nanguard", "given_guard", "asked_by", "needs_callback"} & vars(trainer).keys()
    assert events_of(trainer) == []
    trainer.add_callback(NanGuardCallback(SKIP))
    with pytest.raises(NonFiniteError, match="before the first step"):  # the stock run has made the weights NaN
        trainer.train()
    assert trainer.nanguard.arguments is SKIP


def test_a_guard_that_was_asked_for_twice_stays_without_the_callback(tmp_path):
    trainer = attach(_build(tmp_path, NanGuardCallback()))
    trainer.remove_callback(NanGuardCallback)
    trainer.train()
    assert trainer.nanguard.guard.counter.seen == 12


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


def test_a_copy_of_a_trainer_with_a_loop_of_its_own_has_one_guard(tmp_path):
    trainer = build("plain", tmp_path, OwnLoop, guard=False, extra={"callbacks": [NanGuardCallback()]})
    trainer.train()
    other = copy.deepcopy(trainer)
    other.state.global_step = 0
    other.train()
    assert [event["action"] for event in events_of(other)] == ["skipped"] * 2
    assert len([c for c in other.callback_handler.callbacks if "nanguard" in type(c).__module__]) == 1


class Loop:
    """A training loop without a Trainer, which calls callbacks."""

    def __init__(self, tmp_path, callback, wrong=None, plain=True):
        torch.manual_seed(0)
        self.model, self.wrong = torch.nn.Linear(3, 1), wrong
        self.args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if not plain:
            self.optimizer = Accelerator(cpu=True).prepare(self.optimizer)
        self.state, self.control = TrainerState(), TrainerControl()
        model = None if wrong == "no model" else self.model
        self.handler = CallbackHandler([callback], model, None, self.optimizer, None)

    def call(self, event):
        if self.wrong != event:
            getattr(self.handler, event)(self.args, self.state, self.control)

    def run(self):
        self.call("on_train_begin")
        for step in range(4):
            self.call("on_step_begin")
            loss = self.model(torch.ones(2, 3)).sum() * (torch.nan if step == 2 else 1.0)
            loss.backward()
            if self.wrong == "too early":
                self.optimizer.step()
            self.call("on_pre_optimizer_step")
            if self.wrong != "too early":
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.state.global_step += 1
            self.call("on_step_end")
        self.call("on_train_end")
        return (
            list(read_jsonl(path)) if (path := events_path(Path(self.args.output_dir) / "nanguard", 0)).exists() else []
        )


@pytest.mark.parametrize("plain", [True, False])
def test_a_loop_without_a_trainer_is_guarded_in_a_reduced_way_and_told_so(plain, tmp_path, caplog):
    loop = Loop(tmp_path, NanGuardCallback(), plain=plain)
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        events = loop.run()
        loop.state.global_step = 0
        loop.run()
    assert caplog.text.count("the model is guarded in a reduced way because the loop that calls") == 1
    assert [(event["action"], event["step"]) for event in events] == [("skipped", 2)]
    assert all(torch.isfinite(parameter).all() for parameter in loop.model.parameters())
    assert loop.model._forward_hooks == {}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("no model", "nothing is guarded because the training loop passes no model"),
        ("on_step_begin", "No gradient was checked, so nothing is guarded"),
        ("on_pre_optimizer_step", "No gradient was checked, so nothing is guarded"),
        ("too early", "The step was not skipped, and weights are not finite"),
        ("on_step_end", None),
    ],
)
def test_a_reduced_guard_claims_nothing_it_cannot_do(wrong, sentence, tmp_path, caplog):
    loop = Loop(tmp_path, NanGuardCallback(), wrong)
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        events = loop.run()
    finite = all(torch.isfinite(parameter).all() for parameter in loop.model.parameters())
    assert finite == (sentence is None)
    assert sentence is None or caplog.text.count(sentence) == 1
    if wrong not in ("no model", "on_step_end"):
        assert [event["message"][:20] for event in events if event["signal"] == "guard_failed"] == [sentence[:20]]


def test_an_error_between_two_steps_leaves_no_hook(tmp_path):
    class Failing(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise ZeroDivisionError

    trainer = build("plain", tmp_path, OwnLoop, guard=False, extra={"callbacks": [NanGuardCallback(), Failing()]})
    with pytest.raises(ZeroDivisionError):
        trainer.train()
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
