"""A gradient norm that overflows although every gradient is finite, because the squares of some are too large for the dtype."""

import math
from dataclasses import dataclass

from ..event import Culprit, Event
from ..finite import find_nonfinite, total_norm
from ..journal import Journal
from ..ranks import Ranks
from ..rerun.runner import Runner
from ..vocabulary import Action, Cause, Signal


@dataclass(eq=False)
class OverflowedNorm:
    """Measures such a norm again, and reports the first one of a run."""

    journal: Journal
    is_reported: bool = False

    def measure_again(self, runner: Runner, step: int, norm: float) -> float:
        """Returns the true norm if every gradient is finite, else the given one."""
        gradients = runner.named_gradients()
        ranks = self.journal.ranks if runner.lockstep else Ranks(alone=True)
        if any(ranks.gather(bool(find_nonfinite(gradients)))):
            return norm
        exact = math.hypot(*ranks.gather(total_norm([gradient for _, gradient in gradients])))
        if not self.is_reported:
            message = f"the gradient norm is {norm} at step {step} although every gradient is finite: it overflows. The true norm is {exact:.4g}"
            values = {"grad_norm": norm, "true_norm": exact, "num_bad_parameters": 0}
            culprit, cause = Culprit(phase="backward"), Cause.NORM_OVERFLOW
            self.journal.write_once(
                Event(
                    step, Signal.GRAD_NONFINITE, Action.OBSERVED, message, values=values, culprit=culprit, cause=cause
                )
            )
        self.is_reported = True
        return exact
