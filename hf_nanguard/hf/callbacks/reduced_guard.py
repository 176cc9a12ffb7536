"""What a callback can do on a trainer with a training loop of its own: detect, skip, report."""

from ..trainer.arguments import GuardArguments
from .gradient_monitor import GradientMonitorCallback


class ReducedGuard(GradientMonitorCallback):
    """Skips a step with a non-finite gradient as a whole, and names the parameters.

    Args:
        guard (`GuardArguments`, *optional*):
            The settings, of which only `nanguard_mode` has an effect.
    """

    def __init__(self, guard: GuardArguments | None = None):
        super().__init__()
