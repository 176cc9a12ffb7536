"""The monitor reports norms as they were before clipping, names what goes bad, and changes nothing unless asked to halt."""

import re

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import Trainer

from hf_nanguard import ArgumentError, GradientMonitorCallback, NanGuardCallback
from hf_nanguard.testing import INF, NAN, Fault, plant
from tests.reference import assert_same, tensors_of
from tests.trainers import build, events_of

LAYER = "model.layers.0.mlp.down_proj.weight"
OTHER = "model.layers.1.self_attn.q_proj.weight"
REPORT = re.compile(
    r"\[step (\d+)\] gradient norm before clipping: mean (\S+), max (\S+), min (\S+); "
    r"bad gradients so far: (\d+) NaN, (\d+) inf"
)


def _train(tmp_path, *faults, callbacks=None, name="watched", **overrides):
    settings = {"max_grad_norm": 0.05, **overrides}
    trainer = build("plain", tmp_path / name, guard=False, extra={"callbacks": callbacks}, **settings)
    plant(trainer, *faults)
    trainer.train()
    return trainer


def _norms(trainer):
    return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]


def _reports(text):
    return [tuple(map(float, found)) for found in REPORT.findall(text)]


def test_the_report_shows_the_norms_before_clipping(tmp_path, capsys):
    trainer = _train(tmp_path, callbacks=[GradientMonitorCallback(log_every_n_steps=3)], max_steps=7)
    norms = _norms(trainer)  # the stock trainer logs what its clip measured
    assert min(norms) > 0.05  # so the clip did clip, and clipped norms would all be 0.05
    expected = [
        (step, sum(window) / 3, max(window), min(window), 0, 0)
        for step, window in ((3, norms[0:3]), (6, norms[3:6]))
    ]  # fmt: skip
    assert _reports(capsys.readouterr().out) == [pytest.approx(row, rel=1e-5) for row in expected]


def test_only_every_nth_step_is_looked_at(tmp_path, capsys):
    monitor = GradientMonitorCallback(check_every_n_steps=3, log_every_n_steps=2)
    norms = _norms(_train(tmp_path, callbacks=[monitor], max_steps=6))
    expected = [(2, norms[0], norms[0], norms[0], 0, 0), (4, norms[3], norms[3], norms[3], 0, 0)]
    assert _reports(capsys.readouterr().out) == [pytest.approx(row, rel=1e-5) for row in expected]


@pytest.mark.parametrize(("step", "seen"), [(1, False), (2, True)])
def test_a_fault_between_two_looks_is_not_seen(step, seen, tmp_path):
    fault = Fault("gradient", step, parameter=LAYER)
    trainer = _train(tmp_path, fault, callbacks=[GradientMonitorCallback(check_every_n_steps=2)], max_steps=step + 1)
    assert [event["step"] for event in events_of(trainer)] == ([step] if seen else [])


@pytest.mark.parametrize("monitor_first", [True, False])
def test_beside_the_guard_it_reports_what_the_optimizer_gets(monitor_first, tmp_path, capsys):
    """The guard redoes a bad step, and the monitor measures the gradients of the redone one."""
    pair = [GradientMonitorCallback(log_every_n_steps=1), NanGuardCallback()]
    faults = [
        Fault("gradient", 1, 0, parameter=LAYER),
        Fault("gradient", 2, 1, parameter=OTHER, value=INF),
        Fault("gradient", 3, 2, parameter=OTHER),
    ]
    trainer = _train(tmp_path, *faults, callbacks=pair if monitor_first else pair[::-1], max_steps=5)
    reports = [(step, nan, inf) for step, *_, nan, inf in _reports(capsys.readouterr().out)]
    assert reports == [(step, 0, 0) for step in range(1, 6)]
    events = [(event["step"], event["action"], event["culprit"]["parameter"]) for event in events_of(trainer)]
    assert events == [(1, "dropped", LAYER), (2, "dropped", OTHER), (3, "dropped", OTHER)]
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize(("value", "kind"), [(NAN, "NaN"), (INF, "inf")])
def test_the_incident_shows_the_norm_and_every_bad_parameter_with_its_kind(value, kind, tmp_path, capsys):
    faults = [Fault("gradient", 3, 0, parameter=LAYER), Fault("gradient", 3, 1, parameter=OTHER, value=value)]
    trainer = _train(tmp_path, *faults, callbacks=[GradientMonitorCallback()])
    block = capsys.readouterr().out
    names = [name for name, _ in trainer.model.named_parameters()]
    assert "---- bad gradients at step 3 ----" in block
    assert "total norm before clipping: nan" in block
    assert re.findall(r"bad:  (\S+) \((\w+)\)", block) == [(LAYER, "NaN"), (OTHER, kind)]
    beside = [names[names.index(name) + offset] for name in (LAYER, OTHER) for offset in (-1, 1)]
    assert re.findall(r"good: (\S+) ", block) == beside
    [event] = events_of(trainer)
    assert event["action"] == "observed"
    assert event["values"]["bad_parameters"] == {LAYER: "nan", OTHER: kind.lower()}


