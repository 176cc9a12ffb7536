"""Guarded trainers are drop-in: same constructor, same checkpoints, any trainer class, one line to attach."""

import inspect
import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hf_nanguard
from hf_nanguard import (
    ArgumentError,
    GuardArguments,
    GuardedSFTConfig,
    GuardedSFTTrainer,
    GuardedTrainer,
    GuardedTrainerMixin,
    GuardedTrainingArguments,
    NonFiniteError,
    attach,
    guarded,
)
from hf_nanguard.testing import Fault, plant

from ..models import text_rows, tiny_llama, tiny_t5, tiny_tokenizer, token_dataset
from ..reference import assert_same, tensors_of, without
from ..trainers import KINDS, build, common_arguments, events_of, metric_rows_of, reward_length, stock_class


@pytest.mark.parametrize(
    ("kind", "name"), [("plain", "GuardedTrainer"), ("sft", "GuardedSFTTrainer"), ("grpo", "GuardedGRPOTrainer")]
)
def test_guarded_classes_accept_all_that_the_host_accepts(kind, name):
    ours = getattr(hf_nanguard, name)
    assert issubclass(ours, stock_class(kind))
    assert issubclass(ours, GuardedTrainerMixin)
    assert list(inspect.signature(GuardedTrainerMixin.__init__).parameters) == ["self", "args", "guard", "kwargs"]


@pytest.mark.parametrize("kind", KINDS)
def test_attach_makes_a_stock_trainer_survive(kind, tmp_path):
    reference = build(kind, tmp_path / "reference", without(stock_class(kind), (1, 1)), guard=False)
    reference.train()
    expected = tensors_of(reference)
    trainer = build(kind, tmp_path / "attached", guard=False)
    name = type(trainer).__name__
    assert attach(trainer) is trainer
    assert type(trainer).__name__ == name
    assert isinstance(trainer, stock_class(kind))
    plant(trainer, Fault("loss", 1, 1))
    trainer.train()
    assert_same(tensors_of(trainer), expected)
    assert [event["action"] for event in events_of(trainer)] == ["dropped"]


def test_attach_takes_settings_and_can_be_repeated(tmp_path):
    trainer = build("plain", tmp_path, guard=False)
    attach(trainer, GuardArguments(nanguard_mode="observe"))
    first = type(trainer)
    attach(trainer)
    assert type(trainer) is first
    assert trainer.nanguard.policy.mode == "observe"


def test_attach_and_guarded_refuse_what_is_not_a_trainer():
    with pytest.raises(ArgumentError, match=r"attach\(\) must be given a Trainer, got int"):
        attach(3)
    with pytest.raises(ArgumentError, match=r"guarded\(\) must be given a Trainer class"):
        guarded(dict)


def test_a_class_whose_super_never_ends_in_a_subclass_is_refused(tmp_path):
    class OwnSuper(Trainer):
        def log(self, *args, **kwargs):
            return super(type(self), self).log(*args, **kwargs)

    trainer = build("plain", tmp_path, OwnSuper, guard=False, max_steps=1)
    for guard in (lambda: guarded(OwnSuper), lambda: attach(trainer)):
        with pytest.raises(ArgumentError, match=r"its log calls super\(type\(self\), self\).*Write super\(\) there"):
            guard()
    trainer.train()
    assert trainer.state.global_step == 1


def test_guarded_is_made_once():
    assert guarded(Trainer) is guarded(Trainer)
    assert guarded(GuardedTrainer) is GuardedTrainer


def _seq2seq(tmp_path, cls):
    args = Seq2SeqTrainingArguments(**common_arguments(tmp_path))
    return cls(tiny_t5(), args, train_dataset=token_dataset(24))


def _reward(tmp_path, cls):
    import trl
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(0)
    config = tiny_llama().config
    config.num_labels = 1
    rows = text_rows(48)
    data = [{"chosen": rows[i]["text"], "rejected": rows[i + 24]["text"]} for i in range(24)]
    args = trl.RewardConfig(**common_arguments(tmp_path, max_length=16))
    return cls(
        LlamaForSequenceClassification(config),
        args=args,
        train_dataset=Dataset.from_list(data),
        processing_class=tiny_tokenizer(),
    )


