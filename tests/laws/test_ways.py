"""One guard, whichever way a user comes: the same run, the same events, the same cost."""

import json
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from transformers import TrainerCallback, default_data_collator

from hf_nanguard import GuardArguments, attach
from hf_nanguard.testing import INF, NAN, Fault, plant
from tests.reference import assert_same, losses_of, tensors_of, without
from tests.trainers import build, events_of, stock_class

from .ways import WAYS, CountSteps, build_guarded, params

KINDS = ("plain", "sft", "grpo")
LAYER = "model.layers.0.mlp.down_proj.weight"
FAULTS = {
    "a loss": Fault("loss", step=1, micro_step=1),
    "a loss, not its gradients": Fault("constant", step=1, micro_step=1),
    "one gradient": Fault("gradient", step=2, micro_step=0, parameter=LAYER, value=INF),
    "all labels masked": Fault("label", step=1, micro_step=2, value=None),
    "a label out of range": Fault("label", step=2, micro_step=1, value=9999),
}


def _told(trainer):
    """Returns the events of a run without what differs by time and place."""
    events = json.loads(json.dumps(events_of(trainer)))
    for event in events:
        for name in ("run", "time", "bundle"):
            event.pop(name)
        event["values"].get("autopsy", {}).pop("seconds", None)
    return events


@pytest.mark.parametrize(
    ("way", "kind"),
    params(*product(WAYS, ("plain",)), ("callback in the constructor", "grpo"), cases=product(WAYS, KINDS)),
)
def test_a_healthy_run_is_the_stock_run(way, kind, tmp_path):
    stock = build(kind, tmp_path / "stock", guard=False)
    stock.train()
    expected = tensors_of(stock)
    ours = build_guarded(way, kind, tmp_path / "ours")
    output = ours.train()
    assert_same(tensors_of(ours), expected)
    assert losses_of(ours) == losses_of(stock)
    assert ours.nanguard.guard.counter.seen == 12
    assert events_of(ours) == []
    assert output.training_loss == stock.state.log_history[-1]["train_loss"]


@pytest.mark.parametrize(
    ("way", "kind", "fault"),
    params(
        *[("callback in the constructor", "plain", fault) for fault in FAULTS],
        ("callback in the constructor", "grpo", "a loss, not its gradients"),
        *[(way, "plain", "a label out of range") for way in WAYS],
        cases=[
            (way, kind, fault)
            for way, kind, fault in product(WAYS, KINDS, FAULTS)
            if way != "class" and (kind != "grpo" or "label" not in fault)  # completions have no labels
        ],
    ),
)
def test_every_way_contains_and_reports_the_same(way, kind, fault, tmp_path):
    runs = {}
    for name in ("class", way):
        trainer = build_guarded(name, kind, tmp_path / name)
        planted = plant(trainer, FAULTS[fault])
        trainer.train()
        assert len(planted.triggered) == 1
        runs[name] = (tensors_of(trainer), _told(trainer), losses_of(trainer))
    assert_same(runs[way][0], runs["class"][0])
    assert runs[way][1] == runs["class"][1]
    assert runs[way][2] == runs["class"][2]
    assert [event["action"] for event in runs[way][1]] == ["dropped"]
    assert runs[way][1][0]["culprit"]["rows"]


@pytest.mark.parametrize("way", WAYS)
def test_one_bad_micro_batch_costs_that_micro_batch(way, tmp_path):
    reference = build("plain", tmp_path / "reference", without(stock_class("plain"), (1, 1)), guard=False)
    reference.train()
    expected = tensors_of(reference)
    ours = build_guarded(way, "plain", tmp_path / "ours")
    plant(ours, Fault("loss", step=1, micro_step=1, value=NAN))
    ours.train()
    assert_same(tensors_of(ours), expected)


