"""L6: every intervention is an event, a metric and, the first time, a log line; a healthy run raises nothing at all."""

import json
import logging
import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hf_nanguard import GuardArguments, NonFiniteError, guarded
from hf_nanguard.testing import INF, NAN, Fault, plant

from ..architectures import BY_NAME
from ..models import tiny_t5, token_dataset
from ..reference import assert_same, losses_of, tensors_of, without
from ..trainers import KINDS, build, events_besides_spikes, events_of, metric_rows_of, stock_class

LAYER = "model.layers.0.self_attn.k_proj.weight"


def _train(tmp_path, *faults, kind="plain", guard_settings=None, name="guarded", **overrides):
    extra = dict(overrides.pop("extra", {}))
    extra["guard"] = GuardArguments(**{f"nanguard_{key}": value for key, value in (guard_settings or {}).items()})
    trainer = build(kind, tmp_path / name, extra=extra, **overrides)
    planted = plant(trainer, *faults)
    trainer.train()
    assert set(planted.triggered) == set(faults)
    return trainer


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    places=st.dictionaries(
        st.tuples(st.integers(0, 3), st.integers(0, 2)), st.sampled_from(["loss", "gradient", "label"]), max_size=4
    )
)
def test_events_match_faults_one_to_one(places, tmp_path_factory):
    faults = [
        Fault(kind, *place, value=999 if kind == "label" else NAN, parameter=LAYER if kind == "gradient" else None)
        for place, kind in places.items()
    ]
    trainer = _train(tmp_path_factory.mktemp("run"), *faults)
    signals = {"loss": "loss_nonfinite", "gradient": "grad_nonfinite", "label": "label_out_of_range"}
    found = {(e["step"], e["micro_step"]): e["signal"] for e in events_of(trainer)}
    assert found == {place: signals[kind] for place, kind in places.items()}
    assert len(events_of(trainer)) == len(places)
    final = metric_rows_of(trainer)
    whole = [step for step in range(4) if all((step, m) in places for m in range(3))]
    if 3 not in whole:
        assert final[-1]["nanguard/dropped_microbatches"] == len(places)
        assert final[-1]["nanguard/skipped_steps"] == len(whole)
        assert final[-1]["nanguard/success_rate"] == pytest.approx(1 - len(places) / 12)


def test_the_first_of_a_kind_is_a_log_line(tmp_path, caplog):
    faults = [Fault("gradient", step, 1, parameter=LAYER) for step in range(3)]
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        _train(tmp_path, *faults)
    lines = [record.message for record in caplog.records if record.message.startswith("[grad_nonfinite] dropped")]
    assert len(lines) == 1
    assert LAYER in lines[0]


def test_the_incident_names_the_bad_parameter_and_its_good_neighbours(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hf_nanguard"):
        trainer = _train(tmp_path, Fault("gradient", 1, 0, parameter=LAYER, value=INF))
    [event] = events_of(trainer)
    assert event["values"]["bad_parameters"] == {LAYER: "inf"}
    names = [name for name, _ in trainer.model.named_parameters()]
    place = names.index(LAYER)
    assert event["values"]["good_neighbours"] == [names[place - 1], names[place + 1]]
    block = next(record.message for record in caplog.records if "bad gradients at step 1" in record.message)
    assert f"bad:  {LAYER} (inf)" in block
    assert "total norm before clipping: inf" in block


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_never_shows_a_filtered_loss(kind, tmp_path):
    trainer = _train(tmp_path, *[Fault("loss", 1, m) for m in range(3)], kind=kind)
    rows = {row["step"]: row for row in trainer.state.log_history if "loss" in row}
    assert 2 not in rows
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in rows.values())
    for row in trainer.state.log_history:
        assert all(not isinstance(value, float) or math.isfinite(value) for value in row.values()), row
    assert trainer.args.logging_nan_inf_filter is True


