"""What the log does not show, planted in real runs: each is caught at the right step with the right name."""

import copy
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_nanguard import Guard, GuardArguments, NanGuardCallback, NonFiniteError, Policy, guarded
from hf_nanguard.testing import NAN, Fault, plant

from ...models import tiny_llama, token_dataset, token_rows
from ...trainers import build, common_arguments, events_of, metric_rows_of

CHECKED = GuardArguments(nanguard_max_rewinds=0, nanguard_weight_check_steps=2)


class SpoilMoment(TrainerCallback):
    """Writes NaN into Adam's first moment of one row of a parameter once a step has passed."""

    def __init__(self, parameter, row, after_step):
        self.parameter, self.row, self.after_step = parameter, row, after_step

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step == self.after_step:
            [parameter] = [p for name, p in model.named_parameters() if name.endswith(self.parameter)]
            optimizer.optimizer.state[parameter]["exp_avg"][self.row] = NAN


def emitted(trainer, *signals):
    return [event for event in events_of(trainer) if event["signal"] in signals]


# ---- weights and moments ----


@pytest.mark.parametrize("kind", ["plain", "sft", "grpo"])
def test_a_moment_of_a_row_that_no_batch_uses(kind, tmp_path):
    """Loss and gradients stay finite: only a check of the state finds it."""
    spoil = SpoilMoment("embed_tokens.weight", 2, after_step=1)
    trainer = build(kind, tmp_path, max_steps=8, save_strategy="steps", save_steps=1,
                    extra={"guard": CHECKED, "callbacks": [spoil]})  # fmt: skip
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    [event] = emitted(trainer, "optimizer_nonfinite", "param_nonfinite")
    name = "model.embed_tokens.weight"
    # Spoiled after the first step was checked and before it was saved: the save checks as well.
    assert (event["signal"], event["action"], event["step"]) == ("optimizer_nonfinite", "halted", 1)
    assert (event["culprit"]["parameter"], event["culprit"]["phase"]) == (name, "optimizer")
    assert (event["cause"], event["values"]["rows"], event["values"]["state"]) == ("optimizer_state", [2], "exp_avg")
    assert "No checkpoint was saved" in str(caught.value)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_the_last_good_checkpoint_is_named(tmp_path):
    spoil = SpoilMoment("embed_tokens.weight", 2, after_step=3)
    trainer = build("plain", tmp_path, max_steps=8, save_strategy="steps", save_steps=2,
                    extra={"guard": CHECKED, "callbacks": [spoil]})  # fmt: skip
    with pytest.raises(NonFiniteError, match=r"The last good checkpoint is .*checkpoint-2\.") as caught:
        trainer.train()
    [event] = emitted(trainer, "optimizer_nonfinite", "param_nonfinite")
    assert (event["signal"], event["step"]) == ("param_nonfinite", 3)  # the update made NaN of it, step 4 was due
    assert (event["culprit"]["parameter"], event["cause"]) == ("model.embed_tokens.weight", "optimizer_state")
    assert event["values"]["rows"] == [2]
    assert "model.embed_tokens.weight" in str(caught.value)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize("on_halt", ["raise", "stop"])
def test_a_bad_state_is_never_saved(on_halt, tmp_path):
    """No check is due before the save, which checks by itself."""
    guard = GuardArguments(nanguard_max_rewinds=0, nanguard_weight_check_steps=0, nanguard_on_halt=on_halt)
    spoil = SpoilMoment("embed_tokens.weight", 2, after_step=1)
    trainer = build("plain", tmp_path, max_steps=6, save_strategy="steps", save_steps=3,
                    extra={"guard": guard, "callbacks": [spoil]})  # fmt: skip
    if on_halt == "raise":
        with pytest.raises(NonFiniteError):
            trainer.train()
    else:
        trainer.train()
    assert trainer.state.global_step == 3
    assert [event["step"] for event in emitted(trainer, "param_nonfinite")] == [3]
    assert not list(tmp_path.glob("checkpoint-*"))


