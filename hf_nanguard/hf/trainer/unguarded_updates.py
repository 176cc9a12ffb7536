"""Reports an optimizer step that passes by the guard: a training loop, or a method in place of the Trainer's, of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...boundary import Boundary
from ...core.event import Event
from ...core.journal import Journal
from ...core.vocabulary import Action, Signal
from ..compat.accelerate import steps_in_backward
from ..compat.trainer_protocol import HostTrainer
from ..compat.unguardable_class import find_own_loop
from .guarded_class import HostMethods
from .step_recorder import Phase, StepRecorder


@dataclass(eq=False, repr=False)
class UnguardedUpdates:
    """Looks for updates of the model that were not settled."""

    trainer: HostTrainer
    journal: Journal
    boundary: Boundary
    recorder: StepRecorder  # knows whether the step is settled
    host: HostMethods  # knows which methods of ours are hidden
    _checks_updates: bool = False
    _is_loading: bool = False
    _has_reported_update: bool = False

    def begin_run(self) -> None:
        """Reports such a step again, once."""
        self._has_reported_update = False

    @contextmanager
    def checked_updates(self) -> Iterator[None]:
        """Reports an optimizer that updates the model inside the block without a decision of the guard."""
        # DeepSpeed steps before the guard can decide.
        if not self.recorder.on or steps_in_backward(self.trainer) or self._checks_updates:
            yield
            return
        self._checks_updates = True
        try:
            with register_optimizer_step_pre_hook(self.boundary.wrapped("update check", self._check_update)):
                yield
        finally:
            self._checks_updates = False

    @contextmanager
    def loading_state(self) -> Iterator[None]:
        """Ignores the step, with a learning rate of 0, by which torch makes the state of a sharded optimizer before it loads one."""
        before, self._is_loading = self._is_loading, True
        try:
            yield
        finally:
            self._is_loading = before

    def _check_update(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        """Runs before every `optimizer.step()` of the process: an update of the model that was not settled is reported, and what
        steps inside a `training_step` is kept, so that it can be put back."""
        if self._is_loading or not self.recorder.watches or self.recorder.phase in (Phase.DECIDED, Phase.SKIPPED):
            return
        mine = {id(parameter) for parameter in self.trainer.model.parameters()}
        is_mine = any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"])
        self.recorder.keep_optimizer(optimizer, is_mine)
        if is_mine:
            self.report()
            if self.recorder.settles:  # nobody will
                self.recorder.abandon()

    def report(self) -> None:
        """Reports, once a run, a step that passed by the guard."""
        if self._has_reported_update or self.boundary.off:  # which says more
            return
        self._has_reported_update = True
        hidden = self.host.find_hidden(self.trainer) or find_own_loop(type(self.trainer))
        inside = self.recorder.phase is Phase.RUNNING and not hidden
        why = f"{', '.join(hidden)} of {type(self.trainer).__name__} replaces the method of the Trainer" if hidden else (
            "training_step updates the weights itself" if inside else "its training loop is not that of the Trainer"
        )  # fmt: skip
        step = self.trainer.state.global_step
        what = "guarded by their losses alone, not by their gradients," if inside else "not guarded"
        message = f"step {step} and others like it are {what} because {why}"
        self.journal.write_once(Event(step, Signal.GUARD_FAILED, Action.OBSERVED, message))
