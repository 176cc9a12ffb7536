"""A rewound run is bit-identical to one that continued from the snapshot without the batches since then."""

import copy
import sys

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from transformers import TrainerCallback

from hf_nanguard import GuardArguments
from hf_nanguard.hf.trainer.mixin import GuardedTrainerMixin
from hf_nanguard.testing import Fault, plant

from ..models import token_dataset
from ..reference import assert_same, losses_of, tensors_of, without
from ..trainers import build, events_of, stock_class
from .ways import params

LAYER = "model.layers.1.mlp.up_proj.weight"
ADAPTER = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.default.weight"
SETTINGS = {"nanguard_snapshot_steps": 2, "nanguard_autopsy": False}


def prove(kind, folder, faults, gone, guard=None, **overrides):
    """Runs the guarded trainer with faults, and the stock one that never had the steps that are gone."""
    overrides = {"max_steps": 7, "gradient_accumulation_steps": 2, **overrides}
    places = [(step, micro) for step in gone for micro in range(overrides["gradient_accumulation_steps"])]
    reference = build(
        kind, folder / "reference", without(stock_class(kind), *places, generates=False), guard=False, **overrides
    )
    reference.train()
    arguments = GuardArguments(**{**SETTINGS, **(guard or {})})
    ours = build(kind, folder / "guarded", extra={"guard": arguments}, **overrides)
    planted = plant(ours, *faults)
    ours.train()
    assert planted.triggered
    assert_same(tensors_of(ours), tensors_of(reference))
    assert ours.lr_scheduler.state_dict()["last_epoch"] == reference.lr_scheduler.state_dict()["last_epoch"]
    assert ours.state.global_step == reference.state.global_step
    return ours, reference


VARIANTS = {
    "plain": {},
    "fused": {"optim": "adamw_torch_fused"},
    "sgd": {"optim": "sgd"},
    "adafactor": {"optim": "adafactor"},
    "bf16": {"bf16": True},
    "bf16 weights": {"dtype": torch.bfloat16},
    "lora": {"lora": True},
    "cosine": {"lr_scheduler_type": "cosine"},
    "no clipping": {"max_grad_norm": 0.0},
}


@pytest.mark.parametrize("variant", params("plain", "lora", "adafactor", cases=VARIANTS))
def test_weights_that_became_non_finite(variant, tmp_path):
    overrides = dict(VARIANTS[variant])
    name = ADAPTER if "lora" in overrides else LAYER
    ours, reference = prove("plain", tmp_path, [Fault("weight", 3, 1, parameter=name)], (2, 3), **overrides)
    event = events_of(ours)[-1]
    assert (event["signal"], event["action"], event["step"]) == ("param_nonfinite", "rewound", 3)
    assert event["culprit"]["parameter"] == name
    assert len(event["culprit"]["rows"]) == event["values"]["num_rows"] == 8  # two steps of two micro-batches of two
    theirs = {row["step"]: row["loss"] for row in reference.state.log_history if "loss" in row}
    mine = {row["step"]: row["loss"] for row in ours.state.log_history if "loss" in row}
    assert {step: mine[step] for step in (1, 2, 5, 6, 7)} == {step: theirs[step] for step in (1, 2, 5, 6, 7)}
    assert 0.0 not in mine.values()
    mean = sum(theirs[step] for step in (1, 2, 5, 6, 7)) / 5
    assert ours.state.log_history[-1]["train_loss"] == pytest.approx(mean)


def test_a_rewind_between_two_rows_of_the_log(tmp_path):
    ours, reference = prove("plain", tmp_path, [Fault("weight", 3, parameter=LAYER)], (2, 3), logging_steps=7)
    [mine], [theirs] = losses_of(ours), losses_of(reference)
    assert mine == pytest.approx(theirs * 7 / 5)  # the mean over five steps; the stock one divides by seven
    assert ours.state.log_history[-1]["train_loss"] == pytest.approx(mine)


def test_bad_steps_in_a_row_go_back(tmp_path):
    faults = [Fault("loss", step, micro) for step in (3, 4) for micro in range(2)]
    guard = {"nanguard_max_bad_steps": 2}
    ours, _ = prove("plain", tmp_path, faults, (2, 3, 4), guard)
    assert [event["action"] for event in events_of(ours)] == ["skipped"] * 4 + ["rewound"]