def test_observe_reports_each_tensor_once_and_goes_on(tmp_path):
    guard = GuardArguments(nanguard_max_rewinds=0, nanguard_weight_check_steps=1, nanguard_mode="observe")
    spoil = SpoilMoment("embed_tokens.weight", 2, after_step=1)
    trainer = build("plain", tmp_path, max_steps=5, extra={"guard": guard, "callbacks": [spoil]})
    trainer.train()
    events = emitted(trainer, "param_nonfinite", "optimizer_nonfinite")
    assert [(event["signal"], event["action"], event["step"]) for event in events] == [
        ("optimizer_nonfinite", "observed", 0), ("param_nonfinite", "observed", 1),
    ]  # fmt: skip
    assert trainer.state.global_step == 5


@pytest.mark.parametrize("lora", [False, True])
def test_an_eps_that_underflows_in_float16(lora, tmp_path):
    trainer = build("plain", tmp_path, dtype=torch.float16, lora=lora, max_steps=6, optim="adamw_torch",
                    warmup_steps=0, learning_rate=1e-3, extra={"guard": GuardArguments(nanguard_max_rewinds=0, nanguard_weight_check_steps=1)})  # fmt: skip
    if lora:
        for parameter in trainer.model.parameters():
            parameter.data = parameter.data.half() if parameter.requires_grad else parameter.data
    with pytest.raises(NonFiniteError, match="eps"):
        trainer.train()
    [event] = emitted(trainer, "param_nonfinite")
    assert (event["cause"], event["action"], event["step"]) == ("adam_eps_underflow", "halted", 0)
    assert any(remedy["works"] for remedy in event["remedies"])


def test_a_callback_checks_weights_too(tmp_path):
    spoil = SpoilMoment("embed_tokens.weight", 2, after_step=1)
    callback = NanGuardCallback(GuardArguments(nanguard_max_rewinds=0, nanguard_weight_check_steps=1))
    trainer = build("plain", tmp_path, guard=False, max_steps=5, extra={"callbacks": [callback, spoil]})
    with pytest.raises(NonFiniteError, match="No checkpoint was saved"):
        trainer.train()
    assert [(event["signal"], event["step"]) for event in events_of(trainer)] == [("optimizer_nonfinite", 0)]


# ---- movement ----


@pytest.mark.parametrize("kind", ["plain", "sft"])
@pytest.mark.parametrize(("rate", "stalls"), [(1e-7, True), (1e-2, False)])
def test_bf16_weights_that_no_longer_move(kind, rate, stalls, tmp_path):
    trainer = build(kind, tmp_path, dtype=torch.bfloat16, max_steps=6, learning_rate=rate, warmup_steps=0,
                    weight_decay=0.0, extra={"guard": GuardArguments(nanguard_max_rewinds=0, nanguard_weight_check_steps=1)})  # fmt: skip
    trainer.train()
    events = emitted(trainer, "update_stalled")
    assert [(event["action"], event["cause"]) for event in events] == [("observed", "rounding_stall")] * stalls
    shares = [row["nanguard/update_share"] for row in metric_rows_of(trainer)]
    assert len(shares) == 6
    assert max(shares) < 0.01 if stalls else min(shares) > 0.3


def test_lora_in_float32_moves(tmp_path):
    trainer = build("sft", tmp_path, lora=True, max_steps=6, learning_rate=1e-7, warmup_steps=0,
                    extra={"guard": GuardArguments(nanguard_max_rewinds=0, nanguard_weight_check_steps=1)})  # fmt: skip
    trainer.train()
    assert events_of(trainer) == []


# ---- activations ----


class Grow(Trainer):
    """A trainer whose last MLP puts out twice as much every eight steps, beginning at about 100."""

    def training_step(self, *args, **kwargs):
        mlp = self.model.model.layers[1].mlp
        with torch.no_grad():
            if self.state.global_step == 0:
                mlp.up_proj.weight.mul_(2000)
            mlp.down_proj.weight.mul_(2 ** (1 / 8))
        return super().training_step(*args, **kwargs)