def _kto(tmp_path, cls):
    import trl

    rows = text_rows(24)
    data = [{"prompt": "w1 w2", "completion": " " + row["text"], "label": i % 2 == 0} for i, row in enumerate(rows)]
    args = trl.KTOConfig(**common_arguments(tmp_path, max_length=24, per_device_train_batch_size=4))
    return cls(
        tiny_llama(),
        ref_model=tiny_llama(),
        args=args,
        train_dataset=Dataset.from_list(data),
        processing_class=tiny_tokenizer(),
    )


def _rloo(tmp_path, cls):
    import trl

    data = Dataset.from_list([{"prompt": row["text"]} for row in text_rows(24)])
    args = trl.RLOOConfig(**common_arguments(tmp_path, num_generations=2, max_completion_length=4, beta=0.0))
    return cls(
        tiny_llama(), reward_funcs=reward_length, args=args, train_dataset=data, processing_class=tiny_tokenizer()
    )


def _distillation(tmp_path, cls):
    import trl

    data = Dataset.from_list([{"prompt": row["text"]} for row in text_rows(48)])
    args = trl.DistillationConfig(**common_arguments(tmp_path, max_completion_length=4))
    return cls(
        tiny_llama(), teacher_model=tiny_llama(seed=1), args=args, train_dataset=data, processing_class=tiny_tokenizer(),
    )  # fmt: skip


OTHERS = {
    "seq2seq": (_seq2seq, lambda trl: Seq2SeqTrainer),
    "reward": (_reward, lambda trl: trl.RewardTrainer),
    "kto": (_kto, lambda trl: trl.KTOTrainer),
    "rloo": (_rloo, lambda trl: trl.RLOOTrainer),
    "distillation": (_distillation, lambda trl: trl.DistillationTrainer),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("kto", "rloo") else ()) for name in OTHERS]
)
def test_guarded_works_for_the_rest_of_the_family(name, tmp_path):
    import trl

    make, find = OTHERS[name]
    stock = find(trl)
    healthy = make(tmp_path / "stock", stock)
    healthy.train()
    ours = make(tmp_path / "healthy", guarded(stock))
    ours.train()
    assert_same(tensors_of(ours), tensors_of(healthy), rng=False)
    assert events_of(ours) == []
    reference = make(tmp_path / "reference", without(stock, (1, 1)))
    reference.train()
    expected = tensors_of(reference)
    hurt = make(tmp_path / "hurt", guarded(stock))
    plant(hurt, Fault("loss", 1, 1))
    hurt.train()
    assert_same(tensors_of(hurt), expected)
    [event] = events_of(hurt)
    assert (event["signal"], event["action"], event["micro_step"]) == ("loss_nonfinite", "dropped", 1)


def test_configs_reach_the_guard(tmp_path):
    args = GuardedTrainingArguments(**common_arguments(tmp_path), nanguard_on_nonfinite="skip")
    trainer = GuardedTrainer(tiny_llama(), args, train_dataset=token_dataset(4))
    assert trainer.nanguard.policy.on_nonfinite == "skip"
    sft = GuardedSFTConfig(**common_arguments(tmp_path), nanguard_max_bad_steps=3)
    data = Dataset.from_list(text_rows(8))
    trainer = GuardedSFTTrainer(tiny_llama(), args=sft, train_dataset=data, processing_class=tiny_tokenizer())
    assert trainer.nanguard.policy.max_bad_steps == 3


def test_configs_reach_the_guard_of_grpo(tmp_path):
    grpo = hf_nanguard.GuardedGRPOConfig(
        **common_arguments(tmp_path, num_generations=2, max_completion_length=4), nanguard_mode="observe"
    )
    trainer = hf_nanguard.GuardedGRPOTrainer(
        tiny_llama(), reward_funcs=reward_length, args=grpo, processing_class=tiny_tokenizer(),
        train_dataset=Dataset.from_list([{"prompt": row["text"]} for row in text_rows(8)]),
    )  # fmt: skip
    assert trainer.nanguard.policy.mode == "observe"


def _checkpointed(tmp_path, guard, **overrides):
    return build("plain", tmp_path, guard=guard, save_strategy="steps", save_steps=2, max_steps=6, **overrides)


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_checkpoints_go_both_ways_and_resume_is_exact(first, second, tmp_path):
    whole = _checkpointed(tmp_path / "whole", False)
    whole.train()
    expected = tensors_of(whole)
    begun = _checkpointed(tmp_path / "begun", first)
    begun.train()
    resumed = _checkpointed(tmp_path / "resumed", second)
    resumed.train(resume_from_checkpoint=str(tmp_path / "begun" / "checkpoint-2"))
    assert_same(tensors_of(resumed), expected)


