"""Under torch.compile the monitors look by an extra forward in Python: the run stays the stock run, and nothing is compiled anew.

No file mirrors this one: it is about the monitors, the redo and the autopsy of one compiled trainer together.
"""

import shutil

import pytest
import torch

from hf_nanguard import Guard, GuardArguments, Policy
from hf_nanguard.testing import Fault, plant

from ...models import tiny_llama
from ...reference import assert_same, tensors_of, without
from ...trainers import build, events_of, metric_rows_of, stock_class

# What the compilers of torch do themselves makes them warn, e.g. of autograd functions that are instantiated.
pytestmark = pytest.mark.filterwarnings("ignore")

EVERY_STEP = GuardArguments(nanguard_activation_steps=1, nanguard_attention_steps=1, nanguard_full_metrics=True)


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train(kind, folder, guard, *faults, backend="eager", trainer_class=None, **arguments):
    """Trains a compiled model, or without a backend one that is not; returns the trainer and how often something was compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = {"torch_compile": True, "torch_compile_backend": backend} if backend else {}
    extra = {"guard": EVERY_STEP} if guard else {}
    trainer = build(kind, folder, trainer_class, guard, extra=extra, max_steps=3, **compiled, **arguments)
    planted = plant(trainer, *faults) if guard else None
    trainer.train()
    assert planted is None or planted.triggered == list(faults)
    return trainer, dict(torch._dynamo.utils.counters["frames"])


def monitored(trainer):
    """The values of the monitors in every row of the log."""
    return [{n: v for n, v in row.items() if n.startswith("nanguard/")} for row in metric_rows_of(trainer)]


def find_hooked(model):
    return [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sft", "dpo", "grpo"))]
)
def test_the_run_is_the_stock_run_and_every_value_is_that_of_an_uncompiled_one(kind, tmp_path):
    backend = "eager" if kind == "plain" else "aot_eager"
    stock, compiled_for_stock = train(kind, tmp_path / "stock", False, backend=backend)
    ours, compiled_for_ours = train(kind, tmp_path / "guarded", True, backend=backend)
    eager, _ = train(kind, tmp_path / "eager", True, backend=None)
    assert_same(tensors_of(ours), tensors_of(stock))
    assert compiled_for_ours == compiled_for_stock
    assert compiled_for_stock["ok"] > 0
    assert find_hooked(ours.model) == []
    assert events_of(ours) == []
    for mine, theirs in zip(monitored(ours), monitored(eager), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
        assert {"nanguard/headroom_bits/model.layers.1", "nanguard/attention_score_max"} <= mine.keys()


def test_a_bad_micro_batch_is_dropped_without_a_trace_and_named(tmp_path):
    stock, _ = train("plain", tmp_path / "stock", False, trainer_class=without(stock_class("plain"), (1, 1)))
    ours, _ = train("plain", tmp_path / "guarded", True, Fault("loss", step=1, micro_step=1))
    assert_same(tensors_of(ours), tensors_of(stock))
    [event] = events_of(ours)
    assert (event["signal"], event["action"], event["step"], event["micro_step"]) == ("loss_nonfinite", "dropped", 1, 1)
    assert len(event["culprit"]["rows"]) == 2
    assert event["culprit"]["source"].startswith("fault_injector.py:")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the inductor needs a C++ compiler")
def test_generated_code_is_left_as_it_is(tmp_path):
    stock, compiled_for_stock = train("plain", tmp_path / "stock", False, backend="inductor")
    ours, compiled_for_ours = train("plain", tmp_path / "guarded", True, backend="inductor")
    assert_same(tensors_of(ours), tensors_of(stock))
    assert compiled_for_ours == compiled_for_stock
    assert all("nanguard/headroom_bits" in row for row in monitored(ours))
    assert events_of(ours) == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_monitored_too(reentrant, tmp_path):
    """The extra forward has no backward, in which reentrant checkpointing would run them with gradients."""
    how = {"use_reentrant": reentrant}
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": how, "dropout": 0.0}
    stock, compiled_for_stock = train("plain", tmp_path / "stock", False, **options)
    ours, compiled_for_ours = train("plain", tmp_path / "guarded", True, **options)
    eager, _ = train("plain", tmp_path / "eager", True, backend=None, **options)
    assert_same(tensors_of(ours), tensors_of(stock))
    assert compiled_for_ours == compiled_for_stock
    for mine, theirs in zip(monitored(ours), monitored(eager), strict=True):
        assert {"nanguard/headroom_bits/model.layers.1", "nanguard/attention_score_max"} <= mine.keys()
        assert mine == pytest.approx(theirs, rel=1e-4)


def compile_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def compile_in_place(model):
    model.compile(backend="eager")
    return model


def wrap(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("compile_it", [wrap, compile_in_place, compile_forward])
def test_a_hand_written_loop_is_monitored_and_its_terms_count_once(compile_it):
    model = tiny_llama()
    compiled = compile_it(model)
    torch._dynamo.utils.counters.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(compiled, optimizer, Policy(activation_steps=1))
    ids = torch.randint(3, 60, (2, 8))
    calls = []

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        calls.append(guard.replaying)
        return guard.term("ce", compiled(input_ids=batch).logits.square().mean())

    for _ in range(2):
        assert guard.step(loss_fn, [ids, ids]).stepped
        assert [[term.name for term in micro.terms] for micro in guard.group.micro_batches] == [["ce"]] * 2
    assert calls == [False, False, True, True] * 2
    row = guard.monitor_set.metrics()
    assert row["nanguard/headroom_bits"] > 100
    assert find_hooked(model) == []
    assert torch._dynamo.utils.counters["frames"]["total"] == 1  # hooks did not make anything compile anew
