"""The monitors of a guarded trainer: those of any loop, and one that knows the attention of transformers."""

from typing import Any

from ...core.monitors import monitor_set
from ...core.monitors.base import Monitor
from ...core.step.guard import Guard
from ..compat.accelerate import bare_optimizer
from .attention_monitor import AttentionMonitor


def build_monitors(args: Any, model: Any, optimizer: Any, guard: Guard) -> tuple[Monitor, ...]:
    """Builds the monitors of a run, once its model and optimizer are there.

    Args:
        args (`TrainingArguments`):
            The host's.
        model (`nn.Module`):
            The model without wrappers.
        optimizer (`AcceleratedOptimizer`, *optional*):
            The optimizer as the host has it; `None` if weights and moments are kept where nobody else can look.
        guard (`Guard`):
            The guard of the run.
    """
    policy, shared = guard.policy, (guard.journal, guard.ranks)
    bare = None if optimizer is None else bare_optimizer(optimizer)
    monitors = monitor_set.build_monitors(policy, model, bare, *shared, compiled=bool(args.torch_compile))
    if policy.attention_steps and policy.mode != "off":
        monitors += (AttentionMonitor(model, *shared, policy.attention_steps, policy.full_metrics),)
    return monitors