def test_a_run_that_learned_nothing_has_no_mean_loss(tmp_path):
    trainer = build("plain", tmp_path, max_steps=2)
    plant(trainer, *[Fault("loss", step, m) for step in range(2) for m in range(3)])
    output = trainer.train()
    assert trainer.state.global_step == 2
    assert math.isnan(output.training_loss)
    assert math.isnan(output.metrics["train_loss"])
    assert math.isnan(trainer.state.log_history[-1]["train_loss"])


def test_floor_shows_the_floor(tmp_path):
    trainer = _train(
        tmp_path, *[Fault("loss", 1, m) for m in range(3)], guard_settings={"on_nonfinite": "floor", "loss_floor": 0.25}
    )
    rows = {row["step"]: row for row in trainer.state.log_history if "loss" in row}
    assert rows[2]["loss"] == pytest.approx(0.75)


@pytest.mark.parametrize("policy", ["drop", "floor"])
def test_drop_and_floor_train_alike(policy, tmp_path):
    reference = build("plain", tmp_path / "reference", without(stock_class("plain"), (1, 1)), guard=False)
    reference.train()
    expected = tensors_of(reference)
    trainer = _train(tmp_path, Fault("loss", 1, 1), guard_settings={"on_nonfinite": policy})
    assert_same(tensors_of(trainer), expected)


def test_skip_gives_up_the_whole_step(tmp_path):
    reference = build(
        "plain", tmp_path / "reference", without(stock_class("plain"), (1, 0), (1, 1), (1, 2)), guard=False
    )
    reference.train()
    expected = tensors_of(reference)
    trainer = _train(tmp_path, Fault("loss", 1, 1), guard_settings={"on_nonfinite": "skip"})
    assert_same(tensors_of(trainer), expected)
    [event] = events_of(trainer)
    assert (event["action"], event["micro_step"], event["signal"]) == ("skipped", 1, "loss_nonfinite")


def test_repair_zeroes_the_bad_entries_and_steps_with_the_rest(tmp_path):
    trainer = _train(tmp_path, Fault("gradient", 1, 1, parameter=LAYER), guard_settings={"on_nonfinite": "repair"})
    [event] = events_of(trainer)
    assert (event["action"], event["culprit"]["parameter"]) == ("repaired", LAYER)
    reference = build("plain", tmp_path / "reference", guard=False)
    plant(reference, Fault("gradient", 1, 1, parameter=LAYER, value=0.0))
    first = {name: p.detach().clone() for name, p in reference.model.named_parameters()}
    reference.train()
    moved = [name for name, p in trainer.model.named_parameters() if not torch.equal(p, first[name])]
    assert LAYER in moved
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_repair_with_nothing_left_is_a_skip(tmp_path):
    trainer = _train(tmp_path, Fault("loss", 1, 1), guard_settings={"on_nonfinite": "repair"})
    [event] = events_of(trainer)
    assert (event["signal"], event["action"]) == ("loss_nonfinite", "skipped")


def test_observe_never_acts(tmp_path):
    stock = build("plain", tmp_path / "stock", guard=False)
    plant(stock, Fault("gradient", 3, 1, parameter=LAYER))
    stock.train()
    trainer = _train(tmp_path, Fault("gradient", 3, 1, parameter=LAYER), guard_settings={"mode": "observe"})
    ours, theirs = tensors_of(trainer), tensors_of(stock)
    assert all(torch.equal(ours[name].nan_to_num(7), theirs[name].nan_to_num(7)) for name in theirs)
    [event] = events_of(trainer)
    assert (event["action"], event["culprit"]["parameter"]) == ("observed", LAYER)