def test_stock_files_of_a_checkpoint_are_the_same(tmp_path):
    stock, ours = _checkpointed(tmp_path / "stock", False), _checkpointed(tmp_path / "ours", True)
    stock.train()
    ours.train()
    theirs = {path.name for path in (tmp_path / "stock" / "checkpoint-4").iterdir()}
    mine = {path.name for path in (tmp_path / "ours" / "checkpoint-4").iterdir()}
    assert mine - theirs == {"nanguard_state.json"}
    assert theirs - mine == set()


def test_guard_state_survives_a_resume(tmp_path):
    begun = _checkpointed(tmp_path / "begun", True)
    plant(begun, Fault("loss", 1, 1))
    begun.train()
    state = json.loads((tmp_path / "begun" / "checkpoint-4" / "nanguard_state.json").read_text())
    assert state["counter"]["dropped"] == 1
    resumed = _checkpointed(tmp_path / "resumed", True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "begun" / "checkpoint-4"))
    rows = metric_rows_of(resumed)
    assert rows[-1]["nanguard/dropped_microbatches"] == 1
    assert rows[-1]["nanguard/success_rate"] == pytest.approx(17 / 18)
    assert len(resumed.nanguard.guard.norms.values) == len(begun.nanguard.guard.norms.values)


def test_resumed_rows_are_right(tmp_path):
    begun = _checkpointed(tmp_path / "begun", True, train_sampling_strategy="sequential")
    begun.train()
    resumed = _checkpointed(tmp_path / "resumed", True, train_sampling_strategy="sequential")
    plant(resumed, Fault("loss", 3, 2))
    resumed.train(resume_from_checkpoint=str(tmp_path / "begun" / "checkpoint-2"))
    [event] = events_of(resumed)
    assert event["culprit"]["rows"] == [22, 23]


