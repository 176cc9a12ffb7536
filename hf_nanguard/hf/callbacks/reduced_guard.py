"""What a callback can do in a training loop that is not that of transformers: detect, skip, report."""

from accelerate.optimizer import AcceleratedOptimizer
from transformers import TrainerControl

from ...core.event_summary import EventSummary
from ...core.journal import log_block
from ...core.monitors.weights import find_bad_weights
from ...core.vocabulary import Action
from ..trainer.arguments import GuardArguments, find_guard_arguments
from .gradient_monitor import GradientMonitorCallback
from .harmless_callback import harmless

NOT_CHECKED = (
    "No gradient was checked, so nothing is guarded: the training loop must call on_step_begin before the forward and "
    "on_pre_optimizer_step before the optimizer steps."
)
NOT_SKIPPED = (
    "The step was not skipped, and weights are not finite: the optimizer steps before on_pre_optimizer_step is called."
)


@harmless
class ReducedGuard(GradientMonitorCallback):
    """Skips a step with a non-finite gradient as a whole, and names the parameters.

    It needs a loop that calls `on_step_begin`, `on_pre_optimizer_step` and `on_step_end` around each step; one that does not is
    reported. The schedule is held only where accelerate has prepared the optimizer. Of the settings, only `nanguard_mode` has
    an effect.
    """

    def __init__(self, guard: GuardArguments | None = None):
        super().__init__()
        self.arguments = guard
        self.acts = True
        self.is_checked = False
        self.has_checked = False  # a step of the run

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        policy = find_guard_arguments(self.arguments, args).policy()
        self.acts = policy.acts
        self.has_checked = False
        if policy.mode != "off":
            super().on_train_begin(args, state, control, model=model, **kwargs)

    def on_train_end(self, args, state, control, **kwargs):
        if self.tap is not None and not self.has_checked and state.global_step > 0:
            self._emit_failure(args, state, NOT_CHECKED)
        super().on_train_end(args, state, control, **kwargs)
        text = None if self.writer is None else self.summary.format_end(args.output_dir)
        if text is not None and args.process_index == 0:
            log_block(text)
        self.summary = EventSummary()

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.is_checked = self.tap is not None and self.tap.armed
        self.has_checked = self.has_checked or self.is_checked
        super().on_pre_optimizer_step(args, state, control, optimizer=optimizer, **kwargs)

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        if self.tap is not None and not self.is_checked:
            self._emit_failure(args, state, NOT_CHECKED)
        if self.tap is not None and self.is_skipping and find_bad_weights(self.tap.model):
            self._emit_failure(args, state, NOT_SKIPPED)
        self.is_checked = False
        super().on_step_end(args, state, control, optimizer=optimizer, **kwargs)

    def contain(self, optimizer: AcceleratedOptimizer | None, control: TrainerControl) -> Action:
        if not self.acts:
            return Action.OBSERVED
        self.skip_step(optimizer)
        return Action.SKIPPED