def test_losses_that_raise_go_back_without_running_again(tmp_path):
    faults = [Fault("error", step, micro) for step in (3, 4) for micro in range(2)]
    guard = {"nanguard_max_bad_steps": 2, "nanguard_on_loss_error": "drop"}
    ours, _ = prove("plain", tmp_path, faults, (2, 3, 4), guard)
    events = events_of(ours)
    assert [event["action"] for event in events] == ["skipped"] * 4 + ["rewound"]
    assert events[-1]["values"]["applied"] is None  # the batches are bad with any weights


@pytest.mark.parametrize("kind", params("grpo", cases=("sft", "dpo", "grpo")))
def test_trainers_of_trl(kind, tmp_path):
    ours, reference = prove(kind, tmp_path, [Fault("weight", 3, 1, parameter=LAYER)], (2, 3))
    assert events_of(ours)[-1]["action"] == "rewound"
    rows = {
        name: {row["step"]: row for row in trainer.state.log_history if "loss" in row}
        for name, trainer in (("ours", ours), ("reference", reference))
    }
    for step in (5, 6, 7):
        mine, theirs = rows["ours"][step], rows["reference"][step]
        shared = [key for key in theirs if not key.endswith(("num_tokens", "time", "per_second", "epoch", "runtime"))]
        assert {key: mine[key] for key in shared} == {key: theirs[key] for key in shared}


@pytest.mark.parametrize(("step", "gone"), [(5, (4, 5)), (4, (4,))])
def test_completions_that_are_used_for_several_steps(step, gone, tmp_path):
    """Of a generation whose first use is gone, the second one samples anew, from the restored policy."""
    options = {"num_iterations": 2, "max_steps": 8}
    ours, _ = prove("grpo", tmp_path, [Fault("weight", step, 1, parameter=LAYER)], gone, **options)
    event = events_of(ours)[-1]
    assert (event["action"], event["step"], event["values"]["snapshot_step"]) == ("rewound", step, gone[0])


