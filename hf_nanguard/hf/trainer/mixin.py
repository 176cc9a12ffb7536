"""The mixin that guards any Trainer: each override calls the host once and tells the session what happened."""

import math
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from .arguments import GuardArguments, find_guard_arguments
from .hidden_class import Stealth
from .host_methods import HostMethods, entered_once
from .run_record import load_guard, save_guard
from .trainer_guard import TrainerGuard

if TYPE_CHECKING:
    from transformers import Trainer as _Host
else:
    _Host = object


class GuardedTrainerMixin(Stealth, _Host):
    """Puts the guard into a [`~transformers.Trainer`] or any subclass of it. Mix it in first.

    Args:
        guard (`GuardArguments`, *optional*):
            The guard's settings. Without it they are taken from the training arguments if these are guarded ones, and
            are the defaults otherwise. All other arguments are the host's.

    Metrics that are added to every row of training losses:

    | metric | meaning |
    |---|---|
    | `nanguard/skipped_steps` | optimizer steps that were skipped |
    | `nanguard/dropped_microbatches` | micro-batches, of all ranks, that were left out |
    | `nanguard/success_rate` | micro-batches used / seen; `_recent`: of the last 100 |
    | `nanguard/grad_norm_max` | largest pre-clip norm since the last row |
    | `nanguard/scaler_skips` | steps the GradScaler skipped by itself, once there are any |
    | `nanguard/term/<name>` | mean of a loss term named by `guard.term`, since the last row, of this rank |
    | `nanguard/dropped_terms/<name>` | how often a term was dropped on this rank, once it was |

    Example:

    ```python
    class MyGuardedTrainer(GuardedTrainerMixin, MyTrainer):
        pass
    ```
    """

    given_guard: GuardArguments | None = None

    def __init__(self, *args: Any, guard: GuardArguments | None = None, **kwargs: Any):
        self.given_guard = guard
        super().__init__(*args, **kwargs)
        self.begin_guarding(guard)

    @cached_property
    def nanguard(self) -> TrainerGuard:
        """The guard of this trainer. A host's constructor that evaluates or counts its batches has it before it is done."""
        self.begin_guarding(self.given_guard)
        return self.nanguard

    def begin_guarding(self, guard: GuardArguments | None) -> None:
        """Sets the guard up on a trainer that is already built."""
        self.nanguard = TrainerGuard(self, find_guard_arguments(guard, self.args))
        self.nanguard.host = HostMethods(self, GuardedTrainerMixin)

    def train(self, *args, **kwargs):
        with self.nanguard.training(), self.nanguard.guarded_generation():
            output = super().train(*args, **kwargs)
        no_mean = isinstance(output, TrainOutput) and self.nanguard.has_no_mean
        return output._replace(training_loss=math.nan) if no_mean else output

    # ---- data ----

    @entered_once
    def get_train_dataloader(self):
        if not self.nanguard.watches:  # somebody looks at the batches, or counts them: nothing may travel with them
            return super().get_train_dataloader()
        with self.nanguard.checked_collate():
            dataloader = super().get_train_dataloader()
        self.nanguard.intake.rows.follow(dataloader, self.accelerator.num_processes)
        return dataloader

    def _run_epoch(self, *args, **kwargs):
        resumed = kwargs.get("resume_from_checkpoint") is not None and kwargs["epoch"] == kwargs["epochs_trained"]
        skipped = resumed and not self.args.ignore_data_skip
        self.nanguard.intake.rows.begin_epoch(kwargs["steps_trained_in_current_epoch"] if skipped else 0)
        self.nanguard.filters = self.args.logging_nan_inf_filter
        with self.nanguard.log_filter(False):
            return super()._run_epoch(*args, **kwargs)

    @entered_once
    def get_batch_samples(self, *args, **kwargs):
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self.nanguard.intake.begin_group(batches)
        return batches, num_items

    @entered_once
    def _prepare_inputs(self, inputs):
        session = self.nanguard
        if session.intake.runner is not None and session.intake.runner.replayed is not None:
            return session.intake.runner.replayed.again()
        prepared = super()._prepare_inputs(inputs)
        if (
            session.intake.recording and session.intake.prepared is None
        ):  # a training_step may prepare twice: it begins with the first
            session.intake.hold_inputs(prepared)
        return prepared

    # ---- one step ----

    @entered_once
    def training_step(self, model, inputs, num_items_in_batch=None):
        return self.nanguard.guard_step(super().training_step, model, inputs, num_items_in_batch)

    @entered_once
    def compute_loss(self, model, inputs, *args, **kwargs):
        result = super().compute_loss(model, inputs, *args, **kwargs)
        with_outputs = bool(args[0]) if args else bool(kwargs.get("return_outputs", False))
        return self.nanguard.check_loss(result, with_outputs, model.training) if self.nanguard.on else result

    @entered_once
    def _clip_grad_norm(self, model):
        if not self.nanguard.watches or self.nanguard.intake.settled or self.nanguard.stepping:
            return super()._clip_grad_norm(model)
        clip = super()._clip_grad_norm
        return self.nanguard.settle(model, self.args.max_grad_norm, lambda: clip(model))

    @entered_once
    def _get_grad_norm(self, model, grad_norm=None):
        session = self.nanguard
        if session.watches and not session.intake.settled:  # max_grad_norm is 0, or a subclass clips by itself
            measure = super()._get_grad_norm
            again = (lambda: measure(model)) if grad_norm is None else (lambda: self._clip_grad_norm(model))
            return session.settle(model, 0.0, again, grad_norm)
        if session.watches and grad_norm is None:  # skipped: there is nothing to measure
            return None
        return super()._get_grad_norm(model, grad_norm)

    @entered_once
    def _maybe_log_save_evaluate(self, *args, **kwargs):
        self.nanguard.after_step()
        self.nanguard.after_update()
        self.nanguard.after_epoch()
        with self.nanguard.log_filter(self.nanguard.filters):
            return super()._maybe_log_save_evaluate(*args, **kwargs)

    # ---- evaluation, log, checkpoint ----

    @entered_once
    def evaluate(self, *args, **kwargs):
        if not self.nanguard.on:
            return super().evaluate(*args, **kwargs)
        with self.nanguard.evaluation.watched(), self.nanguard.guarded_generation():
            metrics = super().evaluate(*args, **kwargs)
            self.nanguard.evaluation.check(metrics)
        return metrics

    @entered_once
    def predict(self, *args, **kwargs):
        with self.nanguard.guarded_generation():
            return super().predict(*args, **kwargs)

    @entered_once
    def _determine_best_metric(self, metrics, trial):
        if self.nanguard.on and self.nanguard.evaluation.spoils_best(metrics):
            return False
        return super()._determine_best_metric(metrics=metrics, trial=trial)

    @entered_once
    def log(self, logs, *args, **kwargs):
        if self.nanguard.replaying:
            return
        if self.nanguard.on and "loss" in logs:
            logs.update(self.nanguard.guard.counter.as_metrics())
            logs.update(self.nanguard.online.take_metrics() if self.nanguard.online is not None else {})
            logs.update(self.nanguard.guard.monitor_set.metrics())
        if "train_loss" in logs and self.nanguard.has_no_mean:
            logs["train_loss"] = math.nan
        super().log(logs, *args, **kwargs)
        if self.nanguard.on:
            self.nanguard.record.write_row()

    @entered_once
    def _save_checkpoint(self, model, trial):
        if not self.nanguard.ending.may_save(model):
            return
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self.nanguard.ending.last_good = folder
        if self.nanguard.on and self.args.should_save:
            save_guard(self.nanguard.guard, folder)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.nanguard.on and checkpoint is not None:
            load_guard(self.nanguard.guard, Path(checkpoint))
