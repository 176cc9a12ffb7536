"""Numerical safety for Hugging Face training: a bad step leaves no trace."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .harmless_log import make_harmless

if TYPE_CHECKING:
    from .bundle_replay.rebuild import replay as replay
    from .checkpoints.scan import scan_checkpoint as scan_checkpoint
    from .core.losses import bounded_loss as bounded_loss
    from .core.losses import clamp_weight as clamp_weight
    from .core.losses import distillation_loss as distillation_loss
    from .core.losses import dtype_eps as dtype_eps
    from .core.losses import masked_cross_entropy as masked_cross_entropy
    from .core.losses import normalized_mse as normalized_mse
    from .core.losses import soft_cap as soft_cap
    from .core.settings import Policy as Policy
    from .core.step.guard import Guard as Guard
    from .doctor.config_check import check_config as check_config
    from .doctor.dataset_check import check_dataset as check_dataset
    from .doctor.laws.prove import prove as prove
    from .errors import ArgumentError as ArgumentError
    from .errors import LossMissingError as LossMissingError
    from .errors import NanGuardError as NanGuardError
    from .errors import NonFiniteError as NonFiniteError
    from .hf.attach_guard import attach as attach
    from .hf.callbacks import ActivationMonitorCallback as ActivationMonitorCallback
    from .hf.callbacks import CheckpointGuardCallback as CheckpointGuardCallback
    from .hf.callbacks import GradientMonitorCallback as GradientMonitorCallback
    from .hf.callbacks import NanGuardCallback as NanGuardCallback
    from .hf.generation.guard_generation import guard_generation as guard_generation
    from .hf.generation.logits_processors import NumericalStabilityLogitsProcessor as NumericalStabilityLogitsProcessor
    from .hf.generation.logits_processors import SafeTemperatureLogitsWarper as SafeTemperatureLogitsWarper
    from .hf.guarded_grpo import GuardedGRPOConfig as GuardedGRPOConfig
    from .hf.guarded_grpo import GuardedGRPOTrainer as GuardedGRPOTrainer
    from .hf.guarded_sft import GuardedSFTConfig as GuardedSFTConfig
    from .hf.guarded_sft import GuardedSFTTrainer as GuardedSFTTrainer
    from .hf.guarded_trainer import GuardedTrainer as GuardedTrainer
    from .hf.guarded_trainer import guarded as guarded
    from .hf.named_terms import watch_tensor as watch_tensor
    from .hf.named_terms import weigh_term as weigh_term
    from .hf.trainer.arguments import GuardArguments as GuardArguments
    from .hf.trainer.arguments import GuardedTrainingArguments as GuardedTrainingArguments
    from .hf.trainer.mixin import GuardedTrainerMixin as GuardedTrainerMixin
    from .report.run_files import read_events as read_events
    from .verification.measured_run import verify as verify

__version__ = "0.1.0"

make_harmless(logging.getLogger(__name__))

# Loaded on first use, so that the core needs no transformers and the Trainer no trl.
_HOMES = {
    "ArgumentError": "errors",
    "LossMissingError": "errors",
    "NanGuardError": "errors",
    "NonFiniteError": "errors",
    "Guard": "core.step.guard",
    "bounded_loss": "core.losses",
    "clamp_weight": "core.losses",
    "distillation_loss": "core.losses",
    "dtype_eps": "core.losses",
    "masked_cross_entropy": "core.losses",
    "normalized_mse": "core.losses",
    "soft_cap": "core.losses",
    "Policy": "core.settings",
    "GuardArguments": "hf.trainer.arguments",
    "GuardedTrainingArguments": "hf.trainer.arguments",
    "GuardedTrainerMixin": "hf.trainer.mixin",
    "GuardedTrainer": "hf.guarded_trainer",
    "guarded": "hf.guarded_trainer",
    "attach": "hf.attach_guard",
    "GuardedSFTConfig": "hf.guarded_sft",
    "GuardedSFTTrainer": "hf.guarded_sft",
    "GuardedGRPOConfig": "hf.guarded_grpo",
    "GuardedGRPOTrainer": "hf.guarded_grpo",
    "check_config": "doctor.config_check",
    "check_dataset": "doctor.dataset_check",
    "verify": "verification.measured_run",
    "read_events": "report.run_files",
    "watch_tensor": "hf.named_terms",
    "weigh_term": "hf.named_terms",
    "prove": "doctor.laws.prove",
    "replay": "bundle_replay.rebuild",
    "scan_checkpoint": "checkpoints.scan",
    "NumericalStabilityLogitsProcessor": "hf.generation.logits_processors",
    "SafeTemperatureLogitsWarper": "hf.generation.logits_processors",
    "guard_generation": "hf.generation.guard_generation",
    "NanGuardCallback": "hf.callbacks",
    "CheckpointGuardCallback": "hf.callbacks",
    "GradientMonitorCallback": "hf.callbacks",
    "ActivationMonitorCallback": "hf.callbacks",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