@pytest.mark.parametrize("on_halt", ["raise", "stop"])
def test_halt_saves_the_last_good_state(on_halt, tmp_path):
    reference = build("plain", tmp_path / "reference", guard=False, max_steps=2)
    reference.train()
    expected = tensors_of(reference)
    extra = {"guard": GuardArguments(nanguard_on_nonfinite="halt", nanguard_on_halt=on_halt)}
    trainer = build("plain", tmp_path / "guarded", extra=extra)
    plant(trainer, Fault("loss", 2, 1))
    if on_halt == "raise":
        with pytest.raises(NonFiniteError, match=r"step 2.*checkpoint-2"):
            trainer.train()
    else:
        trainer.train()
        assert trainer.state.global_step == 3
    found = tensors_of(trainer)
    assert all(torch.equal(found[name], expected[name]) for name in found if name.startswith(("model", "optimizer")))
    folder = tmp_path / "guarded" / "checkpoint-2"
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert events_of(trainer)[-1]["action"] == "halted"
    again = build("plain", tmp_path / "again", guard=False)
    again.train(resume_from_checkpoint=str(folder))
    assert again.state.global_step == 4


def test_a_checkpoint_of_an_earlier_run_is_not_the_last_good_state(tmp_path):
    for learning_rate in (0.1, 1e-3):
        settings = {"guard": GuardArguments(nanguard_on_nonfinite="halt", nanguard_autopsy=False)}
        trainer = build("plain", tmp_path, learning_rate=learning_rate, extra=settings)
        plant(trainer, Fault("loss", 2, 1))
        with pytest.raises(NonFiniteError, match=r"The last good state is in .*checkpoint-2"):
            trainer.train()
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in trainer.model.named_parameters())


def test_too_many_bad_steps_in_a_row_halt(tmp_path):
    extra = {"guard": GuardArguments(nanguard_max_bad_steps=3, nanguard_max_rewinds=0)}
    trainer = build("plain", tmp_path, gradient_accumulation_steps=1, max_steps=10, extra=extra)
    plant(trainer, Fault("loss", 1), *[Fault("gradient", step, parameter=LAYER) for step in (3, 4, 5)])
    with pytest.raises(NonFiniteError, match="3 bad steps in a row"):
        trainer.train()
    assert trainer.state.global_step == 5
    assert [event["action"] for event in events_of(trainer)] == ["skipped"] * 4 + ["halted"]


def test_a_nan_weight_is_named_and_halts_at_once(tmp_path):
    trainer = build("plain", tmp_path, extra={"guard": GuardArguments(nanguard_max_rewinds=0)})
    plant(trainer, Fault("weight", 1, 0, parameter=LAYER))
    with pytest.raises(NonFiniteError, match="earlier checkpoint"):
        trainer.train()
    event = events_of(trainer)[-1]
    assert (event["signal"], event["action"], event["culprit"]["parameter"]) == ("param_nonfinite", "halted", LAYER)
    assert not list(Path(tmp_path).glob("checkpoint-*"))


def test_a_fixed_threshold_skips(tmp_path):
    stock = build("plain", tmp_path / "stock", guard=False, gradient_accumulation_steps=1)
    stock.train()
    norms = [row["grad_norm"] for row in stock.state.log_history if "grad_norm" in row]
    bound = norms[0] * 0.999
    trainer = _train(tmp_path, guard_settings={"skip_grad_norm": bound}, gradient_accumulation_steps=1, max_steps=1)
    [event] = events_of(trainer)
    assert (event["signal"], event["action"], event["values"]["threshold"]) == ("grad_spike", "skipped", bound)
    assert event["values"]["grad_norm"] == pytest.approx(norms[0])


