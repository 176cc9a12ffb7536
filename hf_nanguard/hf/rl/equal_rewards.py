"""Tells when reinforcement learning goes on without learning: equal rewards in every group, or a gradient of zero.

GRPO's loss is 0.0 in healthy runs too, so the loss says nothing; the spread of the rewards and the gradient do.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any


class StallWatch:
    """Counts optimizer steps in a row that had nothing to learn from.

    Args:
        stall_steps (`int`):
            How many make a stall; 0 turns the watch off.

    Example:

    ```python
    watch = StallWatch(20)
    message = watch.observe(step, all_equal=True, grad_norm=0.0, reward_names=["accuracy"])
    ```
    """

    def __init__(self, stall_steps: int):
        self.stall_steps = stall_steps
        self.num_stalled = 0
        self.num_equal = 0
        self.first_step = 0
        self.told = False
        self.all_equal = False

    def observe(
        self,
        step: int,
        all_equal: bool | None,
        grad_norm: float | None,
        reward_names: Sequence[str],
        constant: Collection[str] | None = None,
    ) -> str | None:
        """Takes note of one optimizer step.

        Args:
            step (`int`):
                The step.
            all_equal (`bool` or `None`):
                Whether the rewards were equal within every group; `None` if nothing was generated for this step, which
                then learns from the completions of an earlier one.
            grad_norm (`float` or `None`):
                The gradient norm before clipping; `None`, or not finite, if there was no step to speak of.
            reward_names (`Sequence[str]`):
                The reward functions.
            constant (`Collection[str]`, *optional*):
                Those that gave the same reward to all completions, if that is known.

        Returns:
            `str` or `None`: a message for the event `no_learning_signal`, once a stall.
        """
        known = grad_norm is not None and math.isfinite(grad_norm)
        if not self.stall_steps or (all_equal is None and not known):
            return None
        if all_equal is not None:
            self.all_equal = bool(all_equal)
        if not self.all_equal and grad_norm != 0.0:
            self.num_stalled, self.num_equal, self.told = 0, 0, False
            return None
        self.first_step = step if not self.num_stalled else self.first_step
        self.num_stalled += 1
        self.num_equal += self.all_equal
        if self.told or self.num_stalled < self.stall_steps:
            return None
        self.told = True
        return self._tell(step, reward_names, constant)

    def _tell(self, step: int, reward_names: Sequence[str], constant: Collection[str] | None) -> str:
        if self.num_equal == self.num_stalled:
            why = "the rewards were equal within every group"
            advice = "Check that the reward functions can tell completions apart and that the sampling varies"
        elif not self.num_equal:
            why = "the gradient was exactly zero"
            advice = "Check that rewards could be given at all and that the trained parameters take part in the loss"
        else:
            why = "the rewards were equal within every group or the gradient was exactly zero"
            advice = "Check that the reward functions give rewards that differ between completions"
        flat = [name for name in reward_names if constant is not None and name in constant]
        names = ", ".join(reward_names) + (f" (constant: {', '.join(flat)})" if flat else "")
        return (
            f"nothing to learn from in {self.num_stalled} optimizer steps in a row, from step {self.first_step} to "
            f"{step}: {why}. Reward functions: {names}. {advice}."
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns what `load_state_dict` needs."""
        return {name: value for name, value in vars(self).items() if name != "stall_steps"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the counts of a checkpoint."""
        num_stalled, num_equal, first_step = (int(state[name]) for name in ("num_stalled", "num_equal", "first_step"))
        self.told, self.all_equal = bool(state["told"]), bool(state["all_equal"])
        self.num_stalled, self.num_equal, self.first_step = num_stalled, num_equal, first_step
