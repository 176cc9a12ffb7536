"""L2 and L3: a contained step leaves no trace, and a bad micro-batch costs only itself."""

import math
import random
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_nanguard import GuardArguments
from hf_nanguard.testing import INF, NAN, Fault, plant

from ..reference import assert_same, counted_tokens, losses_of, tensors_of, without
from ..trainers import KINDS, build, events_of, stock_class
from .ways import params

LAYER = "model.layers.1.mlp.up_proj.weight"


def _run(trainer):
    trainer.train()
    return tensors_of(trainer)


def _prove(kind: str, tmp_path, faults: list[Fault], **overrides):
    """Runs the guarded trainer with faults and the stock one that never saw those batches, and compares all of it."""
    places = [(fault.step, fault.micro_step) for fault in faults]
    reference = build(kind, tmp_path / "reference", without(stock_class(kind), *places), guard=False, **overrides)
    expected = _run(reference)
    ours = build(kind, tmp_path / "guarded", **overrides)
    planted = plant(ours, *faults)
    found = _run(ours)
    assert planted.triggered == faults or {*planted.triggered} == {*faults}
    assert_same(found, expected)
    assert ours.lr_scheduler.state_dict()["last_epoch"] == reference.lr_scheduler.state_dict()["last_epoch"]
    assert ours.state.global_step == reference.state.global_step
    assert counted_tokens(ours).items() <= counted_tokens(reference).items()
    return ours, reference


@pytest.mark.parametrize(
    ("kind", "fault", "micro_step"),
    params(
        *product(("plain", "grpo"), ("loss", "gradient"), range(3)), *product(("sft", "dpo"), ("loss", "gradient"), (1,)),
        ("plain", "constant", 1),
        cases=product(KINDS, ("loss", "constant", "gradient"), range(3)),
    ),
)  # fmt: skip
def test_one_bad_micro_batch_costs_only_itself(kind, fault, micro_step, tmp_path):
    name = LAYER if fault == "gradient" else None
    ours, _ = _prove(kind, tmp_path, [Fault(fault, step=1, micro_step=micro_step, parameter=name)])
    [event] = events_of(ours)
    assert (event["action"], event["step"], event["micro_step"]) == ("dropped", 1, micro_step)
    assert event["signal"] == ("grad_nonfinite" if fault == "gradient" else "loss_nonfinite")
    assert event["culprit"]["parameter"] == name
    assert all(math.isfinite(loss) for loss in losses_of(ours))
    assert kind == "grpo" or 0.0 not in losses_of(ours)


@pytest.mark.parametrize(
    ("kind", "fault"),
    params(*product(("plain", "grpo"), ("loss", "gradient")), cases=product(KINDS, ("loss", "gradient"))),
)
def test_a_step_with_nothing_left_is_skipped(kind, fault, tmp_path):
    name = LAYER if fault == "gradient" else None
    ours, _ = _prove(kind, tmp_path, [Fault(fault, step=2, parameter=name)], gradient_accumulation_steps=1, max_steps=5)
    [event] = events_of(ours)
    assert (event["action"], event["step"]) == ("skipped", 2)
    assert len(losses_of(ours)) == 4
    assert kind == "grpo" or 0.0 not in losses_of(ours)


