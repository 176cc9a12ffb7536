"""The guard of one trainer: owns what lasts a whole run, and surrounds the run and its epochs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from ...core.event import Culprit, Event, JsonObject
from ...core.ranks import Ranks
from ...core.step.counters import find_news
from ...core.step.guard import Guard
from ...core.vocabulary import Action, Signal
from ...doctor.start_check import report_start
from ...errors import LossMissingError
from ..compat import accelerate as compat_accelerate
from ..compat.own_loss import has_own_batches
from ..compat.prepared_dataset import is_hf_stream
from ..compat.trainer import end_mean, loss_shifts_labels, surrounded_own_method
from ..compat.trainer_protocol import HostTrainer
from ..custody.checkpoint_custody import CheckpointCustody
from ..custody.halting import Halting
from ..data.batch_limits import find_limits
from ..data.checked_collator import BatchCheck
from ..data.learning_signal import OnlineData
from ..data.row_quarantine import RowQuarantine
from ..generation.guard_generation import can_generate, guarded_sampling
from ..monitors.evaluation import Evaluation
from .arguments import GuardArguments
from .guarded_class import HostMethods
from .guarded_step import GuardedStep
from .run_notices import check_resumed_rate, describe_rows, log_limits, log_summary, report_removed_rows
from .run_record import RunRecord, load_guard
from .step_recorder import Phase, StepRecorder
from .unguarded_updates import UnguardedUpdates

ONLINE_NORM = 0.1  # gradient norms below that, e.g. of a KL term where rewards are equal, count as that


class TrainerGuard:
    """Everything the guard knows about one trainer."""

    def __init__(self, trainer: HostTrainer, arguments: GuardArguments, host: HostMethods):
        self.trainer = trainer
        self.host = host  # for overrides that must not be entered twice
        self.arguments = arguments
        self.policy = arguments.policy()
        self.deepspeed = compat_accelerate.steps_in_backward(trainer)
        if self.deepspeed and self.policy.mode != "off":
            self.policy = replace(self.policy, mode="observe", skip_grad_norm=None)
        self.acts = self.policy.acts
        self.ranks = Ranks(trainer.args.device)
        self.record = RunRecord(trainer, self.ranks.rank, self.policy)
        self.guard = Guard(policy=self.policy, ranks=self.ranks, on_event=self._write_event)
        self.guard.number_steps(lambda: trainer.state.global_step)
        self.boundary, self.journal, self.counter = self.guard.boundary, self.guard.journal, self.guard.counter
        self.quarantine = RowQuarantine(self.policy, self.journal, lambda: trainer.state.global_step)
        self.monitor_set = self.guard.monitor_set
        self.recorder = StepRecorder(trainer, self.guard, self.quarantine)
        self.batches = self.recorder.batches
        self.evaluation = Evaluation(trainer, self.guard)
        self.custody = CheckpointCustody(trainer, self.guard)
        self.halting = Halting(trainer, self.guard, self.custody)
        self.unguarded = UnguardedUpdates(trainer, self.journal, self.boundary, self.recorder, host)
        self.step = GuardedStep(trainer, self.guard, self.recorder, self.unguarded, self.halting)
        self.online: OnlineData | None = None
        self._joined = ExitStack()  # of a train() that is not ours
        self._run_end = ExitStack()  # of a guard that took the place of this one
        self._is_guarding_generation = False
        self._creates_optimizer = False  # the host does, with the learning rate of its arguments

    def use_online(self, online: OnlineData) -> None:
        """Takes the data of an online trainer, which guards its own generation."""
        self.online = online
        self.step.use_online(online)
        self.quarantine.expect_completions()
        self.guard.expect_online_losses(ONLINE_NORM)

    def _write_event(self, event: JsonObject) -> None:
        self.record.write_event(event)
        self.boundary.call("quarantine", self.quarantine.note, event)

    @property
    def on(self) -> bool:
        """Whether the guard does anything."""
        return self.recorder.on

    @property
    def watches(self) -> bool:
        """Whether the guard takes part in the steps that run now."""
        return self.recorder.watches

    @property
    def replaying(self) -> bool:
        """Whether the guard is running a held micro-batch again."""
        return self.guard.replaying or self.recorder.replays

    # ---- a run ----

    @contextmanager
    def training(self) -> Iterator[None]:
        """Surrounds `train()`: steps are guarded inside the block only."""
        self._joined.close()  # of a run that failed between two epochs
        if self.recorder.phase is not Phase.OUTSIDE:  # a train() inside another
            yield
            return
        try:
            self._begin_run()
            yield
        finally:
            self._end_run()

    def _begin_run(self) -> None:
        self.boundary.begin_run()
        self.boundary.together("start of the run", self._begin_parts, _end_start)
        self.boundary.call("drafts", self.record.remove_drafts)
        self._creates_optimizer = self.trainer.optimizer is None
        prepared = self.batches.prepared
        if self.on and self.ranks.rank == 0:
            self.boundary.call("limits", log_limits, self.trainer, self.guard)
            self.boundary.call("removed rows", report_removed_rows, self.trainer, self.guard, prepared)
        if self.on:
            self.boundary.together("quarantine", self.quarantine.honor, lambda why: None)
            self.boundary.call(
                "doctor", report_start, self.trainer, self.policy.doctor, self.ranks, self.policy.bundle_text
            )

    def _begin_parts(self) -> None:
        self.record.begin_run()
        self.guard.begin_run(self.record.directory)
        self.recorder.begin_run()
        rows_of = self.boundary.call("rows", describe_rows, self.trainer, self.batches.prepared)
        self.journal.describe_rows(rows_of)
        given = (
            self.record.directory,
            self.record.run,
            self.trainer.train_dataset,
            self.batches.prepared,
        )
        self.step.begin_run()
        self.unguarded.begin_run()
        self.boundary.call("quarantine", self.quarantine.begin_run, *given)
        self.boundary.call("custody", self.custody.begin_run)

    def _end_run(self) -> None:
        """Puts everything back, each piece even if another fails or is interrupted."""
        parts: dict[str, Callable[[], object]] = {
            "summary": partial(log_summary, self.guard, self.record),
            "monitors": self.monitor_set.close,
            "recorder": self.recorder.end_run,
            "skipped step": self.step.end_step,  # an error may have come between a skipped step and its end
            "log filter": self.step.show_filter,
            "successor": self._run_end.close,
        }
        with ExitStack() as stack:  # the last one first
            for part, end in parts.items():
                stack.callback(self.boundary.call, part, end)

    def join_run(self) -> None:
        """Begins to guard a `train()` that is running already, until it ends or fails; not one that is guarded."""
        if self.recorder.phase is Phase.OUTSIDE:
            self._joined.enter_context(self.training())

    def hand_over(self, successor: "TrainerGuard") -> None:
        """Turns the guard off for good, because another takes its place, in a run that is going on too."""
        if self.watches:
            self.step.end_step()
            self.recorder.abandon()
            successor.join_run()
            self._run_end.callback(successor._joined.close)
        self.recorder.turn_off()

    @contextmanager
    def epoch(self, dataloader: object, position: int, resumed: str | None) -> Iterator[None]:
        """Surrounds one epoch, which begins at batch `position`: not 0 after a resume in mid-epoch. `resumed` is the checkpoint
        that the run continues from, given with its first epoch."""
        if not self.on:
            yield
            return
        self.join_run()  # if the train() that is running is not ours: it began before the guard, or was replaced
        if resumed is not None:
            self.boundary.call("resume", self._resume, Path(resumed))
        guard_step = partial(self.boundary.overriding, "training_step", self.step.guard_step)
        try:
            with ExitStack() as stack:
                parts: dict[str, Callable[[], AbstractContextManager[None]]] = {
                    "update check": self.unguarded.checked_updates,
                    "own training_step": partial(surrounded_own_method, self.trainer, "training_step", guard_step),
                    "batches": lambda: self._recorded_batches(dataloader, position),
                    "generation": self.guarded_generation,
                }
                for part, surround in parts.items():
                    stack.enter_context(self.boundary.inside(part, surround))
                yield
        except BaseException:
            with self._joined:  # left also if an interrupt comes here
                self.step.end_step()
                self.recorder.abandon()  # the host may catch it and begin anew with a smaller batch
            raise

    def _resume(self, checkpoint: Path) -> None:
        load_guard(self.guard, checkpoint)
        self.custody.note_resumed(checkpoint)
        if self._creates_optimizer:
            check_resumed_rate(self.trainer, self.guard)

    def _recorded_batches(self, dataloader: object, position: int) -> AbstractContextManager[None]:
        """Checks the batches of an epoch and records the rows they consist of; rows that rank 0 dispatches are not known."""
        dispatched = compat_accelerate.dispatches_batches(self.trainer)
        followed, check = (None, None) if dispatched else (dataloader, self._batch_check())
        return self.batches.recording(followed, self.trainer.accelerator.num_processes, position, check)

    @contextmanager
    def finalizing(self) -> Iterator[None]:
        """Surrounds what comes after the last epoch."""
        end_mean(self.trainer)
        with self._joined, self.guarded_generation():
            yield
        self.boundary.call("custody", self.custody.end_run)

    @contextmanager
    def guarded_generation(self) -> Iterator[None]:
        """Guards whatever generates inside the block: an evaluation, a callback that shows completions. An online trainer
        guards its own generation, completion by completion."""
        policy, model = self.policy, self.trainer.model
        idle = self.online is not None or not self.acts or policy.logits_mode == "off" or self._is_guarding_generation
        if idle or not can_generate(model):
            yield
            return
        self._is_guarding_generation = True
        try:
            bounds = policy.logits_clip_value, policy.logits_min_prob
            with guarded_sampling(model, policy.logits_mode, *bounds, True, self.boundary) as sampling:
                yield
        finally:
            self._is_guarding_generation = False
        if sampling.num_repaired or sampling.num_ended:
            step = self.trainer.state.global_step
            values = {"num_repaired": sampling.num_repaired, "num_ended": sampling.num_ended}
            self.journal.write(
                Event(step, Signal.LOGITS_NONFINITE, Action.REPAIRED, f"at step {step}, {sampling.describe()}",
                      values=values, culprit=Culprit(phase="sampling"))
            )  # fmt: skip

    def _batch_check(self) -> BatchCheck:
        """Returns how the batches of this trainer are checked."""
        trainer = self.trainer
        limits = find_limits(trainer.model, loss_shifts_labels(trainer), has_own_batches(trainer))
        verdict = self.policy.on_bad_input if self.acts else "repair" if self.deepspeed else "observe"
        return BatchCheck(limits, verdict, self.acts, reads_ids=is_hf_stream(trainer.train_dataset))

    # ---- losses and log ----

    def log_metrics(self) -> dict[str, float]:
        """Returns what the guard adds to a row of training losses; what is not news goes to `metrics.jsonl` only."""
        online = {} if self.online is None else self.online.take_metrics()
        counted = {**self.counter.as_metrics(), **online}
        metrics = {**counted, **self.monitor_set.metrics()}
        self.record.keep_metrics(metrics)
        return metrics if self.policy.full_metrics else find_news(counted)

    def check_loss(self, result: object, with_outputs: bool, labels: object, training: bool) -> object:
        """Checks what `compute_loss` returned: `None` is an error, an evaluation loss is kept."""
        loss = result[0] if with_outputs and isinstance(result, tuple) else result
        if loss is None and training:  # a prediction_step may do without
            raise LossMissingError(
                "compute_loss must return a loss, got None. Check that the batch holds labels and that the model or "
                "compute_loss_func returns its loss."
            )
        if not training:
            self.evaluation.keep(loss, labels)
        return result


def _end_start(why: str) -> NoReturn:
    raise RuntimeError(f"the guard could not begin: {why}")
