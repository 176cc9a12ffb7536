"""What a trainer's losses write to its metrics is put back with the step, and nothing else there is touched."""

from collections import deque

import pytest
import torch

from hf_nanguard.testing import Fault, plant

from ...reference import assert_same, tensors_of, without
from ...trainers import build, events_of, stock_class


class Booked(stock_class("plain")):
    """Keeps metrics of its own under the name that TRL uses, and acts on what it finds there."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._metrics = {"train": self.begin_metrics()}

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss * (1 + self.write_metrics(self._metrics["train"], float(loss.detach())) / 100)


class Replacing(Booked):
    def begin_metrics(self):
        return {"mean": [0.0]}

    def write_metrics(self, metrics, loss):
        metrics["mean"] = [0.9 * metrics["mean"][0] + 0.1 * loss]
        return metrics["mean"][0]


class WritingInPlace(Replacing):
    def write_metrics(self, metrics, loss):
        metrics["mean"][0] = 0.9 * metrics["mean"][0] + 0.1 * loss
        return metrics["mean"][0]


class Emptying(Booked):
    def begin_metrics(self):
        return {"a": []}

    def write_metrics(self, metrics, loss):
        metrics["a"].append(loss)
        return len(metrics["a"])

    def log(self, *args, **kwargs):
        super().log(*args, **kwargs)
        self._metrics["train"]["a"].clear()


class LoggingAnything(Replacing):
    """Its loss writes a row of the log, which empties nothing."""

    def write_metrics(self, metrics, loss):
        self.log({"loss of a batch": loss})
        return super().write_metrics(metrics, loss)


@pytest.mark.parametrize(("step", "accumulation"), [(1, 3), (2, 1)])
@pytest.mark.parametrize("trainer_class", [Replacing, WritingInPlace, Emptying, LoggingAnything])
def test_metrics_of_a_bad_batch_leave_no_trace(trainer_class, step, accumulation, tmp_path):
    settings, place = {"gradient_accumulation_steps": accumulation}, (step, accumulation - 1)
    reference = build("plain", tmp_path / "reference", without(trainer_class, place), guard=False, **settings)
    reference.train()
    ours = build("plain", tmp_path / "ours", trainer_class, **settings)
    held = dict(ours._metrics["train"])
    plant(ours, Fault("loss", *place))
    ours.train()
    assert_same(tensors_of(ours), tensors_of(reference))
    assert ours._metrics == reference._metrics
    assert [event["signal"] for event in events_of(ours)] == ["loss_nonfinite"]
    if trainer_class in (WritingInPlace, Emptying):
        assert all(ours._metrics["train"][name] is values for name, values in held.items()), "the same lists"


class LoggingInside(Booked):
    """Its loss writes a row of the log, which takes the metrics as TRL's does."""

    def begin_metrics(self):
        self.logged = []
        return {"emptied": []}

    def write_metrics(self, metrics, loss):
        metrics["emptied"].append(loss)
        metrics.setdefault("taken", []).append(loss)
        if len(metrics["taken"]) == 4:  # in the first micro-batch of the second step
            self.log({"row": 1})
        return 0.0

    def log(self, logs, *args, **kwargs):
        super().log(logs, *args, **kwargs)
        if "row" in logs:
            self.logged = self._metrics["train"].pop("taken")
            self._metrics["train"]["emptied"].clear()


def test_metrics_that_were_logged_inside_a_step_do_not_come_back(tmp_path):
    ours = build("plain", tmp_path, LoggingInside, max_steps=2)
    plant(ours, Fault("loss", 1, 1))
    ours.train()
    metrics, others = ours._metrics["train"], ours.logged[:3]
    assert len(ours.logged) == 4
    assert metrics["taken"] == metrics["emptied"]
    assert len(metrics["taken"]) == 2  # of the good micro-batches
    assert not {*metrics["taken"]} & {*others}
    assert [event["signal"] for event in events_of(ours)] == ["loss_nonfinite"]


FOREIGN = {
    "deque": lambda: {"a": deque([1.0], maxlen=50)},
    "tensor": lambda: {"a": torch.zeros(3)},
    "number": lambda: {"a": 0.5},
    "none": lambda: {"a": None},
    "dictionary": lambda: {"a": {"b": [1.0]}},
    "no metrics": lambda: None,
    "list": lambda: [1.0],
}


@pytest.mark.parametrize("faults", [(), (Fault("loss", 1, 1),)])
@pytest.mark.parametrize("kind", FOREIGN)
def test_metrics_that_are_no_lists_are_left_alone(kind, faults, tmp_path):
    expected = build(
        "plain",
        tmp_path / "reference",
        without(stock_class("plain"), *((f.step, f.micro_step) for f in faults)),
        guard=False,
    )
    expected.train()
    ours = build("plain", tmp_path / "ours")
    ours._metrics = {"train": (metrics := FOREIGN[kind]())}
    values = dict(metrics) if isinstance(metrics, dict) else {}
    plant(ours, *faults)
    ours.train()
    assert_same(tensors_of(ours), tensors_of(expected))
    assert [event["signal"] for event in events_of(ours)] == ["loss_nonfinite" for _ in faults]
    assert ours._metrics["train"] is metrics
    assert all(metrics[name] is value for name, value in values.items())
    assert repr(metrics) == repr(FOREIGN[kind]())