VARIANTS = {
    "inf": {"value": INF},
    "fused": {"optim": "adamw_torch_fused"},
    "sgd": {"optim": "sgd"},
    "adafactor": {"optim": "adafactor"},
    "bf16": {"bf16": True},
    "float16 weights": {"dtype": torch.float16, "optim": "sgd", "learning_rate": 1e-3},
    "bf16 weights": {"dtype": torch.bfloat16},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "lora": {"lora": True},
    "no clipping": {"max_grad_norm": 0.0},
    "sparse log": {"logging_steps": 3},
    "label smoothing": {"label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_no_trace_in_every_set_up(variant, fault, tmp_path):
    overrides = dict(VARIANTS[variant])
    value = overrides.pop("value", NAN)
    name = None if fault == "loss" else LAYER
    if overrides.get("lora") and name:
        name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.default.weight"
    faults = [Fault(fault, step=1, micro_step=1, parameter=name, value=value)]
    faults += [Fault("loss", step=2, micro_step=m) for m in range(3)]
    ours, reference = _prove("plain", tmp_path, faults, **overrides)
    assert [event["action"] for event in events_of(ours)] == ["dropped", "skipped", "skipped", "skipped"]
    theirs = {row["step"]: row["loss"] for row in reference.state.log_history if "loss" in row}
    if "logging_steps" in overrides:  # one row for three steps, one of which never was: the mean is over two
        assert losses_of(ours) == pytest.approx([theirs[3] * 3 / 2])
    else:
        assert losses_of(ours) == [theirs[step] for step in (1, 2, 4)]


@pytest.mark.parametrize("num_examples", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_faults_anywhere_leave_no_trace(num_examples, tmp_path_factory):
    @settings(max_examples=num_examples, deadline=None)
    @given(
        places=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=5),
        kinds=st.lists(st.sampled_from(["loss", "gradient"]), min_size=5, max_size=5),
        value=st.sampled_from([NAN, INF]),
    )
    def check(places, kinds, value):
        faults = [
            Fault(kind, step, micro_step, parameter=LAYER if kind == "gradient" else None, value=value)
            for (step, micro_step), kind in zip(sorted(places), kinds, strict=False)
        ]
        ours, _ = _prove("plain", tmp_path_factory.mktemp("run"), faults)
        assert sorted((e["step"], e["micro_step"]) for e in events_of(ours)) == sorted(places)

    check()


@pytest.mark.parametrize("value", [None, 10_000, -5])
def test_bad_labels_never_reach_the_model(value, tmp_path):
    fault = Fault("label", step=1, micro_step=2, value=value)
    ours, _ = _prove("plain", tmp_path, [fault], train_sampling_strategy="sequential")
    [event] = events_of(ours)
    assert event["signal"] == ("labels_masked" if value is None else "label_out_of_range")
    assert event["action"] == "dropped"
    assert event["culprit"]["rows"] == [10, 11]


@pytest.mark.parametrize("kind", ["label", "error"])
def test_what_is_dropped_raises_nothing_in_the_anomaly_mode_of_torch(kind, tmp_path):
    expected = _run(build("plain", tmp_path / "reference", without(stock_class("plain"), (1, 1)), guard=False))
    ours = build("plain", tmp_path / "ours", extra={"guard": GuardArguments(nanguard_on_loss_error="drop")})
    plant(ours, Fault(kind, step=1, micro_step=1, value=None))
    with torch.autograd.set_detect_anomaly(True):
        assert_same(_run(ours), expected)
        assert torch.is_anomaly_enabled()
    assert [event["action"] for event in events_of(ours)] == ["dropped"]


def test_a_step_of_masked_labels_is_skipped_whole(tmp_path):
    faults = [Fault("label", step=1, micro_step=m, value=None) for m in range(3)]
    ours, _ = _prove("plain", tmp_path, faults)
    assert {event["signal"] for event in events_of(ours)} == {"labels_masked"}
    assert {event["action"] for event in events_of(ours)} == {"skipped"}


def test_a_skipped_step_at_the_end_of_a_row_is_not_counted_in_it(tmp_path):
    settings = {"gradient_accumulation_steps": 1, "logging_steps": 2, "max_steps": 4}
    ours, _ = _prove("sft", tmp_path, [Fault("loss", step=1)], **settings)
    assert counted_tokens(ours).keys() == {2, 4}


def test_metrics_of_a_generation_stay_when_its_first_micro_batch_is_dropped(tmp_path):
    ours, reference = _prove("grpo", tmp_path, [Fault("loss", step=1, micro_step=0)])
    expected = [{name: row[name] for name in row if name.startswith(("reward", "frac", "completions"))}
                for row in reference.state.log_history]  # fmt: skip
    assert all(expected[:-1])
    assert all(row.items() >= values.items() for row, values in zip(ours.state.log_history, expected, strict=True))


def test_batch_norm_statistics_are_untouched(tmp_path):
    from .batchnorm import build_batchnorm, reference_batchnorm

    fault = Fault("loss", step=1, micro_step=1)
    reference = reference_batchnorm(tmp_path / "reference", (1, 1))
    expected = _run(reference)
    ours = build_batchnorm(tmp_path / "guarded")
    plant(ours, fault)
    assert_same(_run(ours), expected)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_random_numbers_that_a_training_step_draws_first_leave_no_trace(accumulation, tmp_path):
    class Noisy(stock_class("plain")):
        def training_step(self, model, inputs, num_items_in_batch=None):
            self.scale = 1.0 + torch.rand(()) + random.random() + float(np.random.rand())
            return super().training_step(model, inputs, num_items_in_batch)

        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) * self.scale

    settings = {"gradient_accumulation_steps": accumulation}
    fault = Fault("loss", step=1, micro_step=accumulation - 1)
    reference = without(Noisy, (fault.step, fault.micro_step))
    expected = _run(build("plain", tmp_path / "reference", reference, guard=False, **settings))
    ours = build("plain", tmp_path / "ours", Noisy, **settings)
    plant(ours, fault)
    assert_same(_run(ours), expected)
    assert [event["signal"] for event in events_of(ours)] == ["loss_nonfinite"]


def _count_in_forward(module):
    """Lets a module count its calls in attributes of all kinds, and act on them."""
    module.calls, module.seen, module.mean, module.table = 0, [], torch.zeros(3), {"last": None}

    def count(module, args, output):
        module.calls += 1
        module.seen.append(module.calls)
        module.mean += output.detach().mean()
        module.table["last"] = module.calls
        module.activation = output
        return output * (1 + 1e-3 * len(module.seen) + module.mean.sum())

    module.register_forward_hook(count)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_attributes_that_a_forward_writes_leave_no_trace(accumulation, tmp_path):
    settings = {"gradient_accumulation_steps": accumulation}
    place = (2, accumulation - 1)
    reference = build("plain", tmp_path / "reference", without(stock_class("plain"), place), guard=False, **settings)
    _count_in_forward(reference.model.model.norm)
    expected = _run(reference)
    ours = build("plain", tmp_path / "ours", **settings)
    _count_in_forward(ours.model.model.norm)
    plant(ours, Fault("loss", *place))
    assert_same(_run(ours), expected)
    found, wanted = ours.model.model.norm, reference.model.model.norm
    assert (found.calls, found.seen, found.table) == (wanted.calls, wanted.seen, wanted.table)
    assert torch.equal(found.mean, wanted.mean)


class Centered(torch.nn.Module):
    """Outside the model: a center in a buffer, which follows the loss, and a plain counter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(()))
        self.calls = 0

    def forward(self, loss):
        self.center.mul_(0.9).add_(0.1 * loss.detach())
        self.calls += 1
        return loss * (1 + self.center / 10)


class Remembering(stock_class("plain")):
    """Its loss draws from generators of its own, and depends on what it wrote outside the model before."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.criterion, self.baseline, self.history = Centered(), None, []
        self.generators = [torch.Generator().manual_seed(1), random.Random(2)]
        self.numbers, self.old_numbers = np.random.default_rng(3), np.random.RandomState(4)

    def compute_loss(self, *args, **kwargs):
        loss = self.criterion(super().compute_loss(*args, **kwargs))
        self.baseline = loss.detach() if self.baseline is None else 0.9 * self.baseline + 0.1 * loss.detach()
        self.history.append(len(self.history))
        ours, pythons = self.generators
        drawn = torch.rand((), generator=ours) + pythons.random() + self.numbers.random() + self.old_numbers.rand()
        return loss * (1 + drawn / 10 + self.baseline / 10 + len(self.history) / 100)


@pytest.mark.parametrize(("step", "accumulation"), [(0, 3), (2, 1), (2, 3)])
def test_what_a_loss_writes_outside_the_model_leaves_no_trace(step, accumulation, tmp_path):
    settings, place = {"gradient_accumulation_steps": accumulation}, (step, accumulation - 1)
    reference = build("plain", tmp_path / "reference", without(Remembering, place), guard=False, **settings)
    expected = _run(reference)
    ours = build("plain", tmp_path / "ours", Remembering, **settings)
    plant(ours, Fault("loss", *place))
    assert_same(_run(ours), expected)
    assert [event["signal"] for event in events_of(ours)] == ["loss_nonfinite"]
    assert torch.equal(ours.criterion.center, reference.criterion.center)
    assert torch.equal(ours.baseline, reference.baseline)
    assert (ours.criterion.calls, ours.history) == (reference.criterion.calls, reference.history)


class MeanLoss:
    """A loss that is an object with what it has seen; NaN for one row."""

    def __init__(self):
        self.mean, self.calls = torch.zeros(()), 0

    def __call__(self, outputs, labels, num_items_in_batch=None):
        loss = torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())
        loss = loss * (NAN if int(labels[0, 0]) == 3 + 4 else 1)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        self.calls += 1
        return loss * (1 + self.mean)


