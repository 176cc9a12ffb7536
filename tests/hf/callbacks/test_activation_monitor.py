"""The callback on real trainers: overflows are announced by name before they come, healthy runs are silent."""

import json
import math
from contextlib import nullcontext

import pytest
import torch
from transformers import TrainerCallback

from hf_nanguard import ActivationMonitorCallback, ArgumentError
from hf_nanguard.testing import OperationCounter
from tests.models import token_dataset
from tests.reference import assert_same, losses_of, tensors_of
from tests.trainers import build, events_of

HALF = {"dtype": torch.float16, "optim": "sgd", "learning_rate": 1e-4, "gradient_accumulation_steps": 1}
DOWN = "model.layers.1.mlp.down_proj"
BLOCK = "model.layers.1"


class Grow(TrainerCallback):
    """Makes a weight a little larger after every step, until `until`, and notes the step whose outputs overflow."""

    def __init__(self, module, factor, until=math.inf):
        self.name, self.factor, self.until = module, factor, until
        self.end = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.state = state
        self.weight = _weight(model, self.name)
        _weight(model, "model.layers.1.mlp.up_proj").data.mul_(
            5000
        )  # so that the block's outputs follow from the start
        block = next(m for name, m in model.named_modules() if name.endswith(BLOCK))
        self.handle = block.register_forward_hook(self._look)

    def _look(self, module, args, output):
        if self.end is None and not torch.isfinite(output).all():
            self.end = self.state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step < self.until:
            self.weight.data.mul_(self.factor)
        control.should_training_stop = control.should_training_stop or self.end is not None


def _weight(model, module):
    return next(p for name, p in model.named_parameters() if name.endswith(f"{module}.weight"))


def _train(kind, tmp_path, *callbacks, **settings):
    trainer = build(kind, tmp_path, guard=False, extra={"callbacks": list(callbacks)}, **settings)
    trainer.train()
    return trainer


def _announced(trainer):
    return [event for event in events_of(trainer) if event["signal"] == "activation_headroom"]


def _check(trainer, grow, bits_per_step):
    [event] = _announced(trainer)
    assert grow.end - event["step"] >= 20
    assert event["culprit"]["module"].endswith(BLOCK)
    assert (event["culprit"]["phase"], event["cause"]) == ("forward", "fp16_overflow")
    assert event["values"]["bits_per_100_steps"] == pytest.approx(-100 * bits_per_step, rel=0.5)
    assert abs(event["values"]["overflow_step"] - grow.end) <= max(10, 0.5 * (grow.end - event["step"]))


def test_an_overflow_is_announced_by_name(tmp_path):
    grow = Grow(DOWN, 2**0.1)
    trainer = _train("plain", tmp_path, ActivationMonitorCallback(10), grow, max_steps=300, logging_steps=20, **HALF)
    _check(trainer, grow, 0.1)
    bits = [row["nanguard/headroom_bits"] for row in trainer.state.log_history if "nanguard/headroom_bits" in row]
    assert bits == sorted(bits, reverse=True)
    assert bits[0] > 10 > 5 > bits[-1]


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2**0.03, 2**0.08])
@pytest.mark.parametrize("period", [5, 20])
@pytest.mark.parametrize(
    ("kind", "lora"),
    [("plain", False), ("plain", True), ("sft", False), ("sft", True), ("grpo", False), ("grpo", True)],
)
def test_overflows_of_all_trainers_are_announced(kind, lora, period, factor, tmp_path):
    grow = Grow(DOWN, factor)
    settings = {**HALF, "max_steps": 900, "logging_steps": 50, "lora": lora}
    trainer = build(
        kind, tmp_path, guard=False, extra={"callbacks": [ActivationMonitorCallback(period), grow]}, **settings
    )
    # A stock GRPO run ends when it samples from what overflowed.
    with pytest.raises(RuntimeError, match="probability tensor") if kind == "grpo" else nullcontext():
        trainer.train()
    _check(trainer, grow, math.log2(factor))


HEALTHY = {
    "float32": {},
    "bf16": {"dtype": torch.bfloat16},
    "float16": HALF,
    "autocast": {"bf16": True},
    "lora": {"lora": True},
    "hot": {"learning_rate": 5e-2},
}


