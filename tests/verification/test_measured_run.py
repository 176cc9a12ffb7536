"""Trials of real trainers: a healthy one is best, and each planted fault shows in its own figure."""

import pytest
import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from hf_nanguard import ArgumentError, GuardArguments
from hf_nanguard.testing import INF, NAN, Fault, plant
from hf_nanguard.verification.measured_run import measure_memory, verify

from ..models import text_rows, token_dataset, token_rows
from ..trainers import build

STEPS = 6


def learnable(kind):
    """Few rows, many times over: what is held out is in what is left."""
    return {"plain": Dataset.from_list(token_rows(4) * 12), "sft": Dataset.from_list(text_rows(4) * 12)}[kind]


def build_learnable(kind, folder, **options):
    extra = {"train_dataset": learnable(kind), **options.pop("extra", {})}
    return build(kind, folder, extra=extra, warmup_steps=0, **options)


@pytest.mark.parametrize("kind", ["plain", "sft", "grpo"])
@pytest.mark.parametrize("guard", [False, True], ids=["stock", "guarded"])
def test_a_healthy_configuration(kind, guard, tmp_path):
    options = {"guard": guard, "max_steps": 1000, "max_grad_norm": 0.2, "save_strategy": "steps", "save_steps": 1}
    make_trainer = build if kind == "grpo" else build_learnable
    trainer = make_trainer(kind, tmp_path / "own", **options)
    seen = []
    found = verify(trainer, STEPS, tmp_path / "trial", lambda step, loss: seen.append((step, loss)))
    assert (found.num_done, found.error, found.bad_weights, found.events) == (STEPS, None, {}, [])
    assert found.verdict == "best" or (kind == "grpo" and found.reasons[0].startswith("held-out reward"))
    assert (found.num_seen, found.num_used) == (3 * STEPS, 3 * STEPS)
    assert found.num_forwards >= 3 * STEPS
    assert found.num_bad_forwards == found.num_bad_steps == found.num_nan_gradients == found.num_inf_gradients == 0
    assert max(found.norms_after) == pytest.approx(0.2, rel=1e-3)
    assert max(found.norms) > 0.2
    assert [step for step, _ in seen] == list(range(1, STEPS + 1))
    assert found.measure == ("reward" if kind == "grpo" else "loss")
    assert found.memory > 2**20
    assert not list((tmp_path / "own").rglob("*"))
    assert not list(tmp_path.glob("**/checkpoint-*"))


def test_norms_are_those_of_the_run(tmp_path):
    """Against a stock run without clipping, whose first step has the same weights and batches."""
    options = {"max_grad_norm": 0.0, "warmup_steps": 0, "extra": {"train_dataset": token_dataset(48)}}
    found = verify(build("plain", tmp_path / "a", dropout=0.0, **options), 2)
    assert found.norms == pytest.approx(found.norms_after, rel=1e-5)
    options["extra"] = {"train_dataset": token_dataset(48).select(range(9, 48))}
    stock = build("plain", tmp_path / "b", guard=False, dropout=0.0, **options)
    stock.train()
    assert found.norms[0] == pytest.approx(stock.state.log_history[0]["grad_norm"], rel=1e-5)


def test_a_bad_micro_batch_is_acceptable(tmp_path):
    trainer = build_learnable("plain", tmp_path, gradient_accumulation_steps=1)
    plant(trainer, Fault("gradient", 3, 0, parameter="model.norm.weight"))
    found = verify(trainer, 12)
    assert found.verdict == "acceptable"
    assert [reason.split(":")[0] for reason in found.reasons] == ["gradients"]
    assert (found.num_bad_steps, found.num_nan_gradients, found.num_inf_gradients) == (1, 1, 0)
    assert (found.num_seen, found.num_used, len(found.norms)) == (12, 11, 11)
    assert [event["signal"] for event in found.events] == ["grad_nonfinite"]


def test_too_many_bad_micro_batches_fail(tmp_path):
    trainer = build(
        "plain", tmp_path, gradient_accumulation_steps=1, extra={"guard": GuardArguments(nanguard_autopsy=False)}
    )
    plant(trainer, Fault("loss", 1), Fault("loss", 3))
    found = verify(trainer, 8)
    assert found.verdict == "failed"
    assert found.success_rate == 0.75
    assert any(reason.startswith("success rate: 75.0%") for reason in found.reasons)


class SpoilWeight(TrainerCallback):
    """Writes NaN into a weight after a step."""

    def __init__(self, name, after_step):
        self.name, self.after_step = name, after_step

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.after_step:
            model.get_parameter(self.name).data.view(-1)[0] = NAN