def test_a_loss_that_is_an_object_forgets_a_bad_batch(tmp_path):
    theirs, mine = MeanLoss(), MeanLoss()
    settings = {"gradient_accumulation_steps": 1, "train_sampling_strategy": "sequential"}
    reference = without(stock_class("plain"), (2, 0))
    expected = _run(
        build("plain", tmp_path / "reference", reference, guard=False, extra={"compute_loss_func": theirs}, **settings)
    )
    ours = build("plain", tmp_path / "ours", extra={"compute_loss_func": mine}, **settings)
    assert_same(_run(ours), expected)
    assert [event["culprit"]["rows"] for event in events_of(ours)] == [[4]]
    assert (mine.calls, float(mine.mean)) == (theirs.calls, float(theirs.mean))


class ClassLoss:
    """A loss that is a class method, and writes what it has seen to its class; NaN for one row."""

    mean, calls = 0.0, 0

    @classmethod
    def compute(cls, outputs, labels, num_items_in_batch=None):
        loss = torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())
        loss = loss * (NAN if int(labels[0, 0]) == 3 + 4 else 1)
        cls.mean = 0.9 * cls.mean + 0.1 * float(loss.detach())
        cls.calls += 1
        return loss * (1 + cls.mean)


def test_a_loss_that_is_a_class_method_forgets_a_bad_batch(tmp_path):
    theirs, mine = (type("Loss", (ClassLoss,), {}) for _ in range(2))
    settings = {"gradient_accumulation_steps": 1, "train_sampling_strategy": "sequential"}
    reference, extra = without(stock_class("plain"), (2, 0)), {"compute_loss_func": theirs.compute}
    expected = _run(build("plain", tmp_path / "reference", reference, guard=False, extra=extra, **settings))
    ours = build("plain", tmp_path / "ours", extra={"compute_loss_func": mine.compute}, **settings)
    assert_same(_run(ours), expected)
    assert [event["culprit"]["rows"] for event in events_of(ours)] == [[4]]
    assert (mine.calls, mine.mean) == (theirs.calls, theirs.mean)


def test_a_loss_of_ones_own_may_ignore_minus_one(tmp_path):
    value = -1

    class Mine(stock_class("plain")):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs["labels"]
            logits = model(input_ids=inputs["input_ids"]).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=value)

    def spoiled(folder, guard):
        trainer = build("plain", folder, Mine, guard=guard)
        collate = trainer.data_collator

        def ignore_some(examples):
            batch = collate(examples)
            batch["labels"][:, :3] = value
            return batch

        trainer.data_collator = ignore_some
        return trainer

    stock = spoiled(tmp_path / "stock", False)
    expected = _run(stock)
    ours = spoiled(tmp_path / "ours", True)
    assert_same(_run(ours), expected)
    assert events_of(ours) == []
