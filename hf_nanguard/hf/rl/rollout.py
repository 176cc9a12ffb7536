"""The completions of an online trainer: sampled under guard, scored under guard, and left out where they are garbage.

A completion in which a row of scores had to be repaired or ended was not drawn from the policy: it is masked out of the
loss and out of its group's baseline. Many of them mean a sick model, so the parameters are looked at, and the run ends
rather than train on garbage.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ...core.event import Culprit, Event
from ...core.finite import find_nonfinite
from ...core.settings import Policy
from ...core.step.guard import Guard
from ...core.vocabulary import Action, Cause, Signal
from ..compat.online_trainer import OLD, OLD_SUM, REFERENCE, join_images, split_images
from ..compat.trainer import logged_advantages, metric_lists
from ..generation.guard_generation import guard_generation
from ..generation.sampling_record import GenerationWatch
from .reward_check import (
    MAX_KEPT,
    BadReward,
    check_advantages,
    checked_rewards,
    holds_bad_reward,
    is_insane,
    strike_unscorable,
)

logger = logging.getLogger("hf_nanguard")

MUCH = 0.5  # the share of sick completions above which the model itself is suspected
OFTEN = 3  # generations in a row with a sick completion, likewise
# what is read of a completion by the forward and before the mask
STAND_INS = ("prompt_ids", "prompt_mask", "completion_ids", "token_type_ids", "mm_token_type_ids", "pixel_values",
             "pixel_attention_mask", "image_grid_thw", "image_sizes", "image_position_ids", "spatial_shapes", "num_images",
             "num_tiles", OLD, REFERENCE, "sampling_per_token_logps", "importance_sampling_ratio")  # fmt: skip


class Rollout:
    """What is known of the completions that are being generated and scored.

    Args:
        trainer (`Trainer`):
            The online trainer.
        guard (`Guard`):
            Its guard.
        policy (`Policy`):
            What to do.
    """

    def __init__(self, trainer: Any, guard: Guard, policy: Policy):
        self.trainer = trainer
        self.guard = guard
        self.policy = policy
        self.rows: list[int] | None = None
        self.own_scoring: str | None = None
        self.size = 0
        self.sick: set[int] = set()
        self.told: dict[int, list[int]] = {}
        self.sick_in_a_row = 0
        self.flooded_in_a_row = 0
        self.events: list[Event] = []
        self.bad_reward = False
        self.all_equal: bool | None = None

    def begin(self, size: int, rows: list[int] | None, own_scoring: str | None = None) -> None:
        """Begins a generation batch; `own_scoring` is the name of the user's code that scores it, if any."""
        self.own_scoring = own_scoring
        self.size, self.rows = size, rows if rows is not None and len(rows) == size else None
        self.sick, self.told = set(), {}
        self.events, self.bad_reward = [], False

    # ---- sampling ----

    @contextmanager
    def generating(self) -> Iterator[GenerationWatch | None]:
        """Guards the model's `generate` meanwhile."""
        policy = self.policy
        if policy.logits_mode == "off" or not policy.acts:
            yield None
            return
        verbose = Signal.LOGITS_NONFINITE not in self.guard.journal.written
        with guard_generation(
            self.trainer.model, policy.logits_mode, policy.logits_clip_value, policy.logits_min_prob, verbose
        ) as watch:
            yield watch

    def note(self, watch: GenerationWatch | None, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> None:
        """Notes which completions are garbage, in any turn of a conversation; all of them if that cannot be told."""
        if watch is None:
            return
        found = watch.find_nonfinite([len(ids) for ids in completion_ids])
        owners = self._find_owners(prompt_ids)
        for row, owner in enumerate(owners):
            self.told[owner] = [*prompt_ids[row], *completion_ids[row]]
        if len(owners) == len(completion_ids):
            self.sick |= {owners[row] for row in found}
        elif found:
            self.sick |= set(range(self.size))

    def _find_owners(self, prompt_ids: list[list[int]]) -> list[int]:
        """Returns which completion each prompt belongs to, `[]` if that is not clear.

        The first turn has all of them. A later one has those that called a tool, in the same order, and begins with all that
        was said before.
        """
        if not self.told:
            return list(range(self.size)) if len(prompt_ids) == self.size else []
        owners: list[int] = []
        for ids in prompt_ids:
            begin = owners[-1] + 1 if owners else 0
            owner = next((i for i in range(begin, self.size) if ids[: len(self.told[i])] == self.told[i]), None)
            if owner is None:
                return []
            owners.append(owner)
        return owners

    # ---- scoring ----

    def score(
        self, calculate: Callable[..., Tensor], inputs: Any, prompts: Any, completions: Any, *rest: Any, **more: Any
    ) -> Tensor:
        """Runs the host's `_calculate_rewards`; completions with a bad reward become unscorable, on every rank alike."""
        acts = self.policy.acts
        with checked_rewards(self.trainer, self.sick if acts else (), prompts, completions, acts) as check:
            rewards = calculate(inputs, prompts, completions, *rest, **more)
        found = check.bad
        if not found and self.own_scoring is not None:  # an override of the user's has had the last word
            own = rewards[self.rank * len(prompts) :][: len(prompts)]
            at = [i for i in own.isinf().any(dim=1).nonzero().flatten().tolist() if i not in self.sick]
            found = [BadReward(self.own_scoring, i, "inf", "returned an infinite reward") for i in at[:MAX_KEPT]]
        for bad in found:
            self._tell_reward(bad)
        if not acts:
            return rewards
        self.bad_reward = self.policy.on_bad_reward == "halt" and holds_bad_reward(rewards)
        return strike_unscorable(rewards)

    def _tell_reward(self, bad: BadReward) -> None:
        action = Action.HALTED if self.policy.on_bad_reward == "halt" else Action.DROPPED
        action = action if self.policy.acts else Action.OBSERVED
        message = f"{self.when}, {bad.message}"
        values = {"kind": bad.kind, "whole_call": bad.whole}
        culprit, cause = bad.culprit(self.rows), Cause.REWARD_NONFINITE
        self.events.append(
            Event(self.step, Signal.REWARD_NONFINITE, action, message, None, self.rank, values, culprit, cause)
        )

    # ---- what comes of it ----

    def finish(self, output: dict[str, Any]) -> str | None:
        """Leaves garbage out of the loss and returns why the run has to end, `None` if it goes on. All ranks call it."""
        if not self.policy.acts:
            for event in self.events:
                self.guard.journal.write(event)
            return None
        if self.sick:
            output["completion_mask"] = output["completion_mask"].clone()
            output["completion_mask"][sorted(self.sick)] = 0
            self._put_healthy_tokens(output)
            self._tell_sick()
        known = logged_advantages(self.trainer)  # what the host has read already is not read again
        if known is None or any(is_insane(advantage) for advantage in known):
            self._tell_advantages(check_advantages(output))
        equal = metric_lists(self.trainer).get("frac_reward_zero_std")
        self.all_equal = equal[-1] == 1.0 if equal else None
        if not self.guard.ranks.any(bool(self.events or self.sick or self.bad_reward)):
            self.sick_in_a_row = self.flooded_in_a_row = 0
            return None
        self.guard.journal.write_shared(self.events)
        return self._escalate()

    def _put_healthy_tokens(self, output: dict[str, Any]) -> None:
        """Gives masked completions the tokens and images of a healthy one: what the model cannot sample for it cannot score
        either, and 0 times NaN would cost all that share the forward."""
        healthy = next((i for i in range(self.size) if i not in self.sick), None)
        if healthy is None:
            return
        parts = split_images(output)
        for name in STAND_INS:
            value = parts.get(name)
            if isinstance(value, (Tensor, list)) and len(value) == self.size:
                owners = [healthy if i in self.sick else i for i in range(self.size)]
                parts[name] = value[owners] if isinstance(value, Tensor) else [value[i] for i in owners]
        output.update(join_images(parts))
        if isinstance(output.get(OLD_SUM), Tensor):  # of what is masked now
            output[OLD_SUM] = output[OLD_SUM].clone()
            output[OLD_SUM][sorted(self.sick)] = 0.0

    def _tell_sick(self) -> None:
        samples = sorted(self.sick)
        rows = None if self.rows is None else sorted({self.rows[sample] for sample in samples})
        message = (
            f"logits were not finite while {len(samples)} of {self.size} completions were sampled {self.when}; "
            "they are left out of loss and baseline"
        )
        culprit = Culprit(phase="sampling", samples=samples, rows=rows)
        values = {"num_sick": len(samples), "num_completions": self.size}
        self.events.append(
            Event(self.step, Signal.LOGITS_NONFINITE, Action.DROPPED, message, None, self.rank, values, culprit)
        )

    def _tell_advantages(self, samples: list[int]) -> None:
        if not samples:
            return
        rows = None if self.rows is None else sorted({self.rows[sample] for sample in samples})
        message = f"advantages of {len(samples)} completions were no sane numbers {self.when} and are taken as 0"
        culprit = Culprit(phase="reward", samples=samples, rows=rows)
        self.events.append(
            Event(self.step, Signal.ADVANTAGE_NONFINITE, Action.REPAIRED, message, None, self.rank, {}, culprit)
        )

    def _escalate(self) -> str | None:
        """Looks at the parameters if there was much garbage, or garbage time and again."""
        facts = self.guard.ranks.gather({"sick": len(self.sick), "size": self.size})
        if self.bad_reward:  # of any rank: all of them have looked at the gathered rewards
            return (
                f"Training was halted at step {self.step}: a reward was no finite number. The policy on_bad_reward is "
                "'halt'; the event says which."
            )
        sick, size = sum(fact["sick"] for fact in facts), sum(fact["size"] for fact in facts)
        flooded = sick > MUCH * size
        if self.trainer.model.training:  # an evaluation says nothing about how often training meets it
            self.sick_in_a_row = self.sick_in_a_row + 1 if sick else 0
            self.flooded_in_a_row = self.flooded_in_a_row + 1 if flooded else 0
        if not flooded and self.sick_in_a_row < OFTEN:
            return None
        found = self.guard.ranks.gather(find_nonfinite(self.trainer.model.named_parameters()))
        bad = {name: kind for report in found for name, kind in report.items()}
        if bad:
            name = next(iter(bad))
            message = f"parameter {name} holds {'NaN' if bad[name] == 'nan' else 'inf'} at step {self.step}"
            values = {"num_bad_parameters": len(bad), "bad_parameters": dict(list(bad.items())[:12])}
            culprit, cause = Culprit(phase="parameter", parameter=name), Cause.PARAM_NONFINITE
            event = Event(self.step, Signal.PARAM_NONFINITE, Action.HALTED, message, None, 0, values, culprit, cause)
            self.guard.journal.write_once(event)
            return f"Training was halted: {message}, so nothing it samples means anything."
        if self.flooded_in_a_row < self.policy.max_bad_steps:
            return None
        message = f"most completions were garbage {self.flooded_in_a_row} generations in a row, though every parameter is finite"
        self.guard.journal.write_once(
            Event(self.step, Signal.LOGITS_NONFINITE, Action.HALTED, message, culprit=Culprit(phase="sampling"))
        )
        return f"Training was halted at step {self.step}: {message}."

    @property
    def when(self) -> str:
        """Where in the run completions are being made."""
        return f"at step {self.step}" if self.trainer.model.training else f"in the evaluation at step {self.step}"

    @property
    def step(self) -> int:
        """The step of the trainer."""
        return self.trainer.state.global_step

    @property
    def rank(self) -> int:
        """This rank."""
        return self.guard.ranks.rank