@pytest.mark.slow
@pytest.mark.parametrize("period", [1, 10, 50])
@pytest.mark.parametrize("kind", ["plain", "sft", "grpo"])
@pytest.mark.parametrize("variant", HEALTHY)
def test_healthy_runs_are_silent_over_200_steps(variant, kind, period, tmp_path):
    settings = {"gradient_accumulation_steps": 1, "logging_steps": 50, "max_steps": 200, **HEALTHY[variant]}
    assert events_of(_train(kind, tmp_path, ActivationMonitorCallback(period), **settings)) == []


@pytest.mark.parametrize("until", [55, 90])
def test_growth_that_stops_early_enough_is_silent(until, tmp_path):
    """It begins with 17 bits and keeps 4 to 8."""
    grow = Grow(DOWN, 2**0.1, until)
    trainer = _train("plain", tmp_path, ActivationMonitorCallback(5), grow, max_steps=until + 40, **HALF)
    assert grow.end is None
    assert events_of(trainer) == []


@pytest.mark.parametrize("kind", ["plain", "sft", "grpo"])
@pytest.mark.parametrize("lora", [False, True])
def test_the_module_that_overflowed_is_named_at_its_step(kind, lora, tmp_path):
    class Burst(TrainerCallback):
        """In the forward of training only: sampling from such a model ends a stock GRPO run before it trains."""

        def on_train_begin(self, args, state, control, model=None, **kwargs):
            mlp = next(module for name, module in model.named_modules() if name.endswith("model.layers.0.mlp"))
            mlp.register_forward_hook(
                lambda module, args, output: (
                    output * 1e8 if torch.is_grad_enabled() and state.global_step == 2 else output
                )
            )

    trainer = _train(kind, tmp_path, ActivationMonitorCallback(1), Burst(), max_steps=3, lora=lora, **HALF)
    [event] = [event for event in events_of(trainer) if event["signal"] == "activation_nonfinite"]
    assert event["step"] == 2
    assert event["culprit"]["module"].endswith("model.layers.0")
    assert event["values"]["kind"] in ("inf", "nan")


class _Count(TrainerCallback):
    """Counts one whole step."""

    def __init__(self, step):
        self.step, self.context = step, OperationCounter()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.count = self.context.__enter__()
        if state.global_step == self.step + 1:
            self.context.__exit__(None, None, None)


def _count(kind, tmp_path, step, *callbacks, **settings):
    counter = _Count(step)
    settings = {"max_steps": step + 2, "logging_steps": 100, **settings}
    _train(kind, tmp_path, *callbacks, counter, **settings)
    return counter.count


@pytest.mark.parametrize("kind", ["plain", "sft", "grpo"])
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_step_that_is_not_looked_at_costs_nothing_and_one_that_is_one_read(kind, lora, tmp_path):
    stock = _count(kind, tmp_path / "stock", 2, lora=lora)
    off = _count(kind, tmp_path / "off", 2, ActivationMonitorCallback(5), lora=lora)
    assert off.op_counts == stock.op_counts
    assert off.num_reads == stock.num_reads
    due = _count(kind, tmp_path / "due", 2, ActivationMonitorCallback(3), lora=lora)
    assert due.num_reads - stock.num_reads == 1
    assert due.num_ops - stock.num_ops <= 3 * 4 * 3 + 25  # outputs, micro-batches


@pytest.mark.parametrize("kind", ["plain", "sft", "grpo"])
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_looking_at_every_step_changes_nothing(kind, lora, tmp_path):
    stock = _train(kind, tmp_path / "stock", max_steps=3, lora=lora)
    expected = tensors_of(stock)
    watched = _train(kind, tmp_path / "ours", ActivationMonitorCallback(1), max_steps=3, lora=lora)
    assert_same(tensors_of(watched), expected)
    assert losses_of(watched) == losses_of(stock)
    assert events_of(watched) == []
    assert "nanguard/headroom_bits" in watched.state.log_history[0]


def test_it_looks_at_the_first_step_and_every_nth(tmp_path):
    trainer = _train("plain", tmp_path, ActivationMonitorCallback(3, modules="lm_head", full_metrics=True), max_steps=7)
    rows = {row["step"]: row for row in trainer.state.log_history if "loss" in row}
    assert [step for step, row in rows.items() if "nanguard/activation_max" in row] == [1, 3, 6]
    assert rows[3]["nanguard/activation_max/lm_head"] == rows[3]["nanguard/activation_max"]