def test_watching_does_not_change_a_bad_run_either(tmp_path):
    fault = Fault("gradient", 2, parameter=LAYER)
    stock = tensors_of(_train(tmp_path, fault, name="stock"))
    watched = tensors_of(_train(tmp_path, fault, callbacks=[GradientMonitorCallback()]))
    assert any(torch.isnan(value).any() for value in stock.values())
    assert_same({k: v.nan_to_num(7) for k, v in watched.items()}, {k: v.nan_to_num(7) for k, v in stock.items()})


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_halt_leaves_the_weights_of_the_last_good_step(value, accumulation, tmp_path):
    settings = {"gradient_accumulation_steps": accumulation}
    good = _train(tmp_path, name="good", max_steps=2, **settings)
    expected = tensors_of(good)
    fault = Fault("gradient", 2, parameter=LAYER, value=value)
    halted = _train(tmp_path, fault, callbacks=[GradientMonitorCallback(halt_on_nan=True)], max_steps=6, **settings)
    assert_same(tensors_of(halted), expected, rng=False)
    assert halted.lr_scheduler.last_epoch == good.lr_scheduler.last_epoch
    assert halted.state.global_step == 3
    [event] = events_of(halted)
    assert (event["action"], event["culprit"]["parameter"]) == ("halted", LAYER)


def test_a_loss_of_nan_halts_too(tmp_path):
    halted = _train(tmp_path, Fault("loss", 1, 2), callbacks=[GradientMonitorCallback(halt_on_nan=True)])
    assert halted.state.global_step == 2
    assert all(torch.isfinite(parameter).all() for parameter in halted.model.parameters())
    [event] = events_of(halted)
    assert event["culprit"]["parameter"] is None  # all are bad, so none of them is to blame
    assert event["values"]["num_good_parameters"] == 0


def test_after_a_halt_the_schedule_of_the_next_run_moves(tmp_path):
    callbacks = [GradientMonitorCallback(halt_on_nan=True)]
    trainer = build("plain", tmp_path, guard=False, extra={"callbacks": callbacks}, max_steps=3)
    planted = plant(trainer, Fault("gradient", 1, parameter=LAYER))
    trainer.train()
    assert trainer.state.global_step == 2
    planted.faults = []
    trainer.train()
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert rates == sorted(set(rates))
    assert len(rates) == 3


@pytest.mark.parametrize("name", ["check_every_n_steps", "log_every_n_steps"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "3", True, None])
def test_bad_arguments_are_named_with_their_value(name, value):
    with pytest.raises(ArgumentError, match=f"{name} must be an integer of at least 1, got {value!r}"):
        GradientMonitorCallback(**{name: value})


class Headless(Trainer):
    """Runs the inner model, so that the forward of the model that callbacks know is never called."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        hidden = model.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        return model.lm_head(hidden).float().square().mean()


def test_gradients_that_cannot_be_tapped_are_said_once(tmp_path):
    callbacks = [GradientMonitorCallback()]
    trainer = build("plain", tmp_path, Headless, guard=False, extra={"callbacks": callbacks})
    trainer.train()
    assert [(event["signal"], event["step"]) for event in events_of(trainer)] == [("guard_failed", 0)]


def test_the_hook_is_gone_after_each_step(tmp_path):
    hooks = []

    class Look(GradientMonitorCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            super().on_step_begin(args, state, control, model=model, **kwargs)
            hooks.append(len(model._forward_hooks))

        def on_step_end(self, args, state, control, model=None, **kwargs):
            super().on_step_end(args, state, control, model=model, **kwargs)
            hooks.append(len(model._forward_hooks))

    trainer = _train(tmp_path, callbacks=[Look()])
    assert hooks == [1, 0] * 4
    assert trainer.model._forward_hooks == {}


# ---- float16 with a loss scaler ----


@pytest.fixture
def scaled():
    """Gives a trainer torch's CPU scaler, as tests/hf/trainer/test_scaler.py does: accelerate builds none on a CPU."""

    def equip(trainer, init_scale):
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
        trainer.accelerator.native_amp = True
        trainer.accelerator.state._mixed_precision = "fp16"
        return trainer

    yield equip
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("halt_on_nan", [False, True])
def test_a_scaler_that_finds_its_scale_is_healthy(halt_on_nan, scaled, tmp_path):
    monitor = GradientMonitorCallback(halt_on_nan=halt_on_nan)
    extra = {"callbacks": [monitor]}
    trainer = scaled(build("plain", tmp_path, guard=False, extra=extra, max_steps=8), 2.0**127)
    trainer.train()
    assert trainer.accelerator.scaler.get_scale() < 2.0**127  # so it has skipped
    assert trainer.state.global_step == 8
    assert events_of(trainer) == []


@pytest.mark.parametrize("halt_on_nan", [False, True])
def test_a_nan_loss_is_told_also_under_a_scaler(halt_on_nan, scaled, tmp_path):
    extra = {"callbacks": [GradientMonitorCallback(halt_on_nan=halt_on_nan)]}
    trainer = scaled(build("plain", tmp_path, guard=False, extra=extra, gradient_accumulation_steps=1), 16.0)
    calls = iter(range(100))

    def spoil(module, args, output):
        if next(calls) == 2:
            output["loss"] = output["loss"] * NAN
        return output

    trainer.model.register_forward_hook(spoil)
    trainer.train()
    [event] = events_of(trainer)
    assert (event["step"], event["action"]) == (2, "halted" if halt_on_nan else "observed")
    assert trainer.state.global_step == (3 if halt_on_nan else 4)


def test_reported_norms_carry_no_loss_scale(scaled, tmp_path, capsys):
    extra = {"callbacks": [GradientMonitorCallback(log_every_n_steps=2)]}
    trainer = scaled(build("plain", tmp_path, guard=False, extra=extra, max_grad_norm=0.05, max_steps=2), 16.0)
    trainer.train()
    norms = _norms(trainer)
    assert _reports(capsys.readouterr().out) == [
        pytest.approx((2, sum(norms) / 2, max(norms), min(norms), 0, 0), rel=1e-5)
    ]