@pytest.mark.parametrize("policy", ["drop", "skip", "repair", "halt"])
def test_norm_overflow_blames_no_parameter(policy, tmp_path):
    extra = {"guard": GuardArguments(nanguard_on_nonfinite=policy, nanguard_on_halt="stop")}
    trainer = build("plain", tmp_path, dtype=torch.float16, optim="sgd", gradient_accumulation_steps=1, extra=extra)
    original = trainer.compute_loss

    def scaled(model, inputs, *args, **kwargs):
        loss = original(model, inputs, *args, **kwargs)
        if trainer.state.global_step == 1:
            loss = loss * 1.0
            for parameter in model.parameters():
                loss = loss + _Fill.apply(parameter, 2e4)
        return loss

    trainer.compute_loss = scaled
    trainer.train()
    event, *spikes = events_of(trainer)  # the true norm and the loss are far above those before
    assert {event["signal"] for event in spikes} <= {"grad_spike", "loss_spike"}
    assert (event["cause"], event["action"], event["culprit"]["parameter"]) == ("norm_overflow", "observed", None)
    assert event["values"]["num_bad_parameters"] == 0
    assert trainer.state.global_step == trainer.args.max_steps


class _Fill(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, value):
        ctx.like, ctx.value = parameter, value
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(ctx.like, ctx.value), None


def test_a_transient_fault_costs_nothing(tmp_path):
    stock = build("plain", tmp_path / "stock", guard=False)
    stock.train()
    expected = tensors_of(stock)
    trainer = _train(tmp_path, Fault("loss", 1, 1, once=True))
    assert_same(tensors_of(trainer), expected)
    [event] = events_of(trainer)
    assert (event["cause"], event["action"]) == ("transient", "repaired")
    assert losses_of(trainer) == losses_of(stock)


@pytest.mark.parametrize("kind", ["plain", "sft"])
def test_a_non_finite_loss_with_finite_gradients_is_not_learned_from(kind, tmp_path):
    trainer = build(kind, tmp_path)
    original = trainer.compute_loss

    def add_inf(model, inputs, *args, **kwargs):
        loss = original(model, inputs, *args, **kwargs)
        return loss + INF if trainer.state.global_step == 1 else loss

    trainer.compute_loss = add_inf
    trainer.train()
    assert {(e["signal"], e["action"], e["step"]) for e in events_of(trainer)} == {("loss_nonfinite", "skipped", 1)}
    assert all(math.isfinite(loss) for loss in losses_of(trainer))


def test_an_error_inside_the_loss_is_raised_and_written(tmp_path):
    trainer = build("plain", tmp_path)
    plant(trainer, Fault("error", 1, 1))
    with pytest.raises(RuntimeError, match="planted error"):
        trainer.train()
    [event] = events_of(trainer)
    assert (event["signal"], event["action"], event["micro_step"]) == ("loss_error", "refused", 1)


@pytest.mark.parametrize("place", [(0, 0), (1, 1)])
@pytest.mark.parametrize("kind", ["plain", "sft", "grpo"])
def test_an_error_inside_the_loss_can_be_dropped(place, kind, tmp_path):
    reference = build(kind, tmp_path / "reference", without(stock_class(kind), place), guard=False)
    reference.train()
    expected = tensors_of(reference)
    trainer = _train(tmp_path, Fault("error", *place), kind=kind, guard_settings={"on_loss_error": "drop"})
    assert_same(tensors_of(trainer), expected)
    [event] = events_of(trainer)
    assert (event["signal"], event["action"]) == ("loss_error", "dropped")
    assert "planted error" in event["message"]


def test_a_missing_loss_says_so(tmp_path):
    trainer = build("plain", tmp_path)
    dataset = token_dataset(12).remove_columns("labels")
    trainer.train_dataset = dataset
    with pytest.raises(ValueError, match="did not return a loss"):
        trainer.train()
    assert events_of(trainer)[0]["signal"] == "loss_missing"


def test_a_loss_of_none_says_so(tmp_path):
    from hf_nanguard import LossMissingError

    class Forgetful(stock_class("plain")):
        def compute_loss(self, *args, **kwargs):
            super().compute_loss(*args, **kwargs)

    trainer = build("plain", tmp_path, Forgetful)
    with pytest.raises(LossMissingError, match="must return a loss, got None"):
        trainer.train()
    assert events_of(trainer)[0]["signal"] == "loss_missing"


