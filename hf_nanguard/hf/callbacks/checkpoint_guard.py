"""A callback that reads each checkpoint of a stock trainer back, and keeps bad ones from being resumed from."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Trainer

from ...boundary import Boundary, HostCall
from ...core.finite import magnitudes, read_host
from ...core.state_tensors import is_plain
from ..compat.accelerate import replaced_method
from ..compat.trainer import checkpoint_folder, find_trainer
from ..compat.trainer_protocol import HostTrainer
from ..custody.checkpoint_rotation import SavedCheckpoints
from ..custody.resume_choice import choose_resume
from ..trainer.mixin import GuardedTrainerMixin
from .harmless_callback import HarmlessCallback, harmless, make_journal


@harmless
class CheckpointGuardCallback(HarmlessCallback):
    """Keeps custody of the checkpoints of a stock trainer. A guarded trainer does so by itself.

    Each checkpoint is read back after it was saved. One with NaN or inf, or that is not complete, is moved to
    `_bad_checkpoints/` and reported as `checkpoint_nonfinite`; it is never the newest or the best one. `save_total_limit` never
    deletes the last good checkpoint. `resume_from_checkpoint=True`, or the folder of a run, takes the newest good one; for
    this the callback must be in the constructor's list. A path to one checkpoint is taken as it is, with a warning if that is bad:
    `nanguard_on_bad_start="repair"`, which goes further back, is a setting of guarded trainers and of [`NanGuardCallback`].

    Example:

    ```python
    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[CheckpointGuardCallback()])
    ```
    """

    _of_one_trainer = (*HarmlessCallback._of_one_trainer, "_run")

    @cached_property
    def _run(self) -> ExitStack:
        """What is put back at the end of a run."""
        return ExitStack()

    def on_init_end(self, args, state, control, **kwargs):
        trainer = find_trainer()
        if trainer is not None and not isinstance(trainer, GuardedTrainerMixin):
            trainer.train = ResumingTrain(trainer, self.enter(args, state))  # type: ignore[method-assign]

    def on_train_begin(self, args, state, control, **kwargs):
        self._run.close()  # of a run that failed
        trainer = find_trainer()
        if trainer is None or isinstance(trainer, GuardedTrainerMixin):
            return
        host = cast(HostTrainer, trainer)
        saved = SavedCheckpoints(host, make_journal(args), True, Baseline(host.model).find_nonfinite)
        for name, override in (
            ("_save_checkpoint", partial(_save, saved, trainer)),
            ("_load_best_model", partial(_load_best, saved)),
        ):
            replace = partial(self.enter(args, state).overriding, name, override)
            self._run.enter_context(replaced_method(trainer, name, replace))
        self._run.callback(self.enter(args, state).call, "good.json", saved.end_run)

    def on_train_end(self, args, state, control, **kwargs):
        self._run.close()


@dataclass(eq=False, repr=False)
class ResumingTrain:
    """Stands in for the `train` of a trainer: resumes from the newest good checkpoint."""

    trainer: Trainer
    boundary: Boundary

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        train = partial(type(self.trainer).train, self.trainer)
        return self.boundary.around("resume", self._resume, train, *args, **kwargs)

    def _resume(self, train: HostCall, /, *args: object, **kwargs: object) -> object:
        asked = args[0] if args else kwargs.get("resume_from_checkpoint")
        if asked is not None:
            chosen = choose_resume(asked, cast(HostTrainer, self.trainer), make_journal(self.trainer.args), True).path
            args, kwargs = (chosen, *args[1:]), {k: v for k, v in kwargs.items() if k != "resume_from_checkpoint"}
        return train(*args, **kwargs)


class Baseline:
    """What was not finite before the run. The magnitudes are read once something is found bad."""

    def __init__(self, model: nn.Module):
        named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
        kept = [(name, tensor) for name, tensor in named if tensor.is_floating_point() and is_plain(tensor)]
        self._names = [name for name, _ in kept]
        with torch.no_grad():
            self._magnitudes_dev = magnitudes([tensor for _, tensor in kept])

    def find_nonfinite(self) -> set[str]:
        """Returns the names of those parameters and buffers."""
        read = read_host(self._magnitudes_dev)
        return {name for name, largest in zip(self._names, read, strict=True) if not largest < float("inf")}


def _save(saved: SavedCheckpoints, trainer: Trainer, save: HostCall, model: object, trial: object) -> None:
    """Stands in for `_save_checkpoint`."""
    with saved.saving(checkpoint_folder(trainer, trial)):
        save(model, trial)


def _load_best(saved: SavedCheckpoints, load: HostCall) -> None:
    """Stands in for `_load_best_model`."""
    if saved.may_load_best():
        load()
