"""Numerical safety for Hugging Face training: a bad step leaves no trace."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .harmless_log import make_harmless

if TYPE_CHECKING:
    from .bundle_replay.rebuild import replay
    from .checkpoints.scan import scan_checkpoint
    from .core.losses import (
        bounded_loss,
        clamp_weight,
        distillation_loss,
        dtype_eps,
        masked_cross_entropy,
        normalized_mse,
        soft_cap,
    )
    from .core.settings import Policy
    from .core.step.guard import Guard
    from .doctor.config_check import check_config
    from .doctor.dataset_check import check_dataset
    from .doctor.laws.prove import prove
    from .errors import ArgumentError, LossMissingError, NanGuardError, NonFiniteError
    from .hf.attach_guard import attach
    from .hf.callbacks import (
        ActivationMonitorCallback,
        CheckpointGuardCallback,
        GradientMonitorCallback,
        NanGuardCallback,
    )
    from .hf.generation.guard_generation import guard_generation
    from .hf.generation.logits_processors import NumericalStabilityLogitsProcessor, SafeTemperatureLogitsWarper
    from .hf.guarded_grpo import GuardedGRPOConfig, GuardedGRPOTrainer
    from .hf.guarded_sft import GuardedSFTConfig, GuardedSFTTrainer
    from .hf.guarded_trainer import GuardedTrainer, guarded
    from .hf.named_terms import watch_tensor, weigh_term
    from .hf.trainer.arguments import GuardArguments, GuardedTrainingArguments
    from .hf.trainer.mixin import GuardedTrainerMixin
    from .report.run_files import read_events
    from .verification.measured_run import verify

__version__ = "0.1.0"

make_harmless(logging.getLogger(__name__))

# Loaded on first use, so that the core needs no transformers and the Trainer no trl.
_HOMES = {
    "errors": ("ArgumentError", "LossMissingError", "NanGuardError", "NonFiniteError"),
    "core.step.guard": ("Guard",),
    "core.losses": (
        "bounded_loss",
        "clamp_weight",
        "distillation_loss",
        "dtype_eps",
        "masked_cross_entropy",
        "normalized_mse",
        "soft_cap",
    ),
    "core.settings": ("Policy",),
    "hf.trainer.arguments": ("GuardArguments", "GuardedTrainingArguments"),
    "hf.trainer.mixin": ("GuardedTrainerMixin",),
    "hf.guarded_trainer": ("GuardedTrainer", "guarded"),
    "hf.attach_guard": ("attach",),
    "hf.guarded_sft": ("GuardedSFTConfig", "GuardedSFTTrainer"),
    "hf.guarded_grpo": ("GuardedGRPOConfig", "GuardedGRPOTrainer"),
    "doctor.config_check": ("check_config",),
    "doctor.dataset_check": ("check_dataset",),
    "verification.measured_run": ("verify",),
    "report.run_files": ("read_events",),
    "hf.named_terms": ("watch_tensor", "weigh_term"),
    "doctor.laws.prove": ("prove",),
    "bundle_replay.rebuild": ("replay",),
    "checkpoints.scan": ("scan_checkpoint",),
    "hf.generation.logits_processors": ("NumericalStabilityLogitsProcessor", "SafeTemperatureLogitsWarper"),
    "hf.generation.guard_generation": ("guard_generation",),
    "hf.callbacks": (
        "ActivationMonitorCallback",
        "CheckpointGuardCallback",
        "GradientMonitorCallback",
        "NanGuardCallback",
    ),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
