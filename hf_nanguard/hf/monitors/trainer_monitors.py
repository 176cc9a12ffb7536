"""The monitors of a guarded trainer: those of any training loop, and one for the attention of transformers models."""

from torch import nn
from torch.optim import Optimizer

from ...core.monitors import monitor_set
from ...core.monitors.base import Monitor
from ...core.step.guard import Guard
from ..compat.accelerate import bare_optimizer
from .attention_monitor import AttentionMonitor
from .attention_probe import find_head


def build_monitors(model: nn.Module, optimizer: Optimizer | None, guard: Guard, compiled: bool) -> tuple[Monitor, ...]:
    """Builds the monitors of a run once its model, without DDP wrapper, and its optimizer exist. The optimizer is `None` if
    weights and optimizer state cannot be read from here; `compiled` says whether nothing but compiled graphs runs."""
    policy, journal = guard.policy, guard.journal
    bare = None if optimizer is None else bare_optimizer(optimizer)
    monitors = monitor_set.build_monitors(policy, model, bare, journal, compiled=compiled, head=find_head(model))
    if policy.attention_steps and policy.mode != "off":
        monitors += (AttentionMonitor(model, journal, policy.attention_steps, policy.full_metrics),)
    return monitors