def _zero_loss(module, inputs, outputs):
    outputs.loss = outputs.loss * 0.0


@pytest.mark.parametrize("is_own", [False, True])
def test_an_exact_zero_without_gradient_is_observed_once_unless_the_loss_is_the_users(is_own, tmp_path):
    """A loss of the user's may have a margin, beyond which it is 0."""
    trainer = build("plain", tmp_path)
    trainer.model.register_forward_hook(_zero_loss)
    original = trainer.compute_loss
    if is_own:
        trainer.compute_loss = lambda *args, **kwargs: original(*args, **kwargs)
    trainer.train()
    assert [row["grad_norm"] for row in trainer.state.log_history if "loss" in row] == [0.0] * 4
    expected = [] if is_own else [("loss_zero", "observed")]
    assert [(e["signal"], e["action"]) for e in events_of(trainer)] == expected


def test_a_bad_evaluation_is_an_event_and_never_best(tmp_path):
    settings = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "loss",
        "extra": {"eval_dataset": token_dataset(8, seed=5)}, "per_device_eval_batch_size": 4,
    }  # fmt: skip

    class Spoiled(stock_class("plain")):
        def compute_loss(self, model, inputs, *args, **kwargs):
            result = super().compute_loss(model, inputs, *args, **kwargs)
            if model.training or self.state.global_step != 3 or (inputs["input_ids"][:, 0] < 7).any():
                return result
            return result[0] - INF, result[1]

    trainer = build("plain", tmp_path, Spoiled, **settings)
    trainer.train()
    [event] = events_of(trainer)
    assert (event["signal"], event["action"], event["step"]) == ("eval_nonfinite", "observed", 3)
    assert event["micro_step"] == 1
    assert math.isfinite(trainer.state.best_metric)
    assert trainer.state.best_global_step != 3


HEALTHY = {
    "large first norm": {"learning_rate": 1e-3},
    "long": {"max_steps": 120, "gradient_accumulation_steps": 1, "num_train_epochs": 30},
}


@pytest.mark.parametrize("case", HEALTHY)
def test_healthy_runs_raise_no_event(case, tmp_path):
    trainer = build("plain", tmp_path, **HEALTHY[case])
    if case == "large first norm":
        with torch.no_grad():
            trainer.model.lm_head.weight.mul_(500)
    trainer.train()
    assert events_besides_spikes(trainer) == []


def test_grpo_with_a_zero_loss_and_a_live_gradient_is_healthy(tmp_path):
    """On-policy, with completions of one length, the loss is the mean advantage: zero up to rounding."""
    trainer = build("grpo", tmp_path, generation_kwargs={"min_new_tokens": 4})
    trainer.train()
    assert max(map(abs, losses_of(trainer))) < 1e-6
    assert max(row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row) > 1e-3
    assert events_of(trainer) == []


def test_grpo_with_equal_rewards_goes_on_as_stock(tmp_path):
    same = {"extra": {"reward_funcs": lambda completions, **kwargs: [1.0] * len(completions)}}
    stock = build("grpo", tmp_path / "stock", guard=False, **same)
    stock.train()
    expected = tensors_of(stock)
    trainer = build("grpo", tmp_path / "guarded", **same)
    trainer.train()
    assert_same(tensors_of(trainer), expected)
    assert events_of(trainer) == []


def test_minus_inf_masks_are_healthy(tmp_path):
    from transformers import TrainingArguments

    from hf_nanguard import GuardedTrainer

    from ..trainers import common_arguments

    rows = token_dataset(24).map(lambda row: {"attention_mask": [1] * 5 + [0] * 3})
    trainer = GuardedTrainer(tiny_t5(), TrainingArguments(**common_arguments(tmp_path)), train_dataset=rows)
    trainer.train()
    assert events_of(trainer) == []


