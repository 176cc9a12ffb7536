"""Guards every Trainer that a script builds, without a change to the script.

`Trainer.__new__` returns an instance of a temporary subclass. Its `__init__` first sets the class back to the one that
was asked for, runs the script's own constructor, and then does what [`attach`] does. So nothing of the guard exists while
a constructor runs, whatever its signature, and classes that were imported before or are defined later are reached alike.
Nothing here imports transformers at the head.

A copy or a pickle of a guarded trainer contains the class the script knows, and is guarded if it is restored during the
takeover. Not reached: a class whose own `__new__` calls `object.__new__` directly.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..boundary import Boundary
from ..errors import ArgumentError
from ..plain_text import show
from .pickling import reduce_as, restore_state

if TYPE_CHECKING:
    from transformers import Trainer

    from ..hf.trainer.arguments import GuardArguments
    from ..hf.trainer.mixin import GuardedTrainerMixin
    from ..report.run_files import Tail


class _StandIn:
    def __init_subclass__(cls) -> None:
        """Keeps temporary subclasses from the `__init_subclass__` of the script, which may be a registry."""


class Takeover:
    """Context manager that guards every Trainer built inside it.

    `settings` are fields of `GuardArguments` and take precedence over the script's own. `say` is called with a sentence, on
    the first rank only: which trainer is guarded or cannot be, and at the end how many events there are.

    Example:

    ```python
    with Takeover({"nanguard_on_spike": "skip"}, print):
        runpy.run_path("train.py", run_name="__main__")
    ```
    """

    def __init__(self, settings: Mapping[str, object], say: Callable[[str], None]):
        self.settings = dict(settings)
        self.say = say
        self.began = time.time()
        self.process = os.getpid()
        self.boundary = Boundary(lambda failure: self._say_first(show(f"{failure}.")))
        self.num_built = 0
        self.event_files: dict[
            Path, tuple[Path, Tail]
        ] = {}  # of the first rank by absolute path, with the path to print
        self._trainer_class: Any = None
        self._stand_ins: dict[type, type] = {}
        self._restore_merge: Callable[[], None] = lambda: None

    def __enter__(self) -> "Takeover":
        from transformers.trainer import Trainer

        from ..hf.compat.prepared_dataset import keep_merged_files

        self._trainer_class = Trainer
        self._set_new(self._stand_in_for)
        self._restore_merge = keep_merged_files(self.boundary)
        return self

    def __exit__(self, *error: object) -> None:
        # Python cannot delete a `__new__` completely: `object.__new__` would then refuse arguments.
        self._set_new(lambda cls: cls)
        self._restore_merge()
        self.report_events()

    def report_events(self) -> None:
        """Says how many events there were and where they are; nothing without events, or in a forked copy of this process."""
        self.boundary.call("report of events", self._report_events)

    def _report_events(self) -> None:
        if not self.event_files or os.getpid() != self.process:
            return
        parts = []
        for path, (shown, tail) in self.event_files.items():
            count = len(tail.read())
            files = path.parent.glob("events-rank*.jsonl")
            others = sorted(file.name for file in files if file.stat().st_mtime >= self.began)
            more = f" (other ranks: {', '.join(others)})" if others else ""
            if count > 0 or others:
                parts.append(f"{count or 'no'} event{'' if count == 1 else 's'} in {shown}{more}")
        self.event_files.clear()
        if parts:
            self.say(f"{'; '.join(parts)}.")

    # ---- Trainer.__new__ ----

    def _set_new(self, find_class: Callable[[type], type]) -> None:
        def new(cls: type, *args: object, **kwargs: object) -> object:
            return object.__new__(find_class(cls))

        new.__wrapped__ = self._trainer_class.__init__  # type: ignore[attr-defined] # what inspect.signature shows
        self._trainer_class.__new__ = new

    def _stand_in_for(self, cls: type) -> type:
        """Returns a subclass whose instances first become instances of `cls`, and are guarded once they are built."""
        if cls in self._stand_ins:
            return self._stand_ins[cls]
        original: Any = cls
        prepare = self.boundary.wrapped("arguments of a constructor", self._prepare, lambda cls, value: value)
        guard = self.boundary.wrapped("takeover", self.guard, _leave_unguarded)

        def __init__(trainer: "Trainer", *args: object, **kwargs: object) -> None:  # noqa: N807 - it becomes the method of that name
            trainer.__class__ = original
            args = tuple(prepare(original, value) for value in args)
            kwargs = {name: prepare(original, value) for name, value in kwargs.items()}
            original.__init__(trainer, *args, **kwargs)
            guard(trainer, original)

        def __setstate__(trainer: "Trainer", state: object) -> None:  # noqa: N807 - called for a copy and by unpickling
            trainer.__class__ = original
            restore_state(trainer, state)
            guard(trainer, original, True)

        body = {
            "__init__": __init__, "__setstate__": __setstate__, "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }  # fmt: skip
        try:
            self._stand_ins[cls] = type(cls.__name__, (_StandIn, cls), body)
        except TypeError as error:  # of a metaclass that allows no subclass
            self._stand_ins[cls] = cls
            self._say_first(
                f"{cls.__name__} cannot be guarded because it cannot be subclassed ({error}). It trains unguarded."
            )
        return self._stand_ins[cls]

    def _prepare(self, trainer_class: type, value: object) -> object:
        """Returns an argument of a constructor. The temperature of an online trainer is raised before it is built."""
        from transformers import TrainingArguments

        if not isinstance(value, TrainingArguments):
            return value
        from ..hf.guarded_trainer import generates
        from ..hf.rl.rl_mixin import raise_temperature

        return raise_temperature(value, self._merge(value)) if generates(trainer_class) else value

    # ---- a trainer that was built ----

    def guard(self, trainer: "Trainer", cls: type, is_copy: bool = False) -> None:
        """Guards a trainer of a class that was built or copied, or says why it cannot be guarded."""
        from ..hf.attach_guard import attach_if_possible
        from ..hf.compat.unguardable_class import find_obstacle
        from ..hf.trainer.mixin import GuardedTrainerMixin

        self.num_built += 1
        was_guarded = isinstance(trainer, GuardedTrainerMixin)
        obstacle = find_obstacle(trainer)
        if obstacle is None and isinstance(trainer, GuardedTrainerMixin):
            trainer.note_request()
            if self.settings:
                trainer.begin_guarding(self._merge(trainer.nanguard.arguments))
        elif obstacle is None:
            obstacle = attach_if_possible(trainer, self._merge(trainer.args))
        if obstacle is None and trainer.nanguard is None:  # type: ignore[attr-defined]
            trainer.__class__ = cls
            obstacle = "its guard could not be built; the log says why"
        if obstacle is not None:
            self._say_first(f"{cls.__name__} cannot be guarded because {obstacle}. It trains unguarded.", trainer)
            return
        if not was_guarded:
            type(trainer).__reduce_ex__ = reduce_as(cls)  # type: ignore[method-assign, assignment]
        if not was_guarded and not is_copy and trainer.state.global_step > 0:
            trained = f"{cls.__name__} trained in its constructor, without the guard. Later training is guarded."
            self._say_first(trained, trainer)
        if _is_first_rank(trainer):  # a message that fails leaves the trainer guarded
            self.boundary.call("message", self._say_guarded, trainer, was_guarded)

    def _merge(self, own: object) -> "GuardArguments":
        """Returns the script's own settings, or the defaults, overridden by those of the takeover."""
        from ..hf.trainer.arguments import GuardArguments

        base = own if isinstance(own, GuardArguments) else GuardArguments()
        values = {field.name: getattr(base, field.name) for field in fields(GuardArguments)}
        try:
            return GuardArguments(**{**values, **self.settings})
        except ArgumentError as error:  # a setting of the script contradicts one of the takeover
            self._say_first(str(error))
            raise SystemExit(2) from error

    # ---- messages ----

    def _say_first(self, sentence: str, trainer: "Trainer | None" = None) -> None:
        if _is_first_rank(trainer):
            self.say(sentence)

    def _say_guarded(self, trainer: "GuardedTrainerMixin", was_guarded: bool) -> None:
        from ..hf.trainer.arguments import GuardArguments
        from ..report.run_files import Tail

        guard, name = trainer.nanguard, type(trainer).__name__
        if not guard.on:
            self.say(f"{name} is not guarded because nanguard_mode is off.")
            return
        values = [(field, getattr(guard.arguments, field.name)) for field in fields(GuardArguments)]
        changed = [f"{field.name}={value}" for field, value in values if value != field.default]
        with_settings = f" with {', '.join(changed)}" if changed else ""
        path = guard.record.event_file
        if os.getpid() != self.process:
            self._begin_fork()
        self.event_files.setdefault(path.absolute(), (path, Tail(path.absolute())))
        verb = "was already guarded" if was_guarded else "is guarded"
        self.say(f"{name} {verb}{with_settings}; events go to {path}")

    def _begin_fork(self) -> None:
        """Makes a forked process report its own trainers when it ends; it does not leave the parent's `with` block."""
        from multiprocessing.util import Finalize

        self.process = os.getpid()
        self.event_files.clear()
        Finalize(None, self.report_events, exitpriority=0)


def _leave_unguarded(trainer: "Trainer", cls: type, is_copy: bool = False) -> None:
    """Makes a trainer of which nothing more than its class may have been changed one of the script's own again."""
    trainer.__class__ = cls


def _is_first_rank(trainer: "Trainer | None" = None) -> bool:
    """Returns whether this is rank 0; without arguments of a trainer, as launchers say it."""
    rank = getattr(getattr(trainer, "args", None), "process_index", None)
    return str(os.environ.get("RANK", "0") if rank is None else rank) == "0"