@pytest.mark.parametrize("kind", ["plain", "sft"])
def test_bad_logits_and_a_run_that_ends_fail(kind, tmp_path):
    guard = GuardArguments(nanguard_max_bad_steps=2, nanguard_autopsy=False)
    trainer = build(kind, tmp_path, gradient_accumulation_steps=1, extra={"guard": guard})
    trainer.add_callback(SpoilWeight("model.norm.weight", 4))
    found = verify(trainer, 10)
    assert found.verdict == "failed"
    assert found.error.startswith("NonFiniteError: ")
    assert found.num_done < 10
    assert found.bad_weights == {"model.norm.weight": "nan"}
    assert found.num_bad_forwards == 1  # the step after it; what the guard runs again is not counted
    assert found.before is not None
    assert found.after is None


def test_an_error_of_the_run_is_a_finding(tmp_path):
    trainer = build("plain", tmp_path)
    plant(trainer, Fault("error", 2))
    found = verify(trainer, 5)
    assert (found.verdict, found.num_done, found.error) == ("failed", 2, "RuntimeError: planted error")


class Fussy(Trainer):
    """A trainer with an assertion in its loss, as people write them."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        assert self.state.global_step < 2, "two tokens are missing"
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_any_error_of_the_run_is_a_finding(tmp_path):
    found = verify(build("plain", tmp_path, Fussy), 5)
    assert (found.verdict, found.num_done, found.error) == ("failed", 2, "AssertionError: two tokens are missing")


def test_a_trial_that_is_halted_leaves_no_checkpoint(tmp_path):
    guard = GuardArguments(nanguard_max_bad_steps=2, nanguard_autopsy=False)
    trainer = build("plain", tmp_path, gradient_accumulation_steps=1, extra={"guard": guard})
    plant(trainer, Fault("loss", 1), Fault("loss", 2))
    found = verify(trainer, 5)
    assert found.error.startswith("NonFiniteError: ")
    assert "The last good state is in" not in found.error
    assert not list(tmp_path.glob("**/checkpoint-*"))


def test_a_mask_in_a_frozen_weight_is_healthy(tmp_path):
    trainer = build_learnable("plain", tmp_path)
    trainer.model.register_parameter("mask", torch.nn.Parameter(torch.full((3,), -INF), requires_grad=False))
    found = verify(trainer, 3)
    assert (found.bad_weights, found.verdict) == ({}, "best")


def test_a_callback_that_wants_the_best_model(tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 1}
    saves = {"save_strategy": "steps", "save_steps": 1}
    trainer = build_learnable("plain", tmp_path, extra={"eval_dataset": token_dataset(4)}, **best, **saves)
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=1))
    assert verify(trainer, 2).num_done == 2


def test_a_rising_loss_fails(tmp_path):
    trainer = build("plain", tmp_path, learning_rate=3.0, warmup_steps=0)
    found = verify(trainer, STEPS)
    assert found.verdict == "failed"
    assert found.after > 1.02 * found.before
    assert any(reason.startswith("held-out loss: ") for reason in found.reasons)


class Unclip(TrainerCallback):
    """Makes gradients larger again once they are clipped."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for parameter in model.parameters():
            parameter.grad.mul_(1.5)


def test_clipping_that_does_not_act_fails(tmp_path):
    trainer = build_learnable("plain", tmp_path, max_grad_norm=0.1)
    trainer.add_callback(Unclip())
    found = verify(trainer, 3)
    assert found.norms_after == pytest.approx([0.15] * 3, rel=1e-3)
    [reason] = found.reasons
    assert (found.verdict, reason.split(":")[0]) == ("failed", "clipping")


def test_a_guard_that_is_off_is_turned_on(tmp_path):
    guard = GuardArguments(nanguard_mode="off")
    trainer = build_learnable("plain", tmp_path, gradient_accumulation_steps=1, extra={"guard": guard})
    plant(trainer, Fault("loss", 2))
    found = verify(trainer, 12)
    assert (found.verdict, found.num_used) == ("acceptable", 11)
    assert guard.nanguard_mode == "off"


@pytest.mark.parametrize("steps", [1, 0, -3, True, 2.5, "20"])
def test_steps_that_cannot_be(steps, tmp_path):
    with pytest.raises(ArgumentError, match="steps must be an integer of at least 2"):
        verify(build("plain", tmp_path), steps)


def test_too_little_data_to_hold_any_out(tmp_path):
    trainer = build("sft", tmp_path, extra={"train_dataset": Dataset.from_list(text_rows(4))})
    found = verify(trainer, 2)
    assert (found.before, found.after) == (None, None)
    [check] = [check for check in found.checks if check.name == "held-out loss"]
    assert check.verdict == "not measured"


def test_memory_of_a_cpu_is_called_what_it_is():
    peak, kind = measure_memory(torch.device("cpu"))
    assert "process" in kind
    held = torch.zeros(2**26)  # 256 MiB
    assert measure_memory(torch.device("cpu"))[0] >= peak
    assert held.sum() == 0
