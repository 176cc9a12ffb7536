"""The completions of an online trainer: sampled and scored under guard, and left out of the loss where they are unusable.

A completion for which logits had to be repaired, or which had to be ended, was not drawn from the policy: it is masked out
of the loss and out of its group's baseline. Many of them suggest that the model itself is broken, so the parameters are
checked, and the run ends rather than train on meaningless samples.
"""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from ...core.event import Culprit, Event, JsonValue
from ...core.finite import find_nonfinite
from ...core.step.guard import Guard
from ...core.vocabulary import Action, Cause, Signal
from ..compat.online_trainer import (
    OLD,
    OLD_SUM,
    REFERENCE,
    Completions,
    OnlineTrainer,
    join_images,
    name_reward_functions,
    split_images,
)
from ..compat.trainer import logged_advantages, metric_lists
from ..data.learning_signal import NoSignal, StepSignal
from ..generation.guard_generation import guarded_sampling
from ..generation.sampling_record import GenerationWatch
from .bad_rewards import MAX_KEPT, BadReward
from .reward_values import MAX_ADVANTAGE, holds_bad_reward, mark_unscorable, zero_bad_advantages
from .wrapped_rewards import checked_rewards

MAX_SHARE = 0.5  # of unusable completions, above which the parameters are checked
MAX_IN_A_ROW = 3  # generations with an unusable completion, likewise
# what the forward, and the loss before its mask, read of a completion
REPLACED = ("prompt_ids", "prompt_mask", "completion_ids", "token_type_ids", "mm_token_type_ids", "pixel_values",
            "pixel_attention_mask", "image_grid_thw", "image_sizes", "image_position_ids", "spatial_shapes", "num_images",
            "num_tiles", OLD, REFERENCE, "sampling_per_token_logps", "importance_sampling_ratio")  # fmt: skip