def test_evaluation_does_not_count(tmp_path):
    class Poison(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            hook = lambda module, args, output: None if module.training else output * math.nan  # noqa: E731
            model.model.layers[0].register_forward_hook(hook)

    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    extra = {"callbacks": [Poison(), ActivationMonitorCallback(1)], "eval_dataset": token_dataset(4)}
    trainer = build("plain", tmp_path, guard=False, extra=extra, **settings)
    trainer.train()
    assert any("eval_loss" in row for row in trainer.state.log_history)
    assert events_of(trainer) == []


def test_it_says_that_it_does_not_work_under_compile(tmp_path, recwarn):
    settings = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 3}
    trainer = _train("plain", tmp_path, ActivationMonitorCallback(1), **settings)
    [event] = events_of(trainer)
    assert (event["signal"], event["step"]) == ("guard_failed", 0)
    assert "torch.compile" in event["message"]
    torch._dynamo.reset()


class _BreakOff(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            raise RuntimeError("planted")


def test_hooks_of_a_run_that_was_broken_off_are_gone_when_the_next_begins(tmp_path):
    callback = ActivationMonitorCallback(1)
    trainer = build("plain", tmp_path, guard=False, extra={"callbacks": [callback, _BreakOff()]}, max_steps=3)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train()
    trainer.remove_callback(_BreakOff)
    trainer.train()
    assert not any(module._forward_hooks for module in trainer.model.modules())
    assert events_of(trainer) == []


def test_samples_survive_a_checkpoint(tmp_path):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 4, **HALF}
    whole = ActivationMonitorCallback(1)
    kept = {}

    class Keep(TrainerCallback):
        def __init__(self, callback, name):
            self.callback, self.name = callback, name

        def on_step_end(self, args, state, control, **kwargs):
            kept[self.name] = self.callback.monitor.state_dict()

    trainer = _train("plain", tmp_path, whole, Keep(whole, "whole"), **settings)
    saved = json.loads((tmp_path / "checkpoint-4" / "nanguard_activation.json").read_text())
    assert len(saved["headroom"][BLOCK]["samples"]) == 4
    again = ActivationMonitorCallback(1)
    extra = {"callbacks": [again, Keep(again, "again")]}
    trainer = build("plain", tmp_path, guard=False, extra=extra, **settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert kept["again"] == kept["whole"]
    assert len(kept["again"]["headroom"][BLOCK]["samples"]) == 6


@pytest.mark.parametrize("text", ["{", "[]", '{"headroom": {"model.layers.1": 3}, "next_check": null}'])
def test_a_broken_state_is_told_and_left_out(text, tmp_path, caplog):
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    _train("plain", tmp_path, ActivationMonitorCallback(1), **settings)
    (tmp_path / "checkpoint-2" / "nanguard_activation.json").write_text(text)
    trainer = build("plain", tmp_path, guard=False, extra={"callbacks": [ActivationMonitorCallback(1)]}, **settings)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "was not readable" in caplog.text
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("value", [0, -1, 2.5, "3", True, None])
def test_a_bad_period_is_named(value):
    with pytest.raises(ArgumentError, match=f"check_every_n_steps must be an integer of at least 1, got {value!r}"):
        ActivationMonitorCallback(value)


@pytest.mark.parametrize("value", ["", "a,,b", [], [3], 3, ["a", ""]])
def test_bad_patterns_are_named(value):
    with pytest.raises(ArgumentError, match="modules must be one or more patterns of module names, got"):
        ActivationMonitorCallback(modules=value)


def test_a_pattern_that_no_module_has_is_refused_at_the_start(tmp_path):
    with pytest.raises(ArgumentError, match=r"got 'blocks\.\*', which match no module"):
        _train("plain", tmp_path, ActivationMonitorCallback(modules="blocks.*"))


def test_a_bad_switch_is_named():
    with pytest.raises(ArgumentError, match="full_metrics must be True or False, got 1"):
        ActivationMonitorCallback(full_metrics=1)


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_head_that_trl_does_not_call_is_measured(kind, tmp_path):
    """A head scaled by 1e30 leaves few bits; the layers before it do not show that."""
    bits = []
    for scale in (1.0, 1e30):
        trainer = build(
            kind, tmp_path / str(scale), guard=False, max_steps=2, learning_rate=0.0,
            extra={"callbacks": [ActivationMonitorCallback(1, full_metrics=True)]},
        )  # fmt: skip
        with torch.no_grad():
            trainer.model.lm_head.weight.mul_(scale)
        trainer.train()
        bits += [row["nanguard/headroom_bits/lm_head"] for row in trainer.state.log_history if "loss" in row][-1:]
    assert 90 < bits[0] - bits[1] < 110