class SkippedEvaluation(TrainerCallback):
    """An evaluation between steps that never came does not come either."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate &= state.global_step != 3


def test_a_schedule_that_follows_the_evaluation_goes_back(tmp_path, monkeypatch):
    """The evaluation after step 2, of weights that are gone, must not count as one without progress."""
    plain_build, rates = build, {}

    def build_with_evaluation(kind, folder, *args, extra=None, **overrides):
        trainer = plain_build(
            kind, folder, *args, extra={**(extra or {}), "eval_dataset": token_dataset(4)}, **overrides
        )
        if not isinstance(trainer, GuardedTrainerMixin):
            trainer.add_callback(SkippedEvaluation())
        return trainer

    monkeypatch.setattr(sys.modules[__name__], "build", build_with_evaluation)
    options = {
        "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 10.0},
        "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip
    ours, reference = prove("plain", tmp_path, [Fault("weight", 3, 1, parameter=LAYER)], (2, 3), **options)
    for trainer in (ours, reference):
        rates[trainer] = trainer.optimizer.param_groups[0]["lr"], trainer.lr_scheduler.state_dict()
    assert rates[ours] == rates[reference]
    assert rates[ours][0] < 1e-2
    assert events_of(ours)[-1]["action"] == "rewound"


def test_a_moment_that_became_non_finite(tmp_path):
    guard = {"nanguard_weight_check_steps": 4}  # after step 3 of 0, 1, 2, 3, whose update has spread it already
    ours, _ = prove("plain", tmp_path, [Fault("moment", 3, 1, parameter=LAYER)], (2, 3), guard)
    [event] = events_of(ours)
    assert (event["signal"], event["action"], event["cause"]) == ("param_nonfinite", "rewound", "optimizer_state")


class Averages(TrainerCallback):
    """Keeps averages of the weights: a module, tensors that it replaces, a module on the trainer, and a flat vector."""

    def __init__(self, trainer, skipped=()):
        self.trainer, self.skipped = trainer, skipped
        self.state = {"module": copy.deepcopy(trainer.model).requires_grad_(False)}
        self.shadow = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
        self.flat = torch.zeros(sum(value.numel() for value in self.shadow.values()))
        trainer.swa = AveragedModel(trainer.model)

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step in self.skipped:
            return
        model = self.trainer.accelerator.unwrap_model(model)
        for mean, value in zip(self.state["module"].parameters(), model.parameters(), strict=True):
            mean.data.mul_(0.5).add_(value.data, alpha=0.5)
        self.shadow = {name: 0.5 * self.shadow[name] + 0.5 * value for name, value in model.named_parameters()}
        self.trainer.swa.update_parameters(model)

    def tensors(self):
        return {**self.state["module"].state_dict(), **{f"shadow.{k}": v for k, v in self.shadow.items()},
                **{f"swa.{k}": v for k, v in self.trainer.swa.state_dict().items()}}  # fmt: skip


def prove_with_copies(kind, folder, fill, tensors, **overrides):
    """As `prove`, with copies of the weights that follow them. The update of step 2 never came, so no copy has seen it."""
    overrides = {"max_steps": 6, "gradient_accumulation_steps": 1, **overrides}
    reference = build(kind, folder / "reference", without(stock_class(kind), (2, 0), (3, 0)), guard=False, **overrides)
    fill(reference, (3,))
    reference.train()
    ours = build(kind, folder / "guarded", extra={"guard": GuardArguments(**SETTINGS)}, **overrides)
    fill(ours, ())
    planted = plant(ours, Fault("weight", 3, parameter=LAYER))
    ours.train()
    assert planted.triggered
    assert_same(tensors_of(ours), tensors_of(reference))
    assert_same(tensors(ours), tensors(reference))
    assert events_of(ours)[-1]["action"] == "rewound"


def test_averages_that_callbacks_and_the_trainer_keep_go_back(tmp_path, caplog):
    kept = {}

    def fill(trainer, skipped):
        kept[id(trainer)] = Averages(trainer, skipped)
        trainer.add_callback(kept[id(trainer)])

    prove_with_copies("plain", tmp_path, fill, lambda trainer: kept[id(trainer)].tensors())
    assert caplog.text.count("Averages.flat holds tensors as large as the trained weights") == 1
    assert caplog.text.count("does not put them back") == 1


@pytest.mark.slow
def test_a_reference_model_that_follows_goes_back(tmp_path):
    def fill(trainer, skipped):
        [follower] = [
            each for each in trainer.callback_handler.callbacks if type(each).__name__ == "SyncRefModelCallback"
        ]
        host = follower.on_step_end
        follower.on_step_end = lambda args, state, control, **kwargs: (
            None if state.global_step in skipped else host(args, state, control, **kwargs)
        )

    options = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    prove_with_copies("dpo", tmp_path, fill, lambda trainer: trainer.ref_model.state_dict(), **options)


RUNS = {
    "diverging learning rate": {
        "learning_rate": 10.0, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 20, "max_grad_norm": 0, "optim": "sgd",
        "max_steps": 120,
    },
    "float16 weights": {"dtype": torch.float16, "optim": "adamw_torch", "learning_rate": 1e-3, "max_steps": 60},
    "a moment": {"max_steps": 60, "learning_rate": 1e-3},
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_runs_that_stock_ends_with_nan_end_finite_and_lower_than_they_began(name, tmp_path):
    ends = {}
    for guard in (False, True):
        overrides = {"gradient_accumulation_steps": 1, "dropout": 0.0, **RUNS[name]}
        trainer = build("plain", tmp_path / str(guard), guard=guard, **overrides)
        plant(trainer, *([Fault("moment", 30, parameter=LAYER)] if name == "a moment" else []))
        trainer.train()
        bad = [key for key, value in tensors_of(trainer).items() if value.is_floating_point() and value.isnan().any()]
        ends[guard] = bad, losses_of(trainer)
    (stock, _), (ours, losses) = ends[False], ends[True]
    assert stock
    assert not ours
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert last < first
    assert "rewound" in {event["action"] for event in events_of(trainer)}