class Rollout:
    """What is known about the completions that are being generated and scored."""

    def __init__(self, trainer: OnlineTrainer, guard: Guard):
        self.trainer = trainer
        self.policy, self.journal, self.ranks = guard.policy, guard.journal, guard.ranks
        self.counter, self.boundary = guard.counter, guard.boundary
        self.num_affected = 0  # generations in a row with an unusable completion
        self.num_mostly_unusable = 0  # generations in a row most of which was unusable
        self.unscored_since: int | None = None  # the first of the steps in a row whose completions all had no score
        self.equal_rewards = False  # within every group of the last generation
        self.is_new = False  # since the last step
        self.begin(0, None)

    def begin(self, size: int, rows: list[int] | None, own_scoring: str | None = None) -> None:
        """Begins a generation batch; `own_scoring` is the name of the user's code that scores it, if any."""
        self.own_scoring = own_scoring
        self.size, self.rows = size, rows if rows is not None and len(rows) == size else None
        self.unusable: set[int] = set()
        self.tokens: dict[int, list[int]] = {}  # of prompt and completion so far, by completion
        self.events: list[Event] = []
        self.bad_reward = False
        self.num_unscorable = 0  # of this rank, without the unusable ones
        self.failed_calls: list[str] = []  # what reward functions did instead of scoring

    # ---- sampling ----

    def generating(self) -> AbstractContextManager[GenerationWatch | None]:
        """Guards the model's `generate` inside the block."""
        policy = self.policy
        if policy.logits_mode == "off" or not policy.acts:
            return nullcontext()
        verbose = Signal.LOGITS_NONFINITE not in self.journal.written
        bounds = policy.logits_clip_value, policy.logits_min_prob
        return guarded_sampling(self.trainer.model, policy.logits_mode, *bounds, verbose, self.boundary)

    def note(self, watch: GenerationWatch | None, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> None:
        """Notes which completions are unusable, in any turn of a conversation; all of them if that is not clear."""
        if watch is None:
            return
        found = watch.find_nonfinite([len(ids) for ids in completion_ids])
        owners = self._find_owners(prompt_ids)
        for row, owner in enumerate(owners):
            self.tokens[owner] = [*prompt_ids[row], *completion_ids[row]]
        if len(owners) == len(completion_ids):
            self.unusable |= {owners[row] for row in found}
        elif found:
            self.unusable |= set(range(self.size))

    def _find_owners(self, prompt_ids: list[list[int]]) -> list[int]:
        """Returns which completion each prompt belongs to, `[]` if that is not clear.

        The first turn has all completions. A later one has those that called a tool, in the same order, and each of its
        prompts begins with all tokens of the turns before.
        """
        if not self.tokens:
            return list(range(self.size)) if len(prompt_ids) == self.size else []
        owners: list[int] = []
        for ids in prompt_ids:
            begin = owners[-1] + 1 if owners else 0
            owner = next((i for i in range(begin, self.size) if ids[: len(self.tokens[i])] == self.tokens[i]), None)
            if owner is None:
                return []
            owners.append(owner)
        return owners

    # ---- scoring ----

    def score(
        self,
        calculate: Callable[..., Tensor],
        /,
        inputs: object,
        prompts: Sequence[object],
        completions: Sequence[object],
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        """Runs the host's `_calculate_rewards`; completions with a bad reward become unscorable, on every rank alike."""
        acts, halts = self.policy.acts, self.policy.on_bad_reward == "halt"
        unusable = self.unusable if acts else ()
        with checked_rewards(self.trainer, unusable, prompts, completions, acts, self.boundary) as check:
            rewards = calculate(inputs, prompts, completions, *args, **kwargs)
        action = (Action.HALTED if halts else Action.DROPPED) if acts else Action.OBSERVED
        found = check.bad or self._find_own_infinities(rewards, len(prompts))
        for bad in found:
            values = {"kind": bad.kind, "whole_call": bad.whole}
            why = {"culprit": bad.culprit(self.rows), "cause": Cause.REWARD_NONFINITE}
            self._add_event(Signal.REWARD_NONFINITE, action, bad.message, values=values, **why)
        if not acts:
            return rewards
        if found:
            marked = rewards[self.ranks.rank * len(prompts) :][: len(prompts)].isinf().any(dim=1).tolist()
            self.num_unscorable = sum(is_bad and i not in self.unusable for i, is_bad in enumerate(marked))
            self.failed_calls = [bad.message for bad in found if bad.whole]
        self.bad_reward = halts and holds_bad_reward(rewards)
        return mark_unscorable(rewards)

    def _find_own_infinities(self, rewards: Tensor, size: int) -> list[BadReward]:
        """Finds what the user's own scoring, if there is any, did to the rewards after the functions returned them."""
        if self.own_scoring is None:
            return []
        own = rewards[self.ranks.rank * size :][:size].isinf().any(dim=1).nonzero().flatten().tolist()
        found = [i for i in own if i not in self.unusable][:MAX_KEPT]
        return [BadReward(self.own_scoring, i, "inf", "returned an infinite reward") for i in found]

    # ---- the result ----

    def finish(self, output: Completions) -> str | None:
        """Leaves unusable completions out of the loss and returns why the run has to end, `None` if it goes on. Every rank
        must call it."""
        if not self.policy.acts:
            for event in self.events:
                self.boundary.call("completions", self.journal.write, event)
            return None
        self.boundary.call("completions", self._leave_out, output)
        if not self.ranks.any(bool(self.events or self.unusable or self.bad_reward)):
            self.num_affected = self.num_mostly_unusable = 0
            self.unscored_since = None
            return None
        return self.boundary.together("escalation", self._conclude, lambda why: None)

    def _conclude(self) -> str | None:
        self.journal.write_shared(self.events)
        return self._escalate()

    def _leave_out(self, output: Completions) -> None:
        """Leaves out of the loss what this rank knows to be bad."""
        if self.unusable:
            output["completion_mask"] = output["completion_mask"].clone()
            output["completion_mask"][sorted(self.unusable)] = 0
            self._replace_unusable(output)
            message = (
                f"{len(self.unusable)} of {self.size} completions left out of loss and baseline because their logits were NaN "
                "or inf while they were sampled"
            )
            values = {"num_unusable": len(self.unusable), "num_completions": self.size}
            culprit = self._blame(self.unusable, "sampling")
            self._add_event(Signal.LOGITS_NONFINITE, Action.DROPPED, message, values=values, culprit=culprit)
        known = logged_advantages(self.trainer)  # the host has read them already
        may_be_bad = known is None or not all(abs(advantage) < MAX_ADVANTAGE for advantage in known)  # also for a NaN
        if may_be_bad and (zeroed := zero_bad_advantages(output)):
            message = (
                f"Advantages of {len(zeroed)} completions set to 0 because they were NaN, inf or implausibly large"
            )
            self._add_event(Signal.ADVANTAGE_NONFINITE, Action.REPAIRED, message, culprit=self._blame(zeroed, "reward"))
        equal = metric_lists(self.trainer).get("frac_reward_zero_std")
        self.note_rewards(equal[-1] == 1.0 if equal else None)

    def _replace_unusable(self, output: Completions) -> None:
        """Gives unusable completions the tokens and images of a usable one. A model that cannot sample for a prompt cannot
        score it either, and 0 * NaN would spoil every completion that shares the forward."""
        usable = next((i for i in range(self.size) if i not in self.unusable), None)
        if usable is None:
            return
        parts = split_images(output)
        owners = [usable if i in self.unusable else i for i in range(self.size)]
        for name in REPLACED:
            value = parts.get(name)
            if isinstance(value, (Tensor, list)) and len(value) == self.size:
                parts[name] = value[owners] if isinstance(value, Tensor) else [value[i] for i in owners]
        output.update(join_images(parts))
        if isinstance(output.get(OLD_SUM), Tensor):  # a sum over tokens that are masked now
            output[OLD_SUM] = output[OLD_SUM].clone()
            output[OLD_SUM][sorted(self.unusable)] = 0.0

    def _escalate(self) -> str | None:
        """Checks the parameters if many completions were unusable, or some in several generations in a row."""
        facts = self.ranks.gather((len(self.unusable), self.size, self.num_unscorable, len(self.failed_calls)))
        if self.bad_reward:  # of any rank: all of them have read the gathered rewards
            return (
                f"Training was halted at step {self.step} because a reward was not a finite number "
                "(on_bad_reward='halt'). The event names the reward function."
            )
        num_unusable, size, num_unscorable, num_failed = (sum(numbers) for numbers in zip(*facts, strict=True))
        if self.trainer.model.training:
            self.counter.count_rewards(num_unscorable, num_failed)
            if (
                reason := self._halt_unscored(num_unscorable > 0 and num_unscorable + num_unusable >= size)
            ) is not None:
                return reason
        most = num_unusable > MAX_SHARE * size
        if self.trainer.model.training:  # generations of an evaluation are not counted
            self.num_affected = self.num_affected + 1 if num_unusable else 0
            self.num_mostly_unusable = self.num_mostly_unusable + 1 if most else 0
        if not most and self.num_affected < MAX_IN_A_ROW:
            return None
        found = self.ranks.gather(find_nonfinite(self.trainer.model.named_parameters()))
        bad = {name: kind for report in found for name, kind in report.items()}
        if not bad and self.num_mostly_unusable < self.policy.max_bad_steps:
            return None
        if bad:
            name = next(iter(bad))
            message = f"Parameter {name} contains {'NaN' if bad[name] == 'nan' else 'inf'} at step {self.step}."
            values: dict[str, JsonValue] = {"num_bad_parameters": len(bad)}
            values["bad_parameters"] = dict(list(bad.items())[:12])
            culprit, cause = Culprit(phase="parameter", parameter=name), Cause.PARAM_NONFINITE
            event = Event(
                self.step, Signal.PARAM_NONFINITE, Action.HALTED, message, values=values, culprit=culprit, cause=cause
            )
        else:
            message = (
                f"Most completions were unusable in {self.num_mostly_unusable} generations in a row up to step {self.step}, "
                "although every parameter is finite."
            )
            culprit = Culprit(phase="sampling")
            event = Event(self.step, Signal.LOGITS_NONFINITE, Action.HALTED, message, culprit=culprit)
        self.journal.write_once(event)
        why = " because the model's samples are meaningless" if bad else ""
        return f"Training was halted{why}. {message}"

    def _halt_unscored(self, is_unscored: bool) -> str | None:
        """Returns why the run has to end if no completion could be scored for too many steps in a row."""
        if not is_unscored:
            self.unscored_since = None
            return None
        self.unscored_since = self.step if self.unscored_since is None else self.unscored_since
        num_steps = self.step - self.unscored_since + 1
        if num_steps < self.policy.max_bad_steps:
            return None
        last = next((message for found in self.ranks.gather(self.failed_calls[:1]) for message in found), None)
        message = f"No completion could be scored in {num_steps} steps in a row, from step {self.unscored_since} on" + (
            "." if last is None else f"; last: {last}."
        )
        culprit, cause = Culprit(phase="reward"), Cause.REWARD_NONFINITE
        event = Event(self.step, Signal.REWARD_NONFINITE, Action.HALTED, message, culprit=culprit, cause=cause)
        self.journal.write_once(event)
        return f"Training was halted. {message} To allow more, raise nanguard_max_bad_steps."

    # ---- events ----

    def _add_event(self, signal: Signal, action: Action, message: str, **more: Any) -> None:
        """Adds an event that is written once the generation is finished."""
        evaluates = "" if self.trainer.model.training else "in the evaluation "
        message = f"{message} ({evaluates}at step {self.step})."
        self.events.append(Event(self.step, signal, action, message, **more))

    def _blame(self, samples: Collection[int], phase: str) -> Culprit:
        rows = None if self.rows is None else sorted({self.rows[sample] for sample in samples})
        return Culprit(phase=phase, samples=sorted(samples), rows=rows)

    # ---- the signal of a step ----

    def note_rewards(self, all_equal: bool | None) -> None:
        """Notes whether the rewards of a generation were equal within every group; `None` if that is not known."""
        if all_equal is not None:
            self.equal_rewards, self.is_new = all_equal, True

    def step_signal(self, grad_norm: float | None) -> StepSignal | None:
        """Classifies the settled step, which may have learned from the completions of an earlier one.

        `None` without reward functions, or if it was skipped and nothing was scored for it.
        """
        is_new, self.is_new = self.is_new, False
        names = name_reward_functions(self.trainer)
        if not names or not (is_new or (grad_norm is not None and math.isfinite(grad_norm))):
            return None
        zero = NoSignal.ZERO_GRADIENT if grad_norm == 0.0 else None
        missing = NoSignal.EQUAL_REWARDS if self.equal_rewards else zero
        return StepSignal(missing, "reward", f"Reward functions: {', '.join(names)}.", is_global=True)

    @property
    def step(self) -> int:
        return self.trainer.state.global_step