@pytest.mark.parametrize("kind", params("plain", cases=KINDS))
def test_every_way_costs_the_same(kind, tmp_path):
    counts = {}
    for name in ("stock", *WAYS):
        counter = CountSteps()
        settings = {"max_steps": 5, "logging_steps": 100, "extra": {"callbacks": [counter]}}
        guarded = name != "stock"
        trainer = (
            build_guarded(name, kind, tmp_path / name, **settings)
            if guarded
            else build(kind, tmp_path / name, guard=False, **settings)
        )
        trainer.train()
        counts[name] = (counter.count.num_reads, counter.count.num_ops)
    assert len({counts[way] for way in WAYS}) == 1, counts
    assert counts["class"][0] <= counts["stock"][0]


@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_step_never_calls_the_optimizer(way, tmp_path):
    """An optimizer may count its calls, or know parameters that the model does not have."""
    calls = []

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            calls.append(1)
            return super().step(closure)

    def make(model_folder):
        trainer = build_guarded(way, "plain", model_folder, GuardArguments(nanguard_on_nonfinite="skip"))
        trainer.optimizer = Counting(trainer.model.parameters(), lr=0.1)
        return trainer

    trainer = make(tmp_path)
    plant(trainer, Fault("loss", step=1, micro_step=0))
    trainer.train()
    assert len(calls) == 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["epoch", "end"])
def test_nothing_stays_after_an_error(way, place, tmp_path):
    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if place == "epoch" and state.global_step == 2:
                raise ZeroDivisionError

        def on_train_end(self, args, state, control, **kwargs):
            if place == "end":
                raise ZeroDivisionError

    guard = GuardArguments(nanguard_activation_steps=1)
    trainer = build_guarded(way, "plain", tmp_path, guard, {"callbacks": [Failing()]})
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not any(module._forward_hooks for module in trainer.model.modules())
    assert not trainer.nanguard.watches
    assert trainer.nanguard.guard.group.micro_batches == []
    assert trainer.args.logging_nan_inf_filter
    assert trainer.data_collator.__module__.startswith("transformers.")


