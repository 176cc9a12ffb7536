"""Numerical safety for Hugging Face training: a bad step leaves no trace."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.guard import Guard as Guard
    from .core.losses import bounded_loss as bounded_loss
    from .core.losses import clamp_weight as clamp_weight
    from .core.losses import distillation_loss as distillation_loss
    from .core.losses import dtype_eps as dtype_eps
    from .core.losses import masked_cross_entropy as masked_cross_entropy
    from .core.losses import normalized_mse as normalized_mse
    from .core.losses import soft_cap as soft_cap
    from .core.policy import Policy as Policy
    from .errors import ArgumentError as ArgumentError
    from .errors import LossMissingError as LossMissingError
    from .errors import NanGuardError as NanGuardError
    from .errors import NonFiniteError as NonFiniteError
    from .hf.arguments import GuardArguments as GuardArguments
    from .hf.arguments import GuardedTrainingArguments as GuardedTrainingArguments
    from .hf.callbacks import ActivationMonitorCallback as ActivationMonitorCallback
    from .hf.callbacks import GradientMonitorCallback as GradientMonitorCallback
    from .hf.callbacks import NanGuardCallback as NanGuardCallback
    from .hf.generation import guard_generation as guard_generation
    from .hf.grpo import GuardedGRPOConfig as GuardedGRPOConfig
    from .hf.grpo import GuardedGRPOTrainer as GuardedGRPOTrainer
    from .hf.mixin import GuardedTrainerMixin as GuardedTrainerMixin
    from .hf.processor import NumericalStabilityLogitsProcessor as NumericalStabilityLogitsProcessor
    from .hf.processor import SafeTemperatureLogitsWarper as SafeTemperatureLogitsWarper
    from .hf.rebuild import replay as replay
    from .hf.sft import GuardedSFTConfig as GuardedSFTConfig
    from .hf.sft import GuardedSFTTrainer as GuardedSFTTrainer
    from .hf.trainer import GuardedTrainer as GuardedTrainer
    from .hf.trainer import attach as attach
    from .hf.trainer import guarded as guarded

__version__ = "0.1.0"

# Loaded on first use, so that the core needs no transformers and the Trainer no trl.
_HOMES = {
    "ArgumentError": "errors",
    "LossMissingError": "errors",
    "NanGuardError": "errors",
    "NonFiniteError": "errors",
    "Guard": "core.guard",
    "bounded_loss": "core.losses",
    "clamp_weight": "core.losses",
    "distillation_loss": "core.losses",
    "dtype_eps": "core.losses",
    "masked_cross_entropy": "core.losses",
    "normalized_mse": "core.losses",
    "soft_cap": "core.losses",
    "Policy": "core.policy",
    "GuardArguments": "hf.arguments",
    "GuardedTrainingArguments": "hf.arguments",
    "GuardedTrainerMixin": "hf.mixin",
    "GuardedTrainer": "hf.trainer",
    "guarded": "hf.trainer",
    "attach": "hf.trainer",
    "GuardedSFTConfig": "hf.sft",
    "GuardedSFTTrainer": "hf.sft",
    "GuardedGRPOConfig": "hf.grpo",
    "GuardedGRPOTrainer": "hf.grpo",
    "replay": "hf.rebuild",
    "NumericalStabilityLogitsProcessor": "hf.processor",
    "SafeTemperatureLogitsWarper": "hf.processor",
    "guard_generation": "hf.generation",
    "NanGuardCallback": "hf.callbacks",
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