def test_an_overflow_of_float16_is_announced(tmp_path):
    guard = GuardArguments(
        nanguard_activation_steps=2,
        nanguard_activation_modules="*.down_proj",
        nanguard_max_bad_steps=2,
        nanguard_max_rewinds=0,
    )
    arguments = common_arguments(
        tmp_path, max_steps=120, learning_rate=1e-9, optim="sgd", weight_decay=0.0, gradient_accumulation_steps=1
    )
    dataset = Dataset.from_list(token_rows(48))
    trainer = guarded(Grow)(
        tiny_llama(dtype=torch.float16), TrainingArguments(**arguments), train_dataset=dataset, guard=guard
    )
    with pytest.raises(NonFiniteError):
        trainer.train()
    events = events_of(trainer)
    forecast = next(event for event in events if event["signal"] == "activation_headroom")
    broken = next(event for event in events if event["signal"] in ("loss_nonfinite", "grad_nonfinite"))
    assert forecast["culprit"]["module"] == "model.layers.1.mlp.down_proj"
    assert (forecast["action"], forecast["cause"]) == ("observed", "fp16_overflow")
    ahead = broken["step"] - forecast["step"]
    assert ahead >= 20
    assert 0.5 * ahead <= forecast["values"]["overflow_step"] - forecast["step"] <= 2 * ahead
    bits = [row["nanguard/headroom_bits"] for row in metric_rows_of(trainer) if "nanguard/headroom_bits" in row]
    assert bits[0] > 8
    assert min(bits) < 1


# ---- a loop written by hand ----


def test_a_loop_written_by_hand_has_monitors_too(tmp_path):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(network.parameters())
    events = []
    policy = Policy(max_rewinds=0, weight_check_steps=1, activation_steps=1, activation_modules="*")
    guard = Guard(network, optimizer, policy, on_event=events.append)
    batch = torch.randn(8, 4)

    def loss_fn(batch):
        return network(batch).square().mean()

    guard.step(loss_fn, [batch])
    assert events == []
    metrics = guard.monitor_set.metrics()
    assert 0 < metrics["nanguard/update_share"] <= 1
    assert metrics["nanguard/headroom_bits"] > 100
    optimizer.state[network[0].weight]["exp_avg_sq"][1, 2] = NAN
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        guard.step(loss_fn, [batch])
    assert [(event["signal"], event["action"], event["step"]) for event in events] == [("param_nonfinite", "halted", 1)]
    assert events[0]["culprit"]["parameter"] == "0.weight"
    assert events[0]["values"]["rows"] == [1]


# ---- state ----


def test_what_monitors_know_survives_a_resume(tmp_path):
    guard = GuardArguments(nanguard_activation_steps=1, nanguard_weight_check_steps=1)
    first = build("plain", tmp_path, max_steps=4, save_strategy="steps", save_steps=4, extra={"guard": guard})
    first.train()
    [monitor] = [m for m in first.nanguard.guard.monitor_set.monitors if type(m).__name__ == "ActivationMonitor"]
    second = build("plain", tmp_path, max_steps=6, extra={"guard": guard})
    second.train(resume_from_checkpoint=str(Path(tmp_path) / "checkpoint-4"))
    [again] = [m for m in second.nanguard.guard.monitor_set.monitors if type(m).__name__ == "ActivationMonitor"]
    assert monitor.headroom.trends
    for name, trend in monitor.headroom.trends.items():
        assert len(trend.samples) == 4
        assert list(again.headroom.trends[name].samples)[:4] == list(trend.samples)
        assert [step for step, _ in again.headroom.trends[name].samples] == list(range(6))


def test_a_fault_in_the_weights_of_a_step_is_not_a_matter_of_its_batch(tmp_path):
    trainer = build("plain", tmp_path, max_steps=4, extra={"guard": CHECKED})
    plant(trainer, Fault("gradient", 1, 0, parameter="model.norm.weight"))
    trainer.train()
    assert [event["signal"] for event in events_of(trainer)] == ["grad_nonfinite"]
    assert all(math.isfinite(row["loss"]) for row in trainer.state.log_history if "loss" in row)