def test_a_subclass_that_overrides_everything_is_still_guarded(tmp_path):
    class Mine(GuardedTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = outputs.logits.float().square().mean() * 0.01 + outputs.loss
            return (loss, outputs) if return_outputs else loss

        def training_step(self, model, inputs, num_items_in_batch=None):
            return super().training_step(model, inputs, num_items_in_batch)

    args = TrainingArguments(**common_arguments(tmp_path))
    trainer = Mine(tiny_llama(), args, train_dataset=token_dataset(48))
    plant(trainer, Fault("gradient", 1, 2, parameter="model.norm.weight"), Fault("loss", 2, 0))
    trainer.train()
    found = [(e["signal"], e["action"], e["step"], e["micro_step"]) for e in events_of(trainer)]
    assert found == [("grad_nonfinite", "dropped", 1, 2), ("loss_nonfinite", "dropped", 2, 0)]
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


def test_a_loss_that_changes_its_inputs_in_place_is_skipped_whole(tmp_path):
    class Careless(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            inputs["labels"][:, 0] += 1
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = build("plain", tmp_path, Careless)
    plant(trainer, Fault("loss", 1, 1))
    trainer.train()
    [event] = events_of(trainer)
    assert event["action"] == "skipped"
    assert "changed its inputs in place" in event["message"]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_by_hand_is_that_of_the_host(kind, trained, tmp_path):
    losses = {}
    for guard in (False, True):
        trainer = build(kind, tmp_path / str(guard), guard=guard, gradient_accumulation_steps=1, max_steps=2)
        if trained:
            trainer.train()
        trainer.current_gradient_accumulation_steps = 1
        torch.manual_seed(3)
        losses[guard] = trainer.training_step(trainer.model, next(iter(trainer.get_train_dataloader())), None)
        assert any(parameter.grad is not None for parameter in trainer.model.parameters())
    assert torch.equal(losses[True], losses[False])


def test_steps_run_by_hand_are_the_hosts_own(tmp_path):
    """Outside of `train()` there is no group to decide on, and nothing is held."""
    losses, norms = {}, {}
    for guard in (False, True):
        trainer = build("plain", tmp_path / str(guard), guard=guard, dropout=0.0)
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.current_gradient_accumulation_steps = 1
        for _ in range(2):  # before a run, and after one
            loss = trainer.training_step(trainer.model, dict(batch), 1)
            norm = trainer._clip_grad_norm(trainer.model)
            losses.setdefault(guard, []).append(loss)
            norms.setdefault(guard, []).extend([norm, trainer._get_grad_norm(trainer.model)])
            trainer.model.zero_grad()
            trainer.train()
    assert all(map(torch.equal, losses[True], losses[False]))
    assert norms[True] == norms[False]
    assert trainer.nanguard.guard.group.micro_batches == []


def test_a_constructor_may_use_the_trainer_it_makes(tmp_path):
    class Eager(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.num_batches = len(self.get_train_dataloader())
            self.first_metrics = self.evaluate()

    trainer = build("plain", tmp_path, Eager, extra={"eval_dataset": token_dataset(4), "guard": GuardArguments()})
    assert trainer.num_batches == 24
    assert "eval_loss" in trainer.first_metrics
    assert trainer.nanguard.arguments is trainer.given_guard
    plant(trainer, Fault("loss", 1, 1))
    trainer.train()
    assert [event["action"] for event in events_of(trainer)] == ["dropped"]


def test_batches_that_somebody_looks_at_hold_nothing_of_ours(tmp_path):
    """Not even those with a finding, which would travel along in a run."""
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}] * 4
    trainer = build("plain", tmp_path, extra={"train_dataset": rows})
    batches = list(trainer.get_train_dataloader())
    assert len(batches) == 2
    assert all(set(batch) == {"input_ids", "labels"} for batch in batches)
    batch = trainer.get_train_dataloader().collate_fn(rows[:2])
    assert set(batch) == {"input_ids", "labels"}


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_clip_of_somebodys_own_on_the_accelerator_is_called(max_grad_norm, tmp_path):
    trainer = build("plain", tmp_path, max_grad_norm=max_grad_norm)
    clip, norms = trainer.accelerator.clip_grad_norm_, []

    def halve(parameters, max_norm, norm_type=2):
        norms.append(clip(parameters, max_norm, norm_type))
        return norms[-1] / 2

    trainer.accelerator.clip_grad_norm_ = halve
    trainer.train()
    logged = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert len(norms) == 4
    assert logged == pytest.approx([norm.item() / 2 for norm in norms])


def test_what_is_saved_and_logged_has_the_arguments_as_given(tmp_path):
    class Reader(TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_train_begin(self, args, *rest, **kwargs):
            self.seen.append(args.logging_nan_inf_filter)

        on_log = on_evaluate = on_save = on_train_begin

    reader = Reader()
    extra = {"callbacks": [reader], "eval_dataset": token_dataset(4)}
    changed = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = build("plain", tmp_path, extra=extra, **changed)
    trainer.train()
    saved = torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert saved.logging_nan_inf_filter
    assert len(reader.seen) > 12
    assert all(reader.seen)


def test_metrics_file_holds_every_log_row(tmp_path):
    trainer = build("plain", tmp_path)
    trainer.train()
    rows = [json.loads(line) for line in (Path(tmp_path) / "nanguard" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [row["step"] for row in trainer.state.log_history]
    assert {"nanguard/skipped_steps", "nanguard/success_rate", "nanguard/grad_norm_max"} <= rows[0].keys()


def test_a_healthy_row_shows_one_metric_of_ours_and_a_bad_one_what_was_lost(tmp_path):
    trainer = build("sft", tmp_path, max_steps=12, extra={"guard": GuardArguments(nanguard_weight_check_steps=2)})
    plant(trainer, Fault("loss", 8, 1))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    ours = [{name for name in row if name.startswith("nanguard/")} for row in rows]
    lost = {"nanguard/dropped_microbatches", "nanguard/success_rate", "nanguard/success_rate_recent"}
    assert ours == [{"nanguard/grad_norm_max"}] * 8 + [{"nanguard/grad_norm_max", *lost}] * 4
    written = metric_rows_of(trainer)
    assert [row["loss"] for row in written] == [row["loss"] for row in rows]
    assert all("nanguard/skipped_steps" in row for row in written)
    assert any("nanguard/update_share" in row for row in written)


def test_a_custom_loss_function_and_label_smoothing_are_redone(tmp_path):
    def loss_function(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    extra = {"compute_loss_func": loss_function}
    reference = build("plain", tmp_path / "reference", without(Trainer, (1, 1)), guard=False, extra=extra)
    reference.train()
    expected = tensors_of(reference)
    trainer = build("plain", tmp_path / "ours", extra=extra)
    plant(trainer, Fault("loss", 1, 1))
    trainer.train()
    assert_same(tensors_of(trainer), expected)


@pytest.mark.parametrize("place", ["above", "below"])
def test_a_subclass_that_clips_by_itself_is_redone_and_clipped_again(place, tmp_path):
    """Whether the guard was derived from, or put on top."""

    class Clipper(Trainer):
        def _clip_grad_norm(self, model):
            return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    class Above(GuardedTrainer):
        _clip_grad_norm = Clipper._clip_grad_norm

    Mine = Above if place == "above" else guarded(Clipper)  # noqa: N806
    reference = build("plain", tmp_path / "reference", without(Clipper, (1, 1), (2, 0), (2, 1), (2, 2)), guard=False)
    reference.train()
    expected = tensors_of(reference)
    ours = Mine(tiny_llama(), TrainingArguments(**common_arguments(tmp_path / "ours")), train_dataset=token_dataset(48))
    plant(ours, Fault("loss", 1, 1), *[Fault("gradient", 2, m, parameter="model.norm.weight") for m in range(3)])
    ours.train()
    assert_same(tensors_of(ours), expected)
    assert [event["action"] for event in events_of(ours)] == ["dropped", "skipped", "skipped", "skipped"]


def _own_step(trainer, way):
    """A `training_step` that is put on the trainer itself, as people do."""
    bound, calls = trainer.training_step, []

    def training_step(model, inputs, num_items_in_batch=None):
        calls.append(trainer.state.global_step)
        if way == "around":
            return bound(model, inputs, num_items_in_batch)
        return Trainer.training_step(trainer, model, inputs, num_items_in_batch)

    return training_step, calls


@pytest.mark.parametrize("way", ["around", "instead"])
def test_a_training_step_on_the_trainer_itself_is_guarded(way, tmp_path):
    reference = build("plain", tmp_path / "reference", without(Trainer, (1, 1)), guard=False)
    reference.train()
    trainer = build("plain", tmp_path / "ours")
    plant(trainer, Fault("loss", 1, 1))
    own, calls = _own_step(trainer, way)
    trainer.training_step = own
    trainer.train()
    assert trainer.training_step is own
    assert calls.count(0) == 3
    assert_same(tensors_of(trainer), tensors_of(reference), rng=False)
    assert [event["signal"] for event in events_of(trainer)] == ["loss_nonfinite"]


def test_a_training_step_that_is_replaced_meanwhile_is_told_of(tmp_path):
    class Replace(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            trainer.training_step = _own_step(trainer, "instead")[0]

    trainer = build("plain", tmp_path, extra={"callbacks": [Replace()]})
    trainer.train()
    [event] = events_of(trainer)
    assert (event["signal"], event["step"]) == ("guard_failed", 0)
    assert "training_step" in event["message"]


def test_what_is_called_by_hand_is_the_hosts(tmp_path):
    """A batch for the model itself, a step of one's own: the guard is of `train()`."""
    trainers = [build("plain", tmp_path / str(guard), guard=guard) for guard in (False, True)]
    seen = []
    for trainer in trainers:
        planted = plant(trainer, Fault("label", 0, 0, value=None))
        torch.manual_seed(1)
        batch = next(iter(trainer.get_train_dataloader()))
        assert planted.triggered
        loss = trainer.training_step(trainer.model, dict(batch), torch.tensor(14))
        seen.append((sorted(batch), loss.item(), [p.grad.sum().item() for p in trainer.model.parameters()]))
    assert seen[0] == seen[1]
    assert not trainers[1].nanguard.guard.group.micro_batches


@pytest.mark.parametrize("num_bad", [1, 99])
def test_a_schedule_that_returns_nan_costs_its_steps_and_never_the_weights(num_bad, tmp_path):
    class Broken(Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            bad = range(2, 2 + num_bad)
            rate = lambda step: math.nan if step in bad else 1.0  # noqa: E731
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
            return self.lr_scheduler

    guard = GuardArguments(nanguard_max_bad_steps=3, nanguard_doctor="off")
    trainer = build("plain", tmp_path, Broken, extra={"guard": guard}, max_steps=6)
    if num_bad == 1:
        trainer.train()
        assert trainer.lr_scheduler.last_epoch == 6
    else:
        with pytest.raises(NonFiniteError, match="the learning rate of the optimizer is nan"):
            trainer.train()
    skipped = [event for event in events_of(trainer) if event["signal"] == "optimizer_nonfinite"]
    assert [(event["step"], event["action"]) for event in skipped][:3] == [(n, "skipped") for n in (2, 3, 4)[:num_bad]]
    assert not any(event["action"] == "rewound" for event in events_of(trainer))
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())