def test_a_suspected_batch_that_is_dropped_is_one_event(tmp_path):
    """Its loss alone is bad: the norm, by which a suspicion without consequence is known, is finite."""
    rows = token_dataset(24).map(lambda row, i: {"attention_mask": [int(i != 5)] * 8}, with_indices=True)
    trainer = build("plain", tmp_path, extra={"train_dataset": rows}, train_sampling_strategy="sequential", max_steps=2)
    planted = plant(trainer, Fault("constant", step=0, micro_step=2))
    trainer.train()
    assert planted.triggered
    [event] = events_of(trainer)
    assert (event["signal"], event["action"], event["micro_step"]) == ("input_out_of_range", "dropped", 2)


def test_a_nan_moment_ends_the_run_with_the_parameter_named(tmp_path):
    """Loss and gradients are finite when Adam's moment is not; the weight it ruins is named one step later."""
    trainer = build("plain", tmp_path, extra={"guard": GuardArguments(nanguard_max_rewinds=0)})
    plant(trainer, Fault("moment", 1, 0, parameter=LAYER))
    with pytest.raises(NonFiniteError, match=f"parameter {LAYER} contains NaN at step 2"):
        trainer.train()
    assert trainer.state.global_step == 2


def _vision(tmp_path, trainer_class):
    from transformers import TrainingArguments

    from ..trainers import common_arguments

    generator = torch.Generator().manual_seed(0)
    rows = [{"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": i % 3} for i in range(24)]
    args = TrainingArguments(**common_arguments(tmp_path, train_sampling_strategy="sequential"))
    return trainer_class(BY_NAME["vit"].build(), args, train_dataset=rows)


@pytest.mark.parametrize(("kind", "value"), [("input", NAN), ("input", INF), ("label", 3)])
def test_a_bad_pixel_or_class_is_dropped_with_its_row(kind, value, tmp_path):
    from transformers import Trainer

    from hf_nanguard import GuardedTrainer

    reference = _vision(tmp_path / "reference", without(Trainer, (1, 1)))
    reference.train()
    expected = tensors_of(reference)
    trainer = _vision(tmp_path / "guarded", GuardedTrainer)
    collate = trainer.data_collator
    calls = []

    def spoil(examples):
        batch = collate(examples)
        calls.append(None)
        if len(calls) == 5:
            field = "pixel_values" if kind == "input" else "labels"
            batch[field].view(-1)[-1] = value
        return batch

    trainer.data_collator = spoil
    trainer.train()
    assert_same(tensors_of(trainer), expected)
    [event] = events_of(trainer)
    assert (event["signal"], event["action"]) == (
        "input_nonfinite" if kind == "input" else "label_out_of_range",
        "dropped",
    )
    assert (event["culprit"]["samples"], event["culprit"]["rows"]) == ([1], [9])


def test_missing_targets_that_the_loss_leaves_out_are_trained_on(tmp_path):
    """NaN in a float field may mean "not known": a loss that handles it keeps its batch, and that is told once."""
    from transformers import Trainer, TrainingArguments

    from ..trainers import common_arguments

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x, labels):
            known = ~torch.isnan(labels)
            out = self.layer(x).squeeze(-1)
            return {"loss": (out[known] - labels[known]).square().mean(), "logits": out}

    generator = torch.Generator().manual_seed(0)
    rows = [{"x": torch.randn(4, generator=generator), "labels": NAN if i % 2 else 1.0} for i in range(24)]

    def make(folder, guard):
        torch.manual_seed(0)
        args = TrainingArguments(**common_arguments(folder, per_device_train_batch_size=6))
        return (guarded(Trainer) if guard else Trainer)(Net(), args, train_dataset=rows)

    stock = make(tmp_path / "stock", False)
    stock.train()
    trainer = make(tmp_path / "guarded", True)
    trainer.train()
    assert_same(tensors_of(trainer), tensors_of(stock), rng=False)
    assert [(e["signal"], e["action"]) for e in events_of(trainer)] == [("input_nonfinite", "observed")]
