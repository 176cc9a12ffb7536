"""The public surface, frozen: what is named here changes only on purpose, with a line in the CHANGELOG.

The closed lists are those of the design document, not of the code.
"""

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

import hf_nanguard
from hf_nanguard import (
    ActivationMonitorCallback,
    GradientMonitorCallback,
    Guard,
    GuardArguments,
    GuardedTrainingArguments,
    NanGuardCallback,
    Policy,
    attach,
    guarded,
    replay,
)
from hf_nanguard.cli.main import build_parser
from hf_nanguard.core.event import Culprit, Event
from hf_nanguard.core.vocabulary import Action, Cause, Signal

ROOT = Path(__file__).parent.parent


def words(text: str) -> list[str]:
    return text.split()


NAMES = words("""ActivationMonitorCallback ArgumentError CheckpointGuardCallback
GradientMonitorCallback Guard GuardArguments GuardedGRPOConfig GuardedGRPOTrainer
GuardedSFTConfig GuardedSFTTrainer GuardedTrainer GuardedTrainerMixin GuardedTrainingArguments LossMissingError
NanGuardCallback NanGuardError NonFiniteError NumericalStabilityLogitsProcessor Policy
SafeTemperatureLogitsWarper attach check_config check_dataset guard_generation guarded prove read_events replay scan_checkpoint verify
watch_tensor weigh_term bounded_loss clamp_weight distillation_loss dtype_eps masked_cross_entropy normalized_mse soft_cap""")

ARGUMENTS = {
    "nanguard_mode": (str, "act"),
    "nanguard_doctor": (str, "warn"),
    "nanguard_precision": (str, "keep"),
    "nanguard_on_nonfinite": (str, "drop"),
    "nanguard_loss_floor": (float, 1e-6),
    "nanguard_on_loss_error": (str, "raise"),
    "nanguard_on_bad_input": (str, "drop"),
    "nanguard_skip_grad_norm": (float | None, None),
    "nanguard_on_spike": (str, "observe"),
    "nanguard_max_bad_steps": (int, 10),
    "nanguard_max_rewinds": (int, 3),
    "nanguard_rewind_lr_factor": (float, 1.0),
    "nanguard_snapshot_steps": (int | None, None),
    "nanguard_on_param_nonfinite": (str, "rewind"),
    "nanguard_on_bad_start": (str, "halt"),
    "nanguard_on_halt": (str, "raise"),
    "nanguard_autopsy": (bool, True),
    "nanguard_max_autopsies": (int, 5),
    "nanguard_autopsy_seconds": (float, 60.0),
    "nanguard_quarantine": (str, "skip"),
    "nanguard_bundle": (bool, True),
    "nanguard_bundle_weights": (str, "none"),
    "nanguard_bundle_text": (bool, True),
    "nanguard_push_to_hub": (bool, False),
    "nanguard_logits_mode": (str, "repair"),
    "nanguard_logits_clip_value": (float, 30.0),
    "nanguard_logits_min_prob": (float, 1e-8),
    "nanguard_min_temperature": (float, 0.1),
    "nanguard_on_bad_reward": (str, "unscorable"),
    "nanguard_ratio_bound": (float | None, 20.0),
    "nanguard_stall_steps": (int, 20),
    "nanguard_activation_steps": (int, 50),
    "nanguard_activation_modules": (str | None, None),
    "nanguard_attention_steps": (int, 0),
    "nanguard_weight_check_steps": (int, 100),
    "nanguard_full_metrics": (bool, False),
}

SIGNALS = words("""labels_masked label_out_of_range input_nonfinite input_out_of_range loss_nonfinite loss_zero loss_missing
loss_error prediction_nonfinite eval_nonfinite grad_nonfinite grad_spike loss_spike loss_diverged activation_nonfinite
activation_headroom entropy_collapse param_nonfinite optimizer_nonfinite reward_nonfinite advantage_nonfinite
ratio_overflow logits_nonfinite checkpoint_nonfinite update_stalled no_learning_signal run_restarted
rows_quarantined guard_failed""")

ACTIONS = words("observed repaired dropped skipped clipped rewound halted refused")

CAUSES = words("""all_labels_masked label_out_of_range input_nonfinite fp16_overflow bf16_overflow fp32_overflow exp_overflow log_of_zero
div_by_zero sqrt_at_zero norm_at_zero where_unselected_branch masked_row_softmax ctc_target_too_long norm_overflow
param_nonfinite uninitialised_weight optimizer_state adam_eps_underflow lr_too_high reward_nonfinite ratio_overflow kl_overflow
rounding_stall transient unknown""")

EVENT_KEYS = words("schema time step micro_step rank signal action message values culprit cause remedies bundle")

CULPRIT_KEYS = words("phase module op source parameter term samples rows tokens reward_function prompt completion")

