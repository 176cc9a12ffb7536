"""The mixin for online trainers, which generate their own data: guards completions, rewards and log-ratios."""

import logging
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import TypeVar, cast

import torch
from transformers import TrainingArguments

from ...boundary import Boundary
from ...core.rerun.micro_batch import AccumulationGroup
from ...core.step.guard import Guard
from ..compat.online_trainer import OnlineTrainer, find_own_scoring, replaced_scoring
from ..data.dataset_rows import ROWS
from ..data.learning_signal import StepSignal
from ..trainer.arguments import GuardArguments, find_guard_arguments
from ..trainer.guarded_class import entered_once, takes_also
from ..trainer.mixin import SETTINGS, GuardedTrainerMixin
from ..trainer.trainer_guard import TrainerGuard
from .ratio_bound import RatioBound
from .ratio_overflow import RatioOverflow
from .rollout import Rollout

logger = logging.getLogger("hf_nanguard")
Value = TypeVar("Value")


class OnlineGuard:
    """Owns the rollout and the ratio bound of an online trainer. Implements [`OnlineData`]."""

    def __init__(self, trainer: OnlineTrainer, guard: Guard):
        self.trainer = trainer
        self.rollout = Rollout(trainer, guard)
        self.overflow = RatioOverflow(guard.journal)
        bound = guard.policy.ratio_bound if guard.policy.acts else None
        self.ratio = None if bound is None else RatioBound(bound, self.overflow, guard.boundary)

    def add_readings(self, group: AccumulationGroup) -> None:
        """Has the counts of bounded log-ratios read with the step."""
        self.overflow.add_readings(group, self.trainer.state.global_step)

    def step_signal(self, grad_norm: float | None) -> StepSignal | None:
        """Classifies the settled step by its rewards and its gradient norm."""
        return self.rollout.step_signal(grad_norm)

    def take_metrics(self) -> dict[str, float]:
        """Returns how many log-ratios and KL terms were bounded since the last call, if any."""
        counts = self.overflow.take_counts()
        return {f"nanguard/bounded_{name}": float(number) for name, number in counts.items() if number}


class ReinforcementMixin(GuardedTrainerMixin):
    """The mixin for GRPO, RLOO and related trainers.

    Completions are shuffled and split after they were scored, so the dataset row of each travels with it, in a tensor of
    the batch.
    """

    @takes_also(SETTINGS)
    def __init__(self, *args: object, guard: GuardArguments | None = None, **kwargs: object):
        raised = partial(Boundary().call, "temperature", raise_temperature, otherwise=lambda value, guard: value)
        args = tuple(raised(value, guard) for value in args)
        kwargs = {name: raised(value, guard) for name, value in kwargs.items()}
        super().__init__(*args, guard=guard, **kwargs)

    def begin_guarding(self, guard: GuardArguments | None) -> None:
        super().begin_guarding(guard)
        if (trainer_guard := self.nanguard) is not None:
            trainer_guard.boundary.call("online data", self._begin_online, trainer_guard)

    def _begin_online(self, trainer_guard: TrainerGuard) -> None:
        trainer_guard.use_online(OnlineGuard(cast(OnlineTrainer, self), trainer_guard.guard))
        lowest = trainer_guard.policy.min_temperature
        temperature = getattr(self.args, "temperature", lowest)
        if trainer_guard.on and temperature < lowest:
            logger.warning(
                "hf_nanguard: temperature is %s, below nanguard_min_temperature=%s, and this trainer was built with it "
                "already. Build it with a higher one, or as a guarded trainer.",
                temperature,
                lowest,
            )

    @property
    def _online(self) -> OnlineGuard:
        """The guard of completions, rewards and log-ratios. The trainer guard keeps it, because copies of a trainer leave out
        the trainer guard and nothing else."""
        assert isinstance(self.nanguard.online, OnlineGuard)
        return self.nanguard.online

    @entered_once
    def _generate_single_turn(self, guard, host, /, prompt_ids, *args, **kwargs):
        rollout = self._online.rollout
        with rollout.generating() as watch:
            result = host(prompt_ids, *args, **kwargs)
        rollout.note(watch, prompt_ids, result[0] if isinstance(result, tuple) else result)
        return result

    @entered_once
    def _compute_loss(self, guard, host, /, model, inputs, *args, **kwargs):
        ratio = self._online.ratio
        counted = model.training and guard.watches and not guard.replaying
        with nullcontext(inputs) if ratio is None else ratio.around_loss(inputs, counted) as given:
            return host(model, given, *args, **kwargs)

    @entered_once
    def _get_per_token_logps_and_entropies(self, guard, host, /, *args, **kwargs):
        result = host(*args, **kwargs)
        ratio = self._online.ratio
        return result if ratio is None else ratio.on_log_probs(result)

    @entered_once
    def _generate_and_score_completions(self, guard, host, /, inputs):
        online = self._online
        rollout, call = online.rollout, guard.boundary.call  # each apart: every rank must come to `finish`
        rows = call("completions", guard.recorder.current_rows)
        call("completions", lambda: rollout.begin(len(inputs), rows, find_own_scoring(online.trainer)))
        # Not by overriding it here: a subclass of this class may override it too.
        with replaced_scoring(online.trainer, rollout.score, guard.boundary) if guard.on else nullcontext():
            output = host(inputs)
        if rows is not None and len(rows) == len(inputs):
            output[ROWS] = torch.tensor(rows)
        if guard.on:
            guard.step.end_if(rollout.finish(output))
        return output


def raise_temperature(value: Value, guard: GuardArguments | None) -> Value:
    """Returns training arguments with at least the lowest temperature that the guard allows; any other value unchanged.

    The trainer samples and scores with the value it is built with, so the temperature is raised before that, in a copy.
    """
    if not isinstance(value, TrainingArguments) or not hasattr(value, "temperature"):
        return value
    settings = find_guard_arguments(guard, value)
    if settings.nanguard_mode != "act" or value.temperature >= settings.nanguard_min_temperature:
        return value
    raised = copy(value)
    raised.temperature = settings.nanguard_min_temperature
    logger.warning(
        "hf_nanguard: temperature=%s was raised to nanguard_min_temperature=%s, for sampling and log-probabilities alike.",
        value.temperature,
        raised.temperature,
    )
    return raised
