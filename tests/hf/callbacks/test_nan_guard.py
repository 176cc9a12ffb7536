"""The callback that guards: what it contains on an untouched stock trainer, what it says, what it leaves behind."""

import logging
import math
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from transformers import Trainer, TrainerCallback

from hf_nanguard import GuardArguments, GuardedTrainingArguments, NanGuardCallback, NonFiniteError
from hf_nanguard.testing import INF, NAN, Fault, plant
from tests.models import text_rows, tiny_llama, tiny_tokenizer, token_dataset
from tests.reference import assert_same, losses_of, tensors_of, without
from tests.trainers import build, common_arguments, events_of, reward_length, stock_class

LAYER = "model.layers.0.mlp.down_proj.weight"
ADAPTER = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.default.weight"


def _build(tmp_path, *faults, kind="plain", base=None, before=(), after=(), name="ours", settings=None, **overrides):
    guard = GuardArguments(**{f"nanguard_{key}": value for key, value in (settings or {}).items()})
    extra = {**overrides.pop("extra", {}), "callbacks": [*before, NanGuardCallback(guard), *after]}
    trainer = build(kind, tmp_path / name, base, guard=False, extra=extra, **{"max_grad_norm": 0.05, **overrides})
    trainer.planted = plant(trainer, *faults)
    return trainer


def _train(tmp_path, *faults, **kwargs):
    trainer = _build(tmp_path, *faults, **kwargs)
    trainer.train()
    assert set(trainer.planted.triggered) == set(faults)
    return trainer


def _reference(tmp_path, *steps, kind="plain", size=3, **overrides):
    """The stock run in which the whole groups of `steps` never come."""
    places = [(step, micro) for step in steps for micro in range(size)]
    settings = {"max_grad_norm": 0.05, "gradient_accumulation_steps": size, **overrides}
    trainer = build(kind, tmp_path / "reference", without(stock_class(kind), *places), guard=False, **settings)
    trainer.train()
    return trainer, tensors_of(trainer)


# ---- no trace ----

