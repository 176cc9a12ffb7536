"""The mixin that guards any Trainer. Each override gets the trainer's guard as `guard` and the host's method as `host`, calls
the method once and hands over to the guard. All of them run behind the boundary of `entered_once`: an error of the guard leaves what the host does.

One `train()`, in the order in which transformers calls us (`guard` is a `TrainerGuard`):

    train()                                 custody.choose_resume: the newest good checkpoint
        for each epoch:
            _run_epoch()                    guard.epoch: batches are checked where they are collated, and which rows each
                                            is made of is recorded
            for each optimizer step:
                get_batch_samples()         recorder.begin_group: findings and rows of the group's batches
                for each micro-batch:
                    training_step()         guard.step.guard_step -> recorder.record: run and hold it; nothing is read
                        _prepare_inputs()   recorder.prepare: hold inputs and random state by reference
                        compute_loss()      guard.check_loss: None is an error
                    floating_point_ops()    guard.step.show_filter: the host has read its log filter, which is off that long
                _clip_grad_norm()           guard.step.settle: norm, ONE host read, decision; redo or skip; clip
                _get_grad_norm()            the same, where the host does not clip
                optimizer.step(), lr_scheduler.step()       the host's own; not after a skip
                _maybe_log_save_evaluate()  guard.step.end_step, after_update (monitors), recorder.end_epoch
                    log()                   the guard's metrics join the row
                    evaluate()              a non-finite loss is an event and never "best"
                    _save_checkpoint()      refused if weights or optimizer state are not finite; read back, then good
                        _push_from_checkpoint()     without the guard's folder, as is push_to_hub()
        _load_best_model()                  not if its files are bad
        _finalize_training()                a run without one good step has no mean loss

A micro-batch that runs again (redo, autopsy) comes through `training_step` too, and passes through to the host.
"""

import logging
import math
from collections.abc import Mapping
from functools import cached_property, partial
from inspect import Parameter
from typing import TYPE_CHECKING, Any, cast

from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput

from ...boundary import Boundary, HostCall
from ...own_fields import own_fields
from ..compat.own_loss import is_library_code
from ..compat.trainer import checkpoint_folder
from ..compat.trainer_protocol import HostTrainer
from .arguments import GuardArguments, find_guard_arguments
from .guarded_class import HostMethods, Stealth, detach, entered_once, reduce_guarded, takes_also
from .run_record import save_guard
from .trainer_guard import TrainerGuard

if TYPE_CHECKING:
    from transformers import Trainer as _Host
else:
    _Host = object

logger = logging.getLogger("hf_nanguard")
RESUME = "resume_from_checkpoint"
SETTINGS = Parameter("guard", Parameter.KEYWORD_ONLY, default=None, annotation=GuardArguments | None)


