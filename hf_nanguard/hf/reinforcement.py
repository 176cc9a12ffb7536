"""What guarding a trainer that generates its own data needs beyond the mixin: the rows of its completions."""

import torch

from .mixin import GuardedTrainerMixin
from .row import ROWS


class ReinforcementMixin(GuardedTrainerMixin):
    """The mixin for GRPO, RLOO and their kin.

    Completions are shuffled and split after they were scored, so the dataset row of each travels with it as a tensor
    among the others.
    """

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)  # type: ignore[misc] # of TRL's online trainers
        rows = self.nanguard.current_rows()
        if rows is not None and len(rows) == len(inputs):
            output[ROWS] = torch.tensor(rows)
        return output