@pytest.mark.parametrize("way", WAYS)
def test_counts_and_statistics_survive_a_resume(way, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    first = build_guarded(way, "plain", tmp_path, **settings)
    plant(first, Fault("loss", step=1, micro_step=0))
    first.train()
    second = build_guarded(way, "plain", tmp_path, **{**settings, "max_steps": 4})
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert second.nanguard.guard.counter.seen == 12
    assert second.nanguard.guard.counter.dropped == 1


class Wrapped:
    """A dataloader of the user's own making, as an object that is no DataLoader."""

    def __init__(self, loader):
        self.loader, self.dataset = loader, loader.dataset

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        return iter(self.loader)


@pytest.mark.parametrize("make", [list, Wrapped, lambda loader: loader], ids=["list", "wrapper", "loader"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "callback added later"])
def test_labels_are_checked_whatever_dataloader_a_trainer_builds(way, make, tmp_path):
    class Own(stock_class("plain")):
        def get_train_dataloader(self):
            return make(super().get_train_dataloader())

    trainer = build_guarded(way, "plain", tmp_path, trainer_class=Own)
    plant(trainer, Fault("label", step=1, micro_step=1, value=9999))
    trainer.train()
    [event] = events_of(trainer)
    assert (event["signal"], event["action"]) == ("label_out_of_range", "dropped")


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_right_while_a_callback_reads_the_dataloader(way, tmp_path):
    class Peeking(TrainerCallback):
        def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
            next(iter(train_dataloader))

    rows = []
    for name, callbacks in (("quiet", []), ("peeking", [Peeking()])):
        trainer = build_guarded(way, "plain", tmp_path / name, extra={"callbacks": callbacks}, dropout=0.0)
        planted = plant(trainer, Fault("loss", step=2, micro_step=1))
        trainer.train()
        assert len(planted.triggered) == 1
        rows.append(events_of(trainer)[0]["culprit"]["rows"])
    assert rows[0] == rows[1] is not None


@pytest.mark.parametrize("way", WAYS)
def test_a_collator_that_a_callback_steers_is_steered(way, tmp_path):
    class Collator:
        scale = 1

        def __call__(self, examples):
            seen.append(self.scale)
            return default_data_collator(examples)

    class Steering(TrainerCallback):
        def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
            train_dataloader.collate_fn.scale = 2

        def on_step_begin(self, args, state, control, train_dataloader=None, **kwargs):
            assert train_dataloader.collate_fn.scale == state.global_step + 2
            train_dataloader.collate_fn.scale = state.global_step + 3

    seen = []
    extra = {"callbacks": [Steering()], "data_collator": Collator()}
    trainer = build_guarded(
        way, "plain", tmp_path, extra=extra, remove_unused_columns=False, gradient_accumulation_steps=1
    )
    trainer.train()
    assert seen[0] == 2
    assert max(seen) > 3


@pytest.mark.parametrize("way", WAYS)
def test_a_run_after_one_that_failed_between_epochs_is_guarded(way, tmp_path):
    class FailsOnce(TrainerCallback):
        has_failed = False

        def on_epoch_begin(self, args, state, control, **kwargs):
            if not self.has_failed:
                self.has_failed = True
                raise ZeroDivisionError

    trainer = build_guarded(way, "plain", tmp_path, extra={"callbacks": [FailsOnce()]})
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    plant(trainer, Fault("loss", step=1, micro_step=1))
    trainer.train()
    assert [event["action"] for event in events_of(trainer)] == ["dropped"]
    assert not trainer.nanguard.watches


@pytest.mark.parametrize("way", params("callback in the constructor"))
def test_everything_is_written_where_the_run_writes(way, tmp_path):
    """A constructor may set the output directory after that of the Trainer, and a script between two runs."""

    class Moved(stock_class("plain")):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.args.output_dir = str(tmp_path / "new")

    trainer = build_guarded(way, "plain", tmp_path / "old", trainer_class=Moved, max_steps=2)
    plant(trainer, Fault("loss", step=1, micro_step=1))
    for folder in ("new", "newer"):
        trainer.args.output_dir = str(tmp_path / folder)
        trainer.train()
        [event] = events_of(trainer)
        assert (tmp_path / folder / "nanguard" / "metrics.jsonl").is_file()
        assert (tmp_path / folder / "nanguard" / event["bundle"]).is_dir()
        plant(trainer, Fault("loss", step=1, micro_step=1))
    assert not (tmp_path / "old" / "nanguard").exists()


@pytest.mark.parametrize("way", params("attach"))
def test_settings_replaced_between_two_runs_are_those_of_the_second(way, tmp_path):
    """Also if somebody has put a `training_step` on the trainer itself, which the guard wraps during a run."""
    trainer = build_guarded(way, "plain", tmp_path, max_steps=2)
    trainer.training_step = trainer.training_step
    trainer.train()
    first = trainer.nanguard
    seen = first.guard.counter.seen
    attach(trainer, GuardArguments(nanguard_on_nonfinite="skip"))
    plant(trainer, Fault("loss", step=1, micro_step=1))
    trainer.train()
    assert trainer.nanguard is not first
    assert first.guard.counter.seen == seen
    assert [event["action"] for event in events_of(trainer)] == ["skipped"]
    assert trainer.nanguard.guard.counter.seen == 6


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("way", params("callback added later"))
def test_settings_replaced_during_a_run_guard_the_rest_of_it(way, fails, tmp_path):
    class Replacing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                attach(trainer, GuardArguments(nanguard_on_nonfinite="skip"))
            if state.global_step == 3 and fails:
                raise ZeroDivisionError

    trainer = build_guarded(way, "plain", tmp_path, extra={"callbacks": [Replacing()]})
    plant(trainer, Fault("loss", step=2, micro_step=1))
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        trainer.train()
    assert [(event["action"], event["step"]) for event in events_of(trainer)] == [("skipped", 2)]
    assert not trainer.nanguard.watches