class GuardedTrainerMixin(Stealth, _Host):
    """Puts the guard into a [`~transformers.Trainer`] or any subclass of it. Mix it in first.

    Args:
        guard (`GuardArguments`, *optional*):
            The guard's settings. Without it they are taken from the training arguments if these are guarded ones, and
            are the defaults otherwise. All other arguments are the host's.

    Metrics of a row of training losses. The log shows `grad_norm_max`, named terms and what is not zero; `metrics.jsonl` has all:

    | metric | meaning |
    |---|---|
    | `nanguard/skipped_steps` | optimizer steps that were skipped |
    | `nanguard/dropped_microbatches` | micro-batches, of all ranks, that were left out |
    | `nanguard/success_rate` | micro-batches used / seen; `_recent`: of the last 100 |
    | `nanguard/grad_norm_max` | largest pre-clip norm since the last row |
    | `nanguard/unscorable_completions` | completions without a finite reward, once there are any |
    | `nanguard/failed_reward_calls` | calls of reward functions that failed as a whole, once there are any |
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
    asked_by: tuple[TrainerCallback, ...] = ()  # the callbacks that asked for the guard
    needs_callback = False  # whether nobody else did, so that it goes off with the last of them

    @takes_also(SETTINGS)
    def __init__(self, *args: Any, guard: GuardArguments | None = None, **kwargs: Any):
        self.given_guard = guard
        super().__init__(*args, **kwargs)
        self.begin_guarding(self.given_guard)

    @cached_property
    def nanguard(self) -> TrainerGuard:
        """The guard of this trainer, also while the host's constructor is still running, which may evaluate."""
        self.begin_guarding(self.given_guard)
        return self.nanguard

    def begin_guarding(self, guard: GuardArguments | None) -> None:
        """Sets up the guard on a trainer that is already built."""
        self.given_guard = guard
        before: TrainerGuard | None = own_fields(self).get("nanguard")
        self.nanguard = Boundary().call("the guard", self._build_guard, guard, max_failures=1)
        if before is not None and self.nanguard is not None:
            before.hand_over(self.nanguard)

    def note_request(self, callback: TrainerCallback | None = None, needs_callback: bool = False) -> None:
        """Notes that the guard was asked for; with `needs_callback` it goes off with the last callback that did."""
        self.asked_by = self.asked_by if callback is None else (*self.asked_by, callback)
        self.needs_callback = needs_callback

    def _build_guard(self, guard: GuardArguments | None) -> TrainerGuard:
        host = HostMethods(self, GuardedTrainerMixin)
        return TrainerGuard(cast(HostTrainer, self), find_guard_arguments(guard, self.args), host)

    def __reduce_ex__(self, protocol):
        return reduce_guarded(type(self), super().__reduce_ex__(protocol))

    @entered_once
    def train(self, guard, host, /, *args, **kwargs):
        if self.needs_callback and not any(callback in self.callback_handler.callbacks for callback in self.asked_by):
            logger.warning("hf_nanguard: this run is not guarded because its NanGuardCallback was removed.")
            detach(self)
            return self.train(*args, **kwargs)
        with guard.training(), guard.unguarded.checked_updates():
            custody, keep = guard.custody, lambda checkpoint: checkpoint
            choose = partial(guard.boundary.call, "custody", custody.choose_resume, otherwise=keep)
            if args:
                args = (choose(args[0]), *args[1:])
            elif kwargs.get(RESUME) is not None:
                kwargs[RESUME] = choose(kwargs[RESUME])
            return host(*args, **kwargs)

    @entered_once
    def _load_optimizer_and_scheduler(self, guard, host, /, *args, **kwargs):
        with guard.unguarded.loading_state():
            return host(*args, **kwargs)

    @entered_once
    def _run_epoch(self, guard, host, /, *args, **kwargs):
        resumed = kwargs.get("resume_from_checkpoint") if kwargs["epoch"] == kwargs["epochs_trained"] else None
        skipped = resumed is not None and not self.args.ignore_data_skip
        position = kwargs["steps_trained_in_current_epoch"] if skipped else 0
        with guard.epoch(kwargs["train_dataloader"], position, resumed):
            return host(*args, **kwargs)

    @entered_once
    def _finalize_training(self, guard, host, /, *args, **kwargs):
        with guard.finalizing():
            output = host(*args, **kwargs)
        if guard.step.has_no_mean and isinstance(output, TrainOutput):  # a subclass may return anything
            return output._replace(training_loss=math.nan)
        return output

    # ---- data ----

    @entered_once
    def get_batch_samples(self, guard, host, /, *args, **kwargs):
        batches, num_items = host(*args, **kwargs)
        return guard.step.begin_group(batches), num_items

    # ---- one step ----

    @entered_once
    def training_step(self, guard, host, /, model, inputs, num_items_in_batch=None):
        return guard.step.guard_step(host, model, inputs, num_items_in_batch)

    @entered_once
    def _prepare_inputs(self, guard, host, /, inputs):
        return guard.recorder.prepare(inputs, host)

    @entered_once
    def compute_loss(self, guard, host, /, model, inputs, *args, **kwargs):
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None  # the host may remove them
        with guard.recorder.watched_loss():
            result = host(model, inputs, *args, **kwargs)
        with_outputs = bool(args[0]) if args else bool(kwargs.get("return_outputs", False))
        return guard.check_loss(result, with_outputs, labels, getattr(model, "training", False)) if guard.on else result

    @entered_once
    def floating_point_ops(self, guard, host, /, inputs):
        guard.step.show_filter()
        return host(inputs)

    @entered_once
    def _clip_grad_norm(self, guard, host, /, model):
        if not guard.recorder.settles:
            return host(model)
        return guard.step.settle(model, self.args.max_grad_norm, HostCall(lambda: host(model)))

    @entered_once
    def _get_grad_norm(self, guard, host, /, model, grad_norm=None):
        if guard.recorder.settles:  # max_grad_norm is 0, or a subclass clips by itself
            if grad_norm is None:
                norm = guard.step.settle(model, 0.0, HostCall(lambda: host(model)))
                return norm if norm is None or is_library_code(host.method) else host(model)
            return guard.step.settle(model, 0.0, HostCall(lambda: self._clip_grad_norm(model)), grad_norm)
        if guard.watches and grad_norm is None:  # skipped: there is nothing to measure
            return None
        return host(model, grad_norm)

    @entered_once
    def _maybe_log_save_evaluate(self, guard, host, /, *args, **kwargs):
        guard.step.end_step()
        guard.step.after_update()
        guard.recorder.end_epoch()
        return host(*args, **kwargs)

    # ---- evaluation, log, checkpoint ----

    @entered_once
    def evaluate(self, guard, host, /, *args, **kwargs):
        if not guard.on:
            return host(*args, **kwargs)
        with guard.evaluation.watched(), guard.guarded_generation():
            metrics = host(*args, **kwargs)
            guard.evaluation.check(metrics)
        return metrics

    @entered_once
    def predict(self, guard, host, /, *args, **kwargs):
        with guard.guarded_generation():
            return host(*args, **kwargs)

    @entered_once
    def _determine_best_metric(self, guard, host, /, metrics, trial):
        if guard.on and guard.evaluation.spoils_best(metrics):
            return False
        return host(metrics=metrics, trial=trial)

    @entered_once
    def log(self, guard, host, /, logs, *args, **kwargs):
        if guard.replaying:
            return
        if guard.on and "loss" in logs:
            guard.recorder.begin_row()
            logs.update(guard.log_metrics())
        if "train_loss" in logs and guard.step.has_no_mean:
            logs["train_loss"] = math.nan
        with guard.step.logging():
            host(logs, *args, **kwargs)
        if guard.on:
            guard.record.write_row()

    @entered_once
    def save_model(self, guard, host, /, output_dir=None, _internal_call=False):
        if guard.on and not guard.custody.may_write(str(output_dir or self.args.output_dir)):
            return
        host(output_dir, _internal_call)

    @entered_once
    def push_to_hub(self, guard, host, /, *args, **kwargs):
        with guard.record.kept_local():
            return host(*args, **kwargs)

    @entered_once
    def _push_from_checkpoint(self, guard, host, /, checkpoint_folder):
        with guard.record.kept_local():
            return host(checkpoint_folder)

    @entered_once
    def _save_checkpoint(self, guard, host, /, model, trial):
        if not guard.halting.may_save(model):
            return
        folder = checkpoint_folder(self, trial)
        with guard.custody.saving(folder):
            host(model, trial)
            if guard.on and self.args.should_save:
                save_guard(guard.guard, folder)

    @entered_once
    def _load_best_model(self, guard, host, /):
        if guard.custody.may_load_best():
            host()
