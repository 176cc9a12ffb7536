"""What a callback can do on a trainer with a training loop of its own: detect, skip, report."""

import logging

from accelerate.optimizer import AcceleratedOptimizer
from transformers import TrainerControl

from ...core.event_summary import EventSummary
from ...core.vocabulary import Action
from ..trainer.arguments import GuardArguments, find_guard_arguments
from .gradient_monitor import GradientMonitorCallback

logger = logging.getLogger("hf_nanguard")


class ReducedGuard(GradientMonitorCallback):
    """Skips a step with a non-finite gradient as a whole, and names the parameters.

    Args:
        guard (`GuardArguments`, *optional*):
            The settings, of which only `nanguard_mode` has an effect.
    """

    def __init__(self, guard: GuardArguments | None = None):
        super().__init__()
        self.arguments = guard
        self.acts = True

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        policy = find_guard_arguments(self.arguments, args).policy()
        self.acts = policy.acts
        if policy.mode != "off":
            super().on_train_begin(args, state, control, model=model, **kwargs)

    def on_train_end(self, args, state, control, **kwargs):
        super().on_train_end(args, state, control, **kwargs)
        text = None if self.writer is None else self.summary.format_end(self.writer.path)
        if text is not None and args.process_index == 0:
            logger.warning(text)
        self.summary = EventSummary()

    def contain(self, optimizer: AcceleratedOptimizer | None, control: TrainerControl) -> Action:
        if not self.acts:
            return Action.OBSERVED
        self.skip_step(optimizer)
        return Action.SKIPPED
