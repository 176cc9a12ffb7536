"""Unsloth needs a GPU, so its changes to `transformers.Trainer` are made here as unsloth 2026.10 makes them: methods are built
again from their source text, or replaced, on the class itself. A guard that is put in afterwards must still find its places.
"""

import functools
import inspect
import textwrap

import pytest
import transformers.trainer
from transformers import Trainer

from hf_nanguard import attach
from hf_nanguard.takeover.built_trainers import Takeover
from hf_nanguard.testing import Fault, plant

from ..reference import assert_same, losses_of, tensors_of, without
from ..trainers import build, events_of, stock_class

LAYER = "model.layers.1.mlp.up_proj.weight"
FAULTS = {"loss": Fault("loss", 1, 1), "gradient": Fault("gradient", 1, 1, parameter=LAYER)}


def build_again(name: str, new: str, *changes: tuple[str, str]):
    """Returns a method of the Trainer made from its changed source text, in which each text must occur."""
    source = textwrap.dedent(inspect.getsource(getattr(Trainer, name)))
    for old, other in ((f"def {name}", f"def {new}"), *changes):
        assert old in source, old
        source = source.replace(old, other, 1)
    space = dict(vars(transformers.trainer))
    exec(source, space)
    return space[new]


def get_batch_samples(self, epoch_iterator, num_batches, device=None, *args, **kwargs):
    """Counts the shifted labels by itself."""
    batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
    counted = [(batch["labels"][..., 1:] != -100).sum() for batch in batches if "labels" in batch]
    return batches, sum(counted).to(device) if counted else None


def change_trainer(monkeypatch):
    """Leaves the Trainer as Unsloth leaves it."""
    loop = build_again("_inner_training_loop", "_fast_inner_training_loop")
    step = build_again("training_step", "_unsloth_training_step", ("model.train()", "model.training or model.train()"))

    @functools.wraps(step)
    def settled_step(self, *args, **kwargs):
        return step(self, *args, **kwargs)

    host_loss, host_init = Trainer.compute_loss, Trainer.__init__

    def compute_loss(self, model, inputs, *args, **kwargs):
        if kwargs.get("num_items_in_batch") is not None:
            inputs["num_items_in_batch"] = kwargs["num_items_in_batch"]
        return host_loss(self, model, inputs, *args, **kwargs)

    @functools.wraps(host_init)
    def init(self, *args, **kwargs):
        host_init(self, *args, **kwargs)

    changed = {"_inner_training_loop": loop, "training_step": settled_step, "compute_loss": compute_loss,
               "get_batch_samples": get_batch_samples, "__init__": init}  # fmt: skip
    for name, method in changed.items():
        monkeypatch.setattr(Trainer, name, method)


def build_attached(kind, folder):
    return attach(build(kind, folder, guard=False))


def build_taken_over(kind, folder):
    with Takeover({}, lambda sentence: None):
        return build(kind, folder, guard=False)


@pytest.mark.parametrize("put_in", [build_attached, build_taken_over])
@pytest.mark.parametrize(
    ("kind", "fault"), [("plain", None), ("plain", "loss"), ("plain", "gradient"), ("sft", "loss")]
)
def test_a_bad_micro_batch_costs_only_itself(kind, fault, put_in, monkeypatch, tmp_path):
    faults = [] if fault is None else [FAULTS[fault]]
    usual = put_in(kind, tmp_path / "usual")
    plant(usual, *faults)
    usual.train()
    change_trainer(monkeypatch)
    stock = stock_class(kind) if fault is None else without(stock_class(kind), (1, 1))
    reference = build(kind, tmp_path / "reference", stock, guard=False)
    reference.train()
    expected = tensors_of(reference)
    trainer = put_in(kind, tmp_path / "guarded")
    planted = plant(trainer, *faults)
    trainer.train()
    assert_same(tensors_of(trainer), expected)
    assert planted.triggered == faults
    assert Trainer._inner_training_loop.__name__ == "_fast_inner_training_loop"
    if fault is None:
        assert losses_of(trainer) == losses_of(reference)
    assert len(events_of(trainer)) == len(faults)
    for event, expected_event in zip(events_of(trainer), events_of(usual), strict=True):
        assert (event["action"], event["step"], event["micro_step"]) == ("dropped", 1, 1)
        assert event["culprit"] == expected_event["culprit"]
        assert len(event["culprit"]["rows"]) == 2