CHECKPOINTING = {
    "gradient checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}
SET_UPS = {
    "plain": {},
    "one micro-batch": {"size": 1},
    "no clipping": {"max_grad_norm": 0.0},
    "lora": {"lora": True},
    "bf16": {"bf16": True},
    "sgd": {"optim": "sgd"},
    "sft": {"kind": "sft"},
    "dpo": {"kind": "dpo"},
    **CHECKPOINTING,
}


@pytest.mark.parametrize("fault", ["loss", "gradient"])
@pytest.mark.parametrize("set_up", SET_UPS)
def test_a_skipped_step_leaves_no_trace(set_up, fault, tmp_path):
    settings = {"size": 3, **SET_UPS[set_up]}
    size = settings["size"]
    reference, expected = _reference(tmp_path, 1, **settings)
    del settings["size"]
    name = None if fault == "loss" else ADAPTER if settings.get("lora") else LAYER
    planted = Fault(fault, 1, size // 2, parameter=name)
    trainer = _train(tmp_path, planted, gradient_accumulation_steps=size, **settings)
    assert_same(tensors_of(trainer), expected)
    assert trainer.lr_scheduler.last_epoch == reference.lr_scheduler.last_epoch == 3
    assert trainer.state.global_step == 4
    [event] = events_of(trainer)
    assert (event["action"], event["step"], event["culprit"]["parameter"]) == ("skipped", 1, name)


def test_a_skipped_grpo_step_is_as_if_its_prompts_had_not_been_in_the_data(tmp_path):
    import trl

    rows = [{"prompt": row["text"]} for row in text_rows(48)]

    def make(name, data, max_steps, callbacks):
        settings = {"num_generations": 2, "max_completion_length": 4, "shuffle_dataset": False, "max_steps": max_steps}
        return trl.GRPOTrainer(
            tiny_llama(), reward_funcs=reward_length, args=trl.GRPOConfig(**common_arguments(tmp_path / name, **settings)),
            train_dataset=Dataset.from_list(data), processing_class=tiny_tokenizer(), callbacks=callbacks,
        )  # fmt: skip

    reference = make("reference", rows[:3] + rows[6:], 3, [])  # a step takes 6 completions, that is 3 prompts
    reference.train()
    expected = tensors_of(reference)
    trainer = make("ours", rows, 4, [NanGuardCallback()])
    plant(trainer, Fault("gradient", 1, 1, parameter=LAYER))
    trainer.train()
    assert_same(tensors_of(trainer), expected)
    [event] = events_of(trainer)
    assert (event["action"], event["step"], event["culprit"]["parameter"]) == ("skipped", 1, LAYER)


def test_batch_norm_statistics_and_counters_are_put_back(tmp_path):
    from tests.laws.batchnorm import build_batchnorm

    def train(name, faults, callbacks, drop):
        trainer = build_batchnorm(tmp_path / name)
        # The builder makes a guarded trainer; its stock parent is what a callback is for.
        stock = next(c for c in type(trainer).__mro__ if c.__module__.startswith("transformers"))
        trainer.__class__ = without(stock, *drop) if drop else stock
        for callback in callbacks:
            trainer.add_callback(callback)
        plant(trainer, *faults)
        trainer.train()
        return trainer

    size = build_batchnorm(tmp_path / "probe").args.gradient_accumulation_steps
    reference = train("reference", [], [], [(1, micro) for micro in range(size)])
    expected = tensors_of(reference)
    ours = train("ours", [Fault("loss", 1, size - 1)], [NanGuardCallback()], [])
    assert_same(tensors_of(ours), expected)
    assert [event["action"] for event in events_of(ours)] == ["skipped"]


# ---- what is told ----


@pytest.mark.parametrize(("value", "kind"), [(NAN, "NaN"), (INF, "inf")])
def test_event_and_log_name_the_one_bad_parameter(value, kind, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "hf_nanguard"):
        trainer = _train(tmp_path, Fault("gradient", 2, 1, parameter=LAYER, value=value))
    [event] = events_of(trainer)
    assert f"gradient of {LAYER} became {kind} (1 of 21) at step 2" in event["message"]
    assert "the whole group was skipped because a callback cannot run the trainer's loss again" in event["message"]
    block = next(record.message for record in caplog.records if "---- bad gradients at step 2 ----" in record.message)
    assert block.count("bad:  ") == 1
    assert f"bad:  {LAYER} ({kind})" in block
    assert f"total norm before clipping: {kind.lower()}" in block


def test_what_a_callback_cannot_do_is_said_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        _train(tmp_path)
    [line] = [record.message for record in caplog.records if "NanGuardCallback" in record.message]
    assert "attach(trainer)" in line


@pytest.mark.parametrize("kind", ["plain", "sft", "dpo", "grpo"])
def test_micro_batches_are_counted_as_a_guarded_trainer_counts_them(kind, tmp_path):
    trainer = _train(tmp_path, Fault("gradient", 1, 1, parameter=LAYER), kind=kind)
    row = [row for row in trainer.state.log_history if "nanguard/skipped_steps" in row][-1]
    assert row["nanguard/skipped_steps"] == 1
    assert row["nanguard/dropped_microbatches"] == 3  # the group of three, though one was bad
    assert row["nanguard/success_rate"] == row["nanguard/success_rate_recent"] == pytest.approx(9 / 12)


def test_an_uneven_tail_is_counted_by_what_it_holds(tmp_path):
    """8 rows are four batches: a group of three, then a group of one."""
    settings = {"extra": {"train_dataset": token_dataset(8)}, "max_steps": -1, "num_train_epochs": 2}
    trainer = _train(tmp_path, Fault("gradient", 1, parameter=LAYER), **settings)
    row = [row for row in trainer.state.log_history if "nanguard/skipped_steps" in row][-1]
    assert row["nanguard/dropped_microbatches"] == 1
    assert row["nanguard/success_rate"] == pytest.approx(7 / 8)


def test_a_loss_the_trainer_computes_by_itself_is_counted_too(tmp_path):
    def loss_function(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    trainer = _train(tmp_path, Fault("loss", 1, 1), extra={"compute_loss_func": loss_function})
    row = [row for row in trainer.state.log_history if "nanguard/skipped_steps" in row][-1]
    assert row["nanguard/dropped_microbatches"] == 3


@pytest.mark.parametrize("bad", [False, True])
def test_a_model_with_a_loss_for_each_sample_or_device(bad, tmp_path):
    """As `nn.DataParallel` has it; the trainer takes the mean."""

    class Mean(Trainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs).mean()

    trainer = _build(tmp_path, base=Mean)

    def spread(module, args, output):
        output["loss"] = torch.stack([output["loss"] * 0.5, output["loss"] * 1.5])
        if bad and trainer.state.global_step == 2:
            output["loss"] = output["loss"] * float("nan")
        return output

    trainer.model.register_forward_hook(spread)
    trainer.train()
    assert [(event["step"], event["action"]) for event in events_of(trainer)] == ([(2, "skipped")] if bad else [])
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


def test_metrics_are_those_of_the_run(tmp_path):
    trainer = _train(tmp_path, Fault("gradient", 3, parameter=LAYER), max_steps=5)
    rows = [row for row in trainer.state.log_history if "learning_rate" in row]
    assert [row["nanguard/skipped_steps"] for row in rows] == [0, 0, 0, 1, 1]
    assert [row["nanguard/grad_norm_max"] for row in rows[:3]] == pytest.approx([row["grad_norm"] for row in rows[:3]])
    assert min(row["grad_norm"] for row in rows[:3]) > 0.05
    assert rows[3]["nanguard/grad_norm_max"] == 0.0


class _Rows(TrainerCallback):
    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.rows.append(dict(logs))


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_skipped_step_is_never_logged_as_a_loss(fault, tmp_path):
    after = _Rows()
    name = None if fault == "loss" else LAYER
    faults = [Fault(fault, 1, micro, parameter=name) for micro in range(3)]
    trainer = _train(tmp_path, *faults, after=[after])
    shown = {row["step"]: row for row in trainer.state.log_history if "learning_rate" in row}
    assert shown.keys() == {1, 2, 3, 4}
    assert [step for step, row in shown.items() if "loss" in row] == [1, 3, 4]
    assert 0.0 not in losses_of(trainer)
    assert [row for row in after.rows if row.get("loss") == 0.0] == []
    for row in shown.values():
        assert all(not isinstance(value, float) or math.isfinite(value) for value in row.values()), row


def test_a_bad_evaluation_is_an_event(tmp_path):
    class Spoiled(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            result = super().compute_loss(model, inputs, *args, **kwargs)
            return result if model.training or self.state.global_step != 2 else (result[0] * NAN, result[1])

    settings = {"eval_strategy": "steps", "eval_steps": 1, "extra": {"eval_dataset": token_dataset(4, seed=5)}}
    trainer = _train(tmp_path, base=Spoiled, **settings)
    [event] = events_of(trainer)
    assert (event["signal"], event["action"], event["step"]) == ("eval_nonfinite", "observed", 2)
    assert event["values"] == {"eval_loss": "nan"}


class Headless(Trainer):
    """Runs the inner model, so that the forward of the model that callbacks know is never called."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        hidden = model.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        return model.lm_head(hidden).float().square().mean()


def test_gradients_that_cannot_be_tapped_are_said_once(tmp_path):
    trainer = _train(tmp_path, base=Headless)
    [event] = events_of(trainer)
    assert (event["signal"], event["action"], event["step"]) == ("guard_failed", "observed", 0)
    assert "no output of the model's forward led to the backward" in event["message"]


# ---- policies ----


@pytest.mark.parametrize("policy", ["drop", "skip", "floor", "repair"])
def test_every_mild_policy_skips_whole(policy, tmp_path):
    _, expected = _reference(tmp_path, 1)
    trainer = _train(tmp_path, Fault("gradient", 1, 1, parameter=LAYER), settings={"on_nonfinite": policy})
    assert_same(tensors_of(trainer), expected)
    assert [event["action"] for event in events_of(trainer)] == ["skipped"]


def _halt(trainer, on_halt):
    if on_halt == "raise":
        with pytest.raises(NonFiniteError, match=r"checkpoint-3") as caught:
            trainer.train()
        return str(caught.value)
    trainer.train()
    return None


@pytest.mark.parametrize("on_halt", ["raise", "stop"])
@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_halt_saves_a_state_that_a_stock_trainer_goes_on_from(fault, on_halt, tmp_path):
    _, expected = _reference(tmp_path, 2, max_steps=5)
    good, kept = _reference(tmp_path / "good", max_steps=2)
    settings = {"on_nonfinite": "halt", "on_halt": on_halt}
    name = None if fault == "loss" else LAYER
    trainer = _build(tmp_path, Fault(fault, 2, 1, parameter=name), settings=settings, max_steps=5)
    _halt(trainer, on_halt)
    assert_same(tensors_of(trainer), kept)
    assert trainer.lr_scheduler.last_epoch == good.lr_scheduler.last_epoch
    assert trainer.model._forward_hooks == {}
    [event] = events_of(trainer)
    assert (event["action"], event["step"], event["culprit"]["parameter"]) == ("halted", 2, name)
    assert [folder.name for folder in Path(tmp_path / "ours").glob("checkpoint-*")] == ["checkpoint-3"]
    resumed = build("plain", tmp_path / "resumed", guard=False, max_steps=5, max_grad_norm=0.05)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    assert_same(tensors_of(resumed), expected)


@pytest.mark.parametrize("on_halt", ["raise", "stop"])
def test_too_many_bad_steps_in_a_row_halt(on_halt, tmp_path):
    faults = [Fault("loss", 0), *[Fault("gradient", step, parameter=LAYER) for step in (2, 3)]]
    settings = {"max_bad_steps": 2, "on_halt": on_halt}
    trainer = _build(tmp_path, *faults, settings=settings, gradient_accumulation_steps=1, max_steps=9)
    if on_halt == "raise":
        with pytest.raises(NonFiniteError, match=r"2 bad steps in a row.*checkpoint-4"):
            trainer.train()
    else:
        trainer.train()
    assert trainer.state.global_step == 4
    assert [(e["step"], e["action"]) for e in events_of(trainer)] == [
        (0, "skipped"), (2, "skipped"), (3, "skipped"), (3, "halted"),
    ]  # fmt: skip
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    assert trainer.model._forward_hooks == {}


@pytest.mark.parametrize("on_halt", ["raise", "stop"])
def test_sick_weights_are_not_saved_as_good(on_halt, tmp_path):
    settings = {"max_bad_steps": 2, "on_halt": on_halt}
    trainer = _build(tmp_path, Fault("weight", 1, parameter=LAYER), settings=settings, max_steps=6)
    if on_halt == "raise":
        with pytest.raises(NonFiniteError, match="Nothing was saved"):
            trainer.train()
    else:
        trainer.train()
    assert events_of(trainer)[-1]["action"] == "halted"
    assert not list(Path(tmp_path / "ours").glob("checkpoint-*"))
    assert trainer.model._forward_hooks == {}


def test_a_fixed_threshold_skips_without_a_trace(tmp_path):
    stock = build("plain", tmp_path / "stock", guard=False, max_grad_norm=0.05, max_steps=1)
    stock.train()
    norm = stock.state.log_history[0]["grad_norm"]
    _, expected = _reference(tmp_path, 0, max_steps=1)
    trainer = _train(tmp_path, settings={"skip_grad_norm": norm * 0.999}, max_steps=1)
    assert_same(tensors_of(trainer), expected)
    [event] = events_of(trainer)
    assert (event["signal"], event["action"]) == ("grad_spike", "skipped")
    assert event["values"] == {"grad_norm": pytest.approx(norm), "threshold": norm * 0.999}
    above = _train(tmp_path, settings={"skip_grad_norm": norm * 1.001}, max_steps=1, name="above")
    assert events_of(above) == []


def test_observe_says_what_happened_and_changes_nothing(tmp_path):
    fault = Fault("gradient", 3, 1, parameter=LAYER)
    stock = build("plain", tmp_path / "stock", guard=False, max_grad_norm=0.05)
    plant(stock, fault)
    stock.train()
    theirs = tensors_of(stock)
    ours = _train(tmp_path, fault, settings={"mode": "observe"})
    found = tensors_of(ours)
    assert any(value.isnan().any() for value in theirs.values() if value.is_floating_point())
    assert_same({k: v.nan_to_num(7) for k, v in found.items()}, {k: v.nan_to_num(7) for k, v in theirs.items()})
    assert ours.lr_scheduler.last_epoch == stock.lr_scheduler.last_epoch
    [event] = events_of(ours)
    assert (event["action"], event["culprit"]["parameter"]) == ("observed", LAYER)


def test_off_does_nothing_at_all(tmp_path):
    hooks = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            hooks.append(len(model._forward_hooks))

    trainer = _train(tmp_path, Fault("gradient", 3, parameter=LAYER), settings={"mode": "off"}, after=[Look()])
    assert hooks == [0] * 4
    assert events_of(trainer) == []
    assert not (tmp_path / "ours" / "nanguard").exists()
    assert not any("nanguard" in key for row in trainer.state.log_history for key in row)


def test_settings_are_taken_from_guarded_arguments(tmp_path):
    args = GuardedTrainingArguments(**common_arguments(tmp_path), nanguard_on_nonfinite="halt", nanguard_on_halt="stop")
    trainer = Trainer(tiny_llama(), args, train_dataset=token_dataset(48), callbacks=[NanGuardCallback()])
    plant(trainer, Fault("gradient", 1, parameter=LAYER))
    trainer.train()
    assert trainer.state.global_step == 2
    assert [event["action"] for event in events_of(trainer)] == ["halted"]


# ---- checkpoints and further runs ----


def _resume(tmp_path, folder, **settings):
    """Goes on from step 4 of 6 in `folder`, after a run with one skipped step; returns the new callback."""
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    begun = _train(tmp_path, Fault("gradient", 1, parameter=LAYER), **saving)
    checkpoint = str(tmp_path / "ours" / "checkpoint-4")
    callback = NanGuardCallback()
    extra = {"callbacks": [callback]}
    resumed = build("plain", folder, guard=False, extra=extra, max_grad_norm=0.05, **saving, **settings)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_same(tensors_of(resumed), tensors_of(begun))
    return callback


@pytest.mark.parametrize("folder", ["ours", "elsewhere"])
def test_state_survives_a_resume(folder, tmp_path):
    given = {"resume_from_checkpoint": str(tmp_path / "ours" / "checkpoint-4")} if folder == "elsewhere" else {}
    guard = _resume(tmp_path, tmp_path / folder, **given).guard
    assert guard.counter.skipped_steps == 1
    assert guard.counter.seen == 18
    assert guard.counter.dropped == 3
    assert len(guard.norms.values) == 5


def test_a_state_that_cannot_be_found_is_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        guard = _resume(tmp_path, tmp_path / "elsewhere").guard
    assert guard.counter.seen == 6
    assert any("goes on from step 4" in record.message for record in caplog.records)


def test_a_second_run_starts_afresh(tmp_path):
    trainer = _train(tmp_path, Fault("gradient", 1, parameter=LAYER))
    trainer.planted.faults = []
    trainer.train()
    rows = [row for row in trainer.state.log_history if "nanguard/skipped_steps" in row]
    assert [row["nanguard/skipped_steps"] for row in rows] == [0] * 4
    assert len(events_of(trainer)) == 1
    assert trainer.model._forward_hooks == {}
    rates = [row["learning_rate"] for row in rows]
    assert rates == sorted(set(rates))


# ---- float16 with a loss scaler ----


@pytest.fixture
def fp16_state():
    yield
    AcceleratorState._reset_state(True)


def _scaled(trainer, init_scale):
    """Gives the trainer torch's CPU scaler, as tests/hf/trainer/test_scaler.py does: accelerate builds none on a CPU."""
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1000)
    trainer.accelerator.native_amp = True
    trainer.accelerator.state._mixed_precision = "fp16"
    return trainer


def _spoil_loss(model, call):
    """Makes the loss that the model returns NaN at one call of its forward."""
    calls = iter(range(10**6))

    def spoil(module, args, output):
        if next(calls) == call:
            output["loss"] = output["loss"] * NAN
        return output

    model.register_forward_hook(spoil)


@pytest.mark.usefixtures("fp16_state")
def test_a_scaler_that_finds_its_scale_is_left_alone(tmp_path):
    settings = {"max_steps": 16, "gradient_accumulation_steps": 1, "logging_steps": 4, "max_grad_norm": 1.0}
    stock = _scaled(build("plain", tmp_path / "stock", guard=False, **settings), 2.0**24)
    stock.train()
    expected = tensors_of(stock)
    num_skips = 24 - math.log2(stock.accelerator.scaler.get_scale())  # each skip halves the scale
    assert 0 < num_skips < 16
    ours = _scaled(_build(tmp_path, **settings), 2.0**24)
    ours.train()
    assert_same(tensors_of(ours), expected)
    assert events_of(ours) == []
    skips = [row["nanguard/scaler_skips"] for row in ours.state.log_history if "nanguard/scaler_skips" in row]
    assert skips[-1] == num_skips


@pytest.mark.usefixtures("fp16_state")
def test_a_nan_loss_is_told_also_under_a_scaler(tmp_path):
    trainer = _scaled(_build(tmp_path), 16.0)
    _spoil_loss(trainer.model, 4)
    trainer.train()
    [event] = events_of(trainer)
    assert (event["signal"], event["action"], event["step"]) == ("loss_nonfinite", "observed", 1)
    assert event["micro_step"] == 1
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
