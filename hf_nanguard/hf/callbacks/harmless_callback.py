"""What all callbacks share: their methods are called behind a boundary, and they write to the event file of the run."""

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

from transformers import TrainerCallback, TrainerState, TrainingArguments

from ...boundary import Boundary, GuardFailure
from ...core.journal import Journal
from ...core.ranks import Ranks
from ...own_fields import own_fields
from ...report.run_files import GUARD_FOLDER, JsonlWriter, events_path

C = TypeVar("C", bound="HarmlessCallback")


def make_journal(args: TrainingArguments) -> Journal:
    """Returns a journal that writes to the event file of a run."""
    ranks = Ranks(args.device)
    return Journal(ranks, JsonlWriter(events_path(Path(str(args.output_dir)) / GUARD_FOLDER, ranks.rank)))


class CallbackBoundary(Boundary):
    """The boundary of a callback in one run. On several ranks its errors end the run, because the other ranks may wait for this
    one, and nothing tells them that it has failed."""

    def __init__(self, args: TrainingArguments, state: TrainerState):
        super().__init__(self._write, Ranks(args.device))
        self._args, self._state = args, state

    def passes(self, error: Exception) -> bool:
        return super().passes(error) or not self.is_alone

    def _write(self, failure: GuardFailure) -> None:
        make_journal(self._args).write_failure(self._state.global_step, failure)


class HarmlessCallback(TrainerCallback):
    """A callback with a boundary. Which methods are behind it is decided by [`harmless`], class by class, because the methods of
    a user's subclass are the user's."""

    _boundary: CallbackBoundary | None = None
    _of_one_trainer: tuple[str, ...] = (
        "_boundary",
    )  # attributes that a copy does not have: it belongs to another trainer

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in self._of_one_trainer}

    def enter(self, args: TrainingArguments, state: TrainerState, is_new: bool = False) -> CallbackBoundary:
        """Returns the boundary of the run that these arguments and this state are of."""
        if self._boundary is None or is_new:
            self._boundary = CallbackBoundary(args, state)
        return self._boundary


def harmless(cls: type[C]) -> type[C]:
    """Puts the methods of a callback class that a trainer calls behind its boundary."""
    for name, method in list(own_fields(cls).items()):
        if name.startswith("on_"):
            setattr(cls, name, _behind_boundary(f"{cls.__name__}.{name}", method))
    return cls


def _behind_boundary(part: str, method: Callable[..., object]) -> Callable[..., object]:
    begins = method.__name__ == "on_train_begin"

    @wraps(method)
    def call(callback: HarmlessCallback, args: Any, state: Any, control: object, **kwargs: object) -> object:
        boundary = callback.enter(args, state, is_new=begins)
        return boundary.call(part, partial(method, callback, args, state, control, **kwargs))

    return call
