"""float16 with a GradScaler under the Trainer: its own overflow skips are normal, ours leave it as it was.

On a CPU accelerate builds no scaler, so a shim gives the Accelerator the CPU scaler of torch before anything is
prepared; from there on it is the real `AcceleratedOptimizer` and the real Trainer loop.
"""

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainingArguments

from hf_nanguard import GuardedTrainer
from hf_nanguard.testing import Fault, plant

from ...models import tiny_llama, token_dataset
from ...reference import assert_same, tensors_of, without
from ...trainers import common_arguments, events_of


@pytest.fixture(autouse=True)
def fp16_state():
    yield
    AcceleratorState._reset_state(True)


def _build(tmp_path, cls, init_scale=2.0**4, growth_interval=3, **overrides):
    args = TrainingArguments(**common_arguments(tmp_path, **overrides))
    trainer = cls(tiny_llama(), args, train_dataset=token_dataset(48))
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)
    trainer.accelerator.native_amp = True
    trainer.accelerator.state._mixed_precision = "fp16"
    return trainer


def _scaler_state(trainer):
    scaler = trainer.accelerator.scaler
    return scaler._scale.item(), scaler._growth_tracker.item()


def test_the_scaler_finds_its_scale_without_an_event(tmp_path):
    huge = {"init_scale": 2.0**127, "max_steps": 8}
    stock = _build(tmp_path / "stock", Trainer, **huge)
    stock.train()
    expected, scale = tensors_of(stock), _scaler_state(stock)
    assert scale[0] < 2.0**127
    ours = _build(tmp_path / "ours", GuardedTrainer, **huge)
    ours.train()
    assert_same(tensors_of(ours), expected)
    assert _scaler_state(ours) == scale
    assert events_of(ours) == []
    assert ours.nanguard.guard.counter.scaler_skips > 0
    rows = [row for row in ours.state.log_history if "nanguard/scaler_skips" in row]
    assert rows[-1]["nanguard/scaler_skips"] == ours.nanguard.guard.counter.scaler_skips


@pytest.mark.parametrize("places", [[(1, 1)], [(1, 0), (1, 1), (1, 2)]])
def test_a_contained_step_leaves_the_scaler_as_it_was(places, tmp_path):
    class Reference(without(Trainer, *places)):
        """A step with nothing left must not reach the scaler either."""

        def _clip_grad_norm(self, model):
            if self.num_good:
                return super()._clip_grad_norm(model)
            self.accelerator.gradient_state._set_sync_gradients(False)
            return torch.zeros(())

    reference = _build(tmp_path / "reference", Reference)
    reference.train()
    expected, scale = tensors_of(reference), _scaler_state(reference)
    ours = _build(tmp_path / "ours", GuardedTrainer)
    plant(ours, *[Fault("loss", *place) for place in places])
    ours.train()
    assert_same(tensors_of(ours), expected)
    assert _scaler_state(ours) == scale
    assert ours.lr_scheduler.last_epoch == reference.lr_scheduler.last_epoch
    assert {event["action"] for event in events_of(ours)} == {"dropped" if len(places) == 1 else "skipped"}
