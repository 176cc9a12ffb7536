"""Every callback keeps the same promises: a healthy run is the stock run, a bad one names its culprit and no other."""

from functools import partial

import pytest
from transformers import TrainerCallback

from hf_nanguard.hf import callbacks
from hf_nanguard.testing import INF, NAN, Fault, plant
from tests.reference import assert_same, losses_of, tensors_of
from tests.trainers import KINDS, build, events_of

LAYER = "model.layers.0.mlp.down_proj.weight"
ADAPTER = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.default.weight"

CALLBACKS = {
    "ActivationMonitorCallback": partial(callbacks.ActivationMonitorCallback, check_every_n_steps=1),
    "CheckpointGuardCallback": callbacks.CheckpointGuardCallback,
    "GradientMonitorCallback": callbacks.GradientMonitorCallback,
    "NanGuardCallback": callbacks.NanGuardCallback,
}
WATCH_GRADIENTS = ["GradientMonitorCallback", "NanGuardCallback"]
VARIANTS = {
    "default": {},
    "one micro-batch": {"gradient_accumulation_steps": 1},
    "tight clipping": {"max_grad_norm": 0.05},
    "no clipping": {"max_grad_norm": 0.0},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "lora": {"lora": True},
    "bf16": {"bf16": True},
    "fused": {"optim": "adamw_torch_fused"},
}
SET_UPS = [("plain", variant) for variant in VARIANTS] + [(kind, "default") for kind in KINDS[1:]] + [("sft", "lora")]


def test_every_callback_is_in_the_matrix():
    exported = {
        name for name, item in vars(callbacks).items() if isinstance(item, type) and issubclass(item, TrainerCallback)
    }
    assert exported == CALLBACKS.keys()


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize(("kind", "variant"), SET_UPS)
def test_a_healthy_run_is_the_stock_run(name, kind, variant, tmp_path):
    settings = {"max_steps": 3, **VARIANTS[variant]}
    stock = build(kind, tmp_path / "stock", guard=False, **settings)
    stock.train()
    expected = tensors_of(stock)
    watched = build(kind, tmp_path / "ours", guard=False, extra={"callbacks": [CALLBACKS[name]()]}, **settings)
    watched.train()
    assert_same(tensors_of(watched), expected)
    assert losses_of(watched) == losses_of(stock)
    assert len(losses_of(stock)) == 3
    assert events_of(watched) == []
    hooks = [[len(module._forward_hooks) for module in run.model.modules()] for run in (stock, watched)]
    assert hooks[0] == hooks[1]


@pytest.mark.parametrize("name", WATCH_GRADIENTS)
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(("kind", "variant"), SET_UPS)
def test_the_culprit_and_no_other_is_named(name, value, kind, variant, tmp_path):
    settings = {"max_steps": 2, **VARIANTS[variant]}
    culprit = ADAPTER if settings.get("lora") else LAYER
    trainer = build(kind, tmp_path, guard=False, extra={"callbacks": [CALLBACKS[name]()]}, **settings)
    planted = plant(trainer, Fault("gradient", step=1, parameter=culprit, value=value))
    trainer.train()
    assert len(planted.triggered) == 1
    [event] = events_of(trainer)
    assert (event["signal"], event["step"]) == ("grad_nonfinite", 1)
    assert event["culprit"]["parameter"] == culprit
    assert event["values"]["bad_parameters"] == {culprit: "nan" if value is NAN else "inf"}
    trainable = sum(parameter.requires_grad for parameter in trainer.model.parameters())
    assert event["values"]["num_good_parameters"] == trainable - 1
