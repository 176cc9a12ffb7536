"""The monitor sees what modules put out in training, says what is bad or going to be, and is silent otherwise."""

import json
import math

import pytest
import torch
from torch import nn

from hf_nanguard.core.journal import Journal
from hf_nanguard.core.monitors.activations import ActivationMonitor
from hf_nanguard.core.monitors.overflow_forecast import Trend
from hf_nanguard.core.ranks import Ranks
from hf_nanguard.testing import OperationCounter
from tests.architectures import ARCHITECTURES, BY_NAME

WIDTH = 8


class Block(nn.Module):
    """A residual block with a gain; `poison` is added to the first entry of what it puts out."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(()))
        self.poison = 0.0

    def forward(self, hidden, *, scale=1.0):
        hidden = hidden + self.gain * scale * torch.tanh(self.linear(hidden))
        if self.poison:
            hidden = hidden + torch.tensor(self.poison, dtype=hidden.dtype) * (torch.arange(WIDTH) == 0)
            hidden = torch.where(torch.arange(WIDTH) == 0, hidden, hidden.nan_to_num(0.0))
        return {"mask": None, "hidden": hidden}


class Stack(nn.Module):
    """Blocks between an embedding and a head whose scores are masked."""

    def __init__(self, depth=3, masked=False, checkpoint=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 4)
        self.checkpoint = checkpoint
        if masked:
            self.head.bias.data[0] = -math.inf

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            if self.checkpoint is None:
                hidden = layer(hidden, scale=1.0)["hidden"]
            else:
                hidden = torch.utils.checkpoint.checkpoint(
                    lambda hidden, layer=layer: layer(hidden)["hidden"], hidden, use_reentrant=self.checkpoint
                )
        return self.head(hidden).float().log_softmax(-1)[..., 1:].mean()


def _watch(model, every_n_steps=1, **settings):
    events, ranks = [], Ranks(alone=True)
    return ActivationMonitor(model, Journal(ranks, events.append), every_n_steps, **settings), events


def _run(monitor, model, step=0, num_micro=1, ids=None):
    """One step without an update; the micro-batches differ."""
    monitor.begin_step(step)
    for micro in range(num_micro):
        model(torch.arange(6) + micro if ids is None else ids).neg().backward()
    monitor.end_backward(step)


def test_what_is_seen_is_what_the_modules_put_out():
    model = Stack()
    outputs = {name: [] for name in ("embed", "layers.0", "layers.1", "layers.2", "head")}
    modules = dict(model.named_modules())
    for name, kept in outputs.items():
        modules[name].register_forward_hook(
            lambda module, args, output, kept=kept: kept.append(
                output["hidden"] if isinstance(output, dict) else output
            )
        )
    monitor, events = _watch(model)
    _run(monitor, model, num_micro=3)
    assert list(monitor.seen) == list(outputs)
    for name, kept in outputs.items():
        seen = monitor.seen[name]
        assert len(kept) == 3
        assert seen.largest == max(output.abs().max().item() for output in kept)
        assert seen.rms == pytest.approx(max(output.square().mean().sqrt().item() for output in kept))
        assert monitor.bits[name] == pytest.approx(math.log2(torch.finfo(torch.float32).max / seen.largest))
    assert events == []


def test_metrics_are_compact_by_default_and_told_once():
    model = Stack()
    monitor, _ = _watch(model)
    assert monitor.metrics() == {}
    _run(monitor, model)
    metrics = monitor.metrics()
    seen = monitor.seen.values()
    assert metrics == {
        "nanguard/headroom_bits": min(monitor.bits.values()),
        "nanguard/activation_max": max(one.largest for one in seen),
        "nanguard/activation_rms": max(one.rms for one in seen),
        "nanguard/activation_zeros": 0.0,
        "nanguard/activation_near_limit": 0.0,
    }
    assert monitor.metrics() == {}
    monitor.full_metrics = True
    _run(monitor, model)
    full = monitor.metrics()
    assert full["nanguard/activation_max/layers.1"] == monitor.seen["layers.1"].largest
    assert len(full) == 5 + 5 * 5


def test_a_step_that_is_not_due_costs_nothing():
    model = Stack()
    monitor, _ = _watch(model, every_n_steps=5, early=())
    model(torch.arange(6)).neg().backward()  # from now on gradients are there to be added to
    ids = torch.arange(6)
    with OperationCounter() as stock:
        model(ids).neg().backward()
    with OperationCounter() as watched:
        _run(monitor, model, step=3, ids=ids)
    assert watched.op_counts == stock.op_counts
    assert watched.num_reads == stock.num_reads
    assert monitor.seen == {}


@pytest.mark.parametrize("num_micro", [1, 4])
@pytest.mark.parametrize("depth", [1, 3, 9])
def test_a_due_step_costs_three_operations_an_output_and_one_read(num_micro, depth):
    model = Stack(depth)
    monitor, _ = _watch(model)
    with OperationCounter() as stock:
        for micro in range(num_micro):
            model(torch.arange(6) + micro).neg().backward()
    with OperationCounter() as watched:
        _run(monitor, model, num_micro=num_micro)
    assert watched.num_reads - stock.num_reads == 1
    assert watched.num_ops - stock.num_ops <= 3 * (depth + 2) * num_micro + 25
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [architecture.name for architecture in ARCHITECTURES])
def test_healthy_models_are_silent_and_bit_identical(name, dtype):
    if name == "wav2vec2" and dtype != torch.float32:
        pytest.skip("its loss is not made for half precision")
    results = []
    for watched in (False, True):
        model = BY_NAME[name].build(dtype)
        monitor, events = _watch(model)
        for step in range(2):
            if watched:
                monitor.begin_step(step)
            torch.manual_seed(step)
            model(**BY_NAME[name].inputs(dtype)).loss.backward()
            monitor.end_backward(step)
        rng = torch.get_rng_state()
        results.append((rng, [p.grad for p in model.parameters() if p.grad is not None]))
    assert events == []
    assert set(monitor.blocks) <= monitor.seen.keys()
    assert torch.equal(results[0][0], results[1][0])
    assert len(results[0][1]) == len(results[1][1]) > 0
    assert all(torch.equal(mine, stock) for mine, stock in zip(results[1][1], results[0][1], strict=True))


def test_only_forwards_of_training_count():
    model = Stack()
    monitor, _ = _watch(model)
    monitor.begin_step(0)
    model.layers[1].poison = math.inf
    with torch.no_grad():
        model(torch.arange(6))  # generation, a reference model
    model.eval()
    model(torch.arange(6))  # evaluation
    model.train()
    model.layers[1].poison = 0.0
    model(torch.arange(6)).backward()
    monitor.end_backward(0)
    assert monitor.seen
    assert all(seen.is_finite for seen in monitor.seen.values())
    assert not monitor.is_bad


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_is_seen_once(reentrant):
    monitor, _ = _watch(plain := Stack())
    _run(monitor, plain, num_micro=2)
    checked, _ = _watch(model := Stack(checkpoint=reentrant))
    with OperationCounter() as count:
        _run(checked, model, num_micro=2)
    assert checked.seen == monitor.seen
    assert count.op_counts["aten.aminmax.default"] == 2 * 5


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize(("poison", "kind"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "inf")])
def test_the_first_module_that_went_bad_is_named(poison, kind, reentrant):
    model = Stack(checkpoint=reentrant).half()
    monitor, events = _watch(model)
    _run(monitor, model)
    bits = monitor.bits["layers.1"]
    model.layers[1].poison = poison
    _run(monitor, model, step=1)
    _run(monitor, model, step=2)
    [event] = events  # once, though it stays bad
    assert (event["signal"], event["action"], event["step"]) == ("activation_nonfinite", "observed", 1)
    assert (event["culprit"]["phase"], event["culprit"]["module"]) == ("forward", "layers.1")
    assert event["values"].pop("num_modules") >= 2
    assert event["values"] == {"kind": kind, "dtype": "float16", "last_bits": bits}
    assert event["cause"] == ("fp16_overflow" if kind == "inf" else None)
    model.layers[1].poison = 0.0
    _run(monitor, model, step=3)
    model.layers[0].poison = poison
    _run(monitor, model, step=4)
    assert [event["culprit"]["module"] for event in events] == ["layers.1", "layers.0"]


def test_a_masked_head_is_healthy_unless_something_after_it_goes_bad():
    model = Stack(masked=True)
    monitor, events = _watch(model)
    for step in range(4):
        _run(monitor, model, step)
    assert monitor.seen["head"].is_masked
    assert "head" not in monitor.bits
    assert events == []


def test_a_bad_last_block_is_no_mask():
    model = Stack()
    model.layers[2].poison = -math.inf
    monitor, events = _watch(model, patterns="layers.2")
    _run(monitor, model)
    assert [event["culprit"]["module"] for event in events] == ["layers.2"]


def test_the_dtype_of_the_output_decides():
    model = Stack()
    monitor, _ = _watch(model, patterns=["head", "embed"])
    monitor.begin_step(0)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.arange(6)).backward()
    monitor.end_backward(0)
    limits = {name: seen.limit for name, seen in monitor.seen.items()}
    assert limits == {"embed": torch.finfo(torch.float32).max, "head": torch.finfo(torch.bfloat16).max}


def test_what_comes_near_the_limit_is_measured_from_the_second_look_on():
    model = Stack().half()
    monitor, _ = _watch(model, patterns="embed")
    with torch.no_grad():
        model.embed.weight[3, :2] = 5000.0
    for near in (None, 2 / (6 * WIDTH)):
        _run(monitor, model)
        assert monitor.metrics().get("nanguard/activation_near_limit") == (near and pytest.approx(near))


def test_hooks_do_not_outlive_a_step_that_was_broken_off():
    model = Stack()
    monitor, _ = _watch(model, every_n_steps=2, early=(1,))
    monitor.begin_step(0)
    assert any(module._forward_hooks for module in model.modules())
    monitor.begin_step(2)  # not due
    assert not any(module._forward_hooks for module in model.modules())
    monitor.begin_step(3)
    model(torch.arange(6))
    monitor.close()
    assert not any(module._forward_hooks for module in model.modules())
    monitor.end_backward(3)
    assert monitor.seen == {}


@pytest.mark.parametrize("how", ["told", "compiled unseen"])
def test_it_says_once_that_it_does_not_work_under_compile(how):
    torch._dynamo.reset()
    model = Stack()
    monitor, events = _watch(model, compiled=how == "told")
    runs = torch.compile(model, backend="eager") if how == "compiled unseen" else model
    for step in range(4):
        monitor.begin_step(step)
        runs(torch.arange(6)).backward()
        monitor.end_backward(step)
        assert not any(module._forward_hooks for module in model.modules())
    [event] = events
    assert (event["signal"], event["action"]) == ("guard_failed", "observed")
    assert "Activations are not monitored" in event["message"]
    assert not monitor.is_due(100)
    torch._dynamo.reset()


def _train(model, monitor, steps, rate, decay=0.0):
    """Trains the gains to make the blocks' outputs as large as they can get; returns when they overflow."""
    optimizer = torch.optim.SGD([layer.gain for layer in model.layers], lr=rate)
    for step in range(steps):
        monitor.begin_step(step)
        hidden = model.embed(torch.randint(0, 16, (12,)))
        for layer in model.layers:
            hidden = layer(hidden)["hidden"]
            if not torch.isfinite(hidden).all():
                return step
        gains = torch.stack([layer.gain for layer in model.layers]).float()
        # d/dg of -g**2/2 is -g: the gains grow by the same factor every step until the decay holds them.
        (hidden.float().square().mean() * 0 - gains.square().sum() / 2 + decay * gains.pow(4).sum() / 4).backward()
        monitor.end_backward(step)
        optimizer.step()
        optimizer.zero_grad()
    return None