# ---- what must not end a run, or be saved ----


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_callback_that_stops_a_run_lets_nothing_bad_be_saved(strategy, tmp_path):
    spoil = SpoilMoment("embed_tokens.weight", 2, after_step=3)
    callback = NanGuardCallback(
        GuardArguments(nanguard_max_rewinds=0, nanguard_weight_check_steps=1, nanguard_on_halt="stop")
    )
    trainer = build("plain", tmp_path, guard=False, max_steps=8, gradient_accumulation_steps=1, save_steps=2,
                    save_strategy=strategy, eval_strategy=strategy, eval_steps=2, load_best_model_at_end=True,
                    per_device_train_batch_size=8,
                    extra={"callbacks": [callback, spoil], "eval_dataset": token_dataset(4)})  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 3
    saved = ["checkpoint-2"] if strategy == "steps" else []
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == saved
    assert str(trainer.state.best_model_checkpoint).endswith("checkpoint-2") == bool(saved)


def test_a_callback_checks_before_a_save(tmp_path):
    """No check is due before it."""
    spoil = SpoilMoment("embed_tokens.weight", 2, after_step=3)
    callback = NanGuardCallback(GuardArguments(nanguard_max_rewinds=0, nanguard_weight_check_steps=0))
    trainer = build("plain", tmp_path, guard=False, max_steps=8, save_strategy="steps", save_steps=2,
                    extra={"callbacks": [callback, spoil]})  # fmt: skip
    with pytest.raises(NonFiniteError, match=r"The last good checkpoint is .*checkpoint-2\."):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_mask_in_a_frozen_weight_does_not_keep_a_good_state_from_being_saved(tmp_path):
    trainer = build("plain", tmp_path, max_steps=4, extra={"guard": GuardArguments(nanguard_on_nonfinite="halt")})
    trainer.model.register_parameter("mask", torch.nn.Parameter(torch.full((3,), -math.inf), requires_grad=False))
    plant(trainer, Fault("gradient", 1, 0, parameter="model.norm.weight"))
    with pytest.raises(NonFiniteError, match="The last good state is in"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_second_run_with_another_optimizer_is_watched(tmp_path):
    trainer = build("plain", tmp_path, max_steps=2, extra={"guard": CHECKED})
    trainer.train()
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.add_callback(SpoilMoment("embed_tokens.weight", 2, after_step=1))
    with pytest.raises(NonFiniteError, match="embed_tokens"):
        trainer.train()


class Copying(Trainer):
    """A trainer that keeps a copy of its model, as those with a moving average do."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.copy = copy.deepcopy(self.model)
        return loss


def test_a_model_may_be_copied_at_a_step_that_is_checked(tmp_path):
    guard = GuardArguments(nanguard_activation_steps=1, nanguard_attention_steps=1, nanguard_weight_check_steps=1)
    trainer = build("plain", tmp_path, Copying, max_steps=2, extra={"guard": guard})
    trainer.train()
    assert events_of(trainer) == []
    trainer.copy(input_ids=torch.tensor([[5, 6, 7]]))


def test_missing_targets_cost_no_sample(tmp_path):
    """A loss may leave NaN out; which samples are bad is then not for a collator to say."""

    class Regression(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 2)

        def forward(self, x, labels):
            known = ~labels.isnan()
            return {"loss": ((self.linear(x) - labels.nan_to_num()) ** 2)[known].mean()}

    rows = [{"x": torch.randn(4), "labels": torch.tensor([float(index), NAN])} for index in range(24)]
    trainer = guarded(Trainer)(
        Regression(), TrainingArguments(**common_arguments(tmp_path)), train_dataset=rows,
        guard=GuardArguments(nanguard_on_bad_input="drop_samples"),
    )  # fmt: skip
    trainer.train()
    assert {event["action"] for event in events_of(trainer)} == {"observed"}