GUARD_SIGNATURE = (
    "(model=None, optimizer=None, policy=None, *, scheduler=None, scaler=None, max_grad_norm=None, ranks=None, "
    "on_event=None, folder=None)"
)
GRADIENT_MONITOR_SIGNATURE = "(check_every_n_steps=1, log_every_n_steps=10, halt_on_nan=False)"
SIGNATURES = [
    (Guard, GUARD_SIGNATURE),
    (Guard.step, "(self, loss_fn, batches)"),
    (Guard.watch, "(self, name, tensor, bound=None)"),
    (Guard.term, "(self, name, value, weight=1.0, on_nonfinite='keep')"),
    (
        hf_nanguard.masked_cross_entropy,
        "(logits, labels, ignore_index=-100, num_items=None, chunk_size=None)",
    ),
    (
        hf_nanguard.distillation_loss,
        "(student_logits, teacher_logits, temperature=2.0, mask=None, num_items=None, chunk_size=None)",
    ),
    (hf_nanguard.normalized_mse, "(prediction, target, mask=None, eps=None, directions=False)"),
    (hf_nanguard.bounded_loss, "(loss, bound)"),
    (hf_nanguard.clamp_weight, "(weight, max=100.0)"),
    (hf_nanguard.soft_cap, "(logits, cap)"),
    (hf_nanguard.dtype_eps, "(dtype, eps=1e-08)"),
    (GradientMonitorCallback, GRADIENT_MONITOR_SIGNATURE),
    (ActivationMonitorCallback, "(check_every_n_steps=50, modules=None, full_metrics=False)"),
    (NanGuardCallback, "(guard=None)"),
    (attach, "(trainer, guard=None)"),
    (guarded, "(trainer_class)"),
    (hf_nanguard.check_config, "(*configurations, task=None, skip=())"),
    (hf_nanguard.check_dataset, "(trainer, sample=2000, skip=(), report=None)"),
    (hf_nanguard.verify, "(trainer, steps=20, output_dir=None, report=None, memory_limit=None)"),
    (hf_nanguard.prove, "(trainer, only=None, skip=(), progress=None)"),
    (replay, "(path, checkpoint=None, factory=None, remedies=False)"),
    (hf_nanguard.scan_checkpoint, "(path, deep=False, as_dtype=None)"),
]

COMMANDS = ["doctor", "run", "sft", "grpo", "demo", "watch", "report", "replay", "scan", "completion"]


def bare_signature(function) -> str:
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def test_public_names():
    assert sorted(hf_nanguard.__all__) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_public_names_can_be_had(name):
    assert getattr(hf_nanguard, name).__doc__


def test_arguments():
    kinds = get_type_hints(GuardArguments)  # HfArgumentParser writes into the `type` of the fields
    assert {f.name: (kinds[f.name], f.default) for f in fields(GuardArguments)} == ARGUMENTS
    assert all(f.metadata["help"] for f in fields(GuardArguments))


def test_policy_has_the_same_settings():
    assert {f"nanguard_{f.name}": f.default for f in fields(Policy)} == {name: d for name, (_, d) in ARGUMENTS.items()}


def test_guarded_arguments_keep_the_defaults_of_the_host():
    from transformers import TrainingArguments

    mine = {f.name: f.default for f in fields(GuardedTrainingArguments) if f.name not in ARGUMENTS}
    assert mine == {f.name: f.default for f in fields(TrainingArguments)}


@pytest.mark.parametrize(("enum", "values"), [(Signal, SIGNALS), (Action, ACTIONS), (Cause, CAUSES)])
def test_closed_lists(enum, values):
    assert [str(member) for member in enum] == values


def test_event_schema():
    event = Event(3, Signal.GRAD_NONFINITE, Action.SKIPPED, "message", culprit=Culprit()).as_dict()
    assert list(event) == EVENT_KEYS
    assert list(event["culprit"]) == CULPRIT_KEYS
    assert event["schema"] == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", event["time"])


@pytest.mark.parametrize(("function", "signature"), SIGNATURES, ids=[f.__qualname__ for f, _ in SIGNATURES])
def test_signatures(function, signature):
    assert bare_signature(function) == signature


def test_commands():
    [subparsers] = [action for action in build_parser()._actions if action.dest == "command"]
    assert list(subparsers.choices) == COMMANDS


def test_versions_agree():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{hf_nanguard.__version__}"' in project
    assert hf_nanguard.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("hf_nanguard", ("torch", "transformers", "accelerate", "trl")),
        ("hf_nanguard.core.step.guard", ("transformers", "accelerate", "trl")),
        ("hf_nanguard.checkpoints.scan", ("transformers", "accelerate", "trl")),
        ("hf_nanguard.report.run_files", ("torch", "transformers", "accelerate", "trl")),
        ("hf_nanguard.cli.main", ("torch", "transformers", "accelerate", "trl", "rich")),
        ("hf_nanguard.hf.guarded_trainer", ("trl",)),
    ],
)
def test_imports_stay_light(module, absent):
    code = f"import sys, {module}; print(*(name for name in {absent!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