@pytest.mark.parametrize(("rate", "every_n_steps"), [(0.05, 10), (0.08, 5), (0.03, 50)])
def test_an_overflow_that_training_drives_is_announced_twenty_steps_ahead(rate, every_n_steps):
    model = Stack().half()
    monitor, events = _watch(model, every_n_steps, early=(1,))
    end = _train(model, monitor, 500, rate)
    assert end is not None
    monitor.close()
    [event] = [event for event in events if event["signal"] == "activation_headroom"]
    assert end - event["step"] >= 20
    assert event["culprit"]["module"] == "layers.2"
    assert event["cause"] == "fp16_overflow"
    assert event["values"]["dtype"] == "float16"
    assert abs(event["values"]["overflow_step"] - end) <= 0.3 * (end - event["step"])
    assert event["values"]["bits_per_100_steps"] == pytest.approx(-100 * math.log2(1 + rate), rel=0.25)
    assert "layers.2 loses" in event["message"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("every_n_steps", [5, 50])
def test_growth_that_levels_off_is_silent(dtype, every_n_steps):
    """Up to a gain of 1,000, which leaves float16 about 4 bits."""
    model = Stack().to(dtype)
    monitor, events = _watch(model, every_n_steps, early=(1,))
    assert _train(model, monitor, 300, 0.05, decay=1e-6) is None
    assert monitor.seen["layers.2"].largest > 1000
    assert events == []


def test_the_state_survives_a_checkpoint():
    model = Stack().half()
    monitor, _ = _watch(model, 10, early=(1,))
    _train(model, monitor, 120, 0.05)
    other, events = _watch(Stack().half(), 10, early=(1,), patterns="layers.*")
    other.load_state_dict(json.loads(json.dumps(monitor.state_dict(), allow_nan=False)))
    saved = monitor.state_dict()["headroom"]
    assert other.state_dict()["headroom"] == {name: saved[name] for name in saved if name.startswith("layers.")}
    assert other.next_check == monitor.next_check
    assert len(saved["layers.2"]["samples"]) > 5
    assert events == []


def test_a_model_without_anything_to_watch_is_told_of(recwarn):
    model = nn.Sequential(nn.LSTM(4, 4))
    monitor, events = _watch(model)
    monitor.begin_step(0)
    model(torch.ones(2, 4))[0].sum().backward()
    monitor.end_backward(0)
    [event] = events
    assert (event["signal"], event["action"]) == ("guard_failed", "observed")
    assert "no blocks" in event["message"]
    assert not monitor.is_due(1)


def test_a_model_of_one_piece_has_nothing_to_tell_of():
    model = nn.ParameterDict({"a": torch.ones(1), "b": torch.zeros(1)})
    monitor, events = _watch(model)
    monitor.begin_step(0)
    (model["a"] * 3 + model["b"]).sum().backward()
    monitor.end_backward(0)
    assert events == []
    assert not monitor.is_due(1)


class Odd(nn.Module):
    """Returns what has no kernel for its extremes."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, hidden):
        if self.kind == "csr":
            return hidden.detach().to_sparse_csr()
        if self.kind == "jagged":
            return torch.nested.nested_tensor([hidden[:1].detach(), hidden.detach()], layout=torch.jagged)
        if self.kind == "meta":
            return hidden.detach().to("meta")
        return Unwilling(hidden.detach())


class Unwilling(torch.Tensor):
    """Can be made and nothing else."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.aminmax:
            raise NotImplementedError("nothing of that kind")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")  # pytorch/pytorch#44634
@pytest.mark.parametrize("kind", ["csr", "jagged", "meta", "unwilling"])
def test_outputs_that_cannot_be_measured_end_no_run(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.layers = nn.ModuleList([Odd(kind)])

        def forward(self, x):
            hidden = self.first(x)
            self.layers[0](hidden)
            return hidden.sum()

    monitor, events = _watch(model := Model())
    for step in range(2):
        monitor.begin_step(step)
        model(torch.ones(2, 4)).backward()
        monitor.end_backward(step)
        assert list(monitor.seen) == ["first"]
    told = [(event["signal"], event["step"]) for event in events]
    assert told == ([("guard_failed", 0)] if kind == "unwilling" else [])


def test_a_module_that_runs_no_more_does_not_ask_for_a_look_at_every_step():
    model = Stack().half()
    monitor, _ = _watch(model, every_n_steps=50)
    _run(monitor, model, step=9)
    monitor.headroom.trends["gone"] = trend = Trend(3.2)
    trend.add(9, 0.5)
    _run(monitor, model, step=19)
    assert monitor.next_check is None


def test_a_pattern_whose_modules_do_not_run_is_reported_once():
    model = Stack()
    model.side = nn.Linear(2, 2)
    monitor, events = _watch(model, patterns="layers.*, side, haed")
    for step in range(3):
        _run(monitor, model, step)
    messages = [event["message"] for event in events]
    assert [event["signal"] for event in events] == ["guard_failed"] * 2
    assert "'side' is not monitored because its modules did not run" in messages[0]
    assert "'haed' is not monitored because it matches no module" in messages[1]


def test_patterns_whose_modules_run_are_not_reported():
    model = Stack()
    monitor, events = _watch(model, patterns=["head", "layers.*.linear"])
    for step in range(3):
        _run(monitor, model, step)
    assert events == []
