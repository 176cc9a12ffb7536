"""The monitors of a guarded trainer: those of any training loop, and one for the attention of transformers models."""

from torch import nn
from torch.optim import Optimizer
from transformers import TrainingArguments

from ...core.monitors import monitor_set
from ...core.monitors.base import Monitor
from ...core.step.guard import Guard
from ..compat.accelerate import bare_optimizer
from .attention_monitor import AttentionMonitor


def build_monitors(
    args: TrainingArguments, model: nn.Module, optimizer: Optimizer | None, guard: Guard
) -> tuple[Monitor, ...]:
    """Builds the monitors of a run once its model and optimizer exist.

    Args:
        args (`TrainingArguments`):
            The arguments of the trainer.
        model (`nn.Module`):
            The model, without DDP wrapper.
        optimizer (`AcceleratedOptimizer`, *optional*):
            The optimizer of the trainer; `None` if weights and optimizer state cannot be read from here.
        guard (`Guard`):
            The guard of the run.
    """
    policy, journal = guard.policy, guard.journal
    bare = None if optimizer is None else bare_optimizer(optimizer)
    monitors = monitor_set.build_monitors(policy, model, bare, journal, compiled=bool(args.torch_compile))
    if policy.attention_steps and policy.mode != "off":
        monitors += (AttentionMonitor(model, journal, policy.attention_steps, policy.full_metrics),)
    return monitors
