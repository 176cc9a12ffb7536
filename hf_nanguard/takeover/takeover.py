"""The one place where every Trainer that a script builds becomes a guarded one, without a change to the script.

`Trainer.__new__` hands out an instance whose `__init__` first turns it into what was asked for, runs the script's own
constructor, and then does what [`attach`] does. So nothing of ours is there while a constructor runs, whatever its
signature, and a class that was imported before, or is defined later, is reached alike. If transformers is not imported
yet, that is awaited: a script must be free to set its environment before. Nothing here imports it at the head.

A copy or a pickle of a guarded trainer is that of the trainer the script knows, and is guarded when it is restored
meanwhile. Not reached: a class whose own `__new__` calls `object.__new__` directly.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from .import_hook import Arrival
from .pickling import reduce_as, restore_state

if TYPE_CHECKING:
    from ..hf.trainer.arguments import GuardArguments

HOST = "transformers.trainer"


class _StandIn:
    def __init_subclass__(cls) -> None:
        """Tells nobody, a registry of the user's perhaps, of a class that lives for a moment."""


class Takeover:
    """Guards every Trainer that is built while it lasts; to be used as a context manager.

    Args:
        settings (`Mapping[str, Any]`):
            Fields of `GuardArguments` that win over what the script says itself.
        say (`Callable[[str], None]`):
            Is told, on the first rank only, what is guarded, what cannot be, and at the end what there is to read.
        on_build (`Callable[[], None]`, *optional*):
            Called, on every rank, when a trainer was built.

    Example:

    ```python
    with Takeover({"nanguard_on_spike": "skip"}, print):
        runpy.run_path("train.py", run_name="__main__")
    ```
    """

    def __init__(
        self, settings: Mapping[str, Any], say: Callable[[str], None], on_build: Callable[[], None] | None = None
    ):
        self.settings = dict(settings)
        self.say = say
        self.on_build = on_build
        self.began = time.time()
        self.process = os.getpid()
        self.num_built = 0
        self.num_guarded = 0
        # Event files of the first rank, wherever the script goes: how they were called, their lines before this run.
        self.begun_with: dict[Path, tuple[Path, int]] = {}
        self._arrival = Arrival(HOST, self._take)
        self._trainer_class: Any = None
        self._stand_ins: dict[type, type] = {}

    def __enter__(self) -> "Takeover":
        module = sys.modules.get(HOST)
        if module is None:
            sys.meta_path.insert(0, self._arrival)
        else:
            self._take(module)
        return self

    def __exit__(self, *error: Any) -> None:
        self.give_back()
        self.tell_events()

    def give_back(self) -> None:
        """Trainers that are built from now on are stock ones."""
        if self._arrival in sys.meta_path:
            sys.meta_path.remove(self._arrival)
        if self._trainer_class is not None:
            # Python cannot delete a `__new__` without a trace: `object.__new__` would then refuse arguments.
            self._trainer_class.__new__ = _plain_new(self._trainer_class)
            self._trainer_class = None

    def tell_events(self) -> None:
        """Says how many events there were and where they are. A forked copy of this process says nothing."""
        if not self.begun_with or os.getpid() != self.process:
            return
        told = []
        for path, (shown, before) in self.begun_with.items():
            count = _count_lines(path) - before
            told.append(f"{count or 'no'} event{'' if count == 1 else 's'} in {shown}")
            files = path.parent.glob("events-rank*.jsonl")
            others = sorted(file.name for file in files if file.stat().st_mtime >= self.began)
            if others:
                told[-1] += f" (and what other ranks saw in {', '.join(others)})"
        self.begun_with.clear()
        self.say(f"{'; '.join(told)}.")

    # ---- the seam ----

    def _take(self, module: ModuleType) -> None:
        self._trainer_class = vars(module)["Trainer"]

        def new(cls: type, *args: Any, **kwargs: Any) -> Any:
            return object.__new__(self._stand_in_for(cls))

        new.__wrapped__ = self._trainer_class.__init__  # type: ignore[attr-defined] # what inspect.signature shows
        self._trainer_class.__new__ = new

    def _stand_in_for(self, cls: type) -> type:
        """Returns a subclass whose instances become those of `cls` at once, and guarded ones when they are built."""
        if cls in self._stand_ins:
            return self._stand_ins[cls]
        original: Any = cls

        def __init__(trainer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes the method of that name
            trainer.__class__ = original
            args = tuple(self._prepare(original, value) for value in args)
            kwargs = {name: self._prepare(original, value) for name, value in kwargs.items()}
            original.__init__(trainer, *args, **kwargs)
            self.guard(trainer)

        def __setstate__(trainer: Any, state: Any) -> None:  # noqa: N807 - of a copy or an unpickled one
            trainer.__class__ = original
            restore_state(trainer, state)
            self.guard(trainer, is_copy=True)

        body = {"__init__": __init__, "__setstate__": __setstate__}
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        try:
            self._stand_ins[cls] = type(cls.__name__, (_StandIn, cls), {**body, **names})
        except TypeError as error:  # of a metaclass that wants no subclasses
            self._stand_ins[cls] = cls
            self._refuse(cls, f"it cannot be subclassed ({error})", int(os.environ.get("RANK", "0")))
        return self._stand_ins[cls]

    def _prepare(self, trainer_class: type, value: Any) -> Any:
        """Returns an argument of a constructor; an online trainer's temperature is raised before it is built with it."""
        from transformers import TrainingArguments

        if not isinstance(value, TrainingArguments):
            return value
        from ..hf.guarded_trainer import guarded
        from ..hf.rl.rl_mixin import ReinforcementMixin, raise_temperature

        online = issubclass(guarded(trainer_class), ReinforcementMixin)
        return raise_temperature(value, self._merge(value)) if online else value

    def guard(self, trainer: Any, is_copy: bool = False) -> None:
        """Guards a trainer that is built, or copied, or says why not."""
        from transformers import TrainingArguments

        from ..hf.compat.training_loop import find_own_loop, find_own_super
        from ..hf.guarded_trainer import attach
        from ..hf.trainer.mixin import GuardedTrainerMixin

        self.num_built += 1
        if self.on_build is not None:
            self.on_build()
        cls = type(trainer)
        args = vars(trainer).get("args")
        if not isinstance(args, TrainingArguments):
            self._refuse(cls, "it was not built by the constructor of Trainer", int(os.environ.get("RANK", "0")))
            return
        rank = args.process_index
        loop = find_own_loop(cls)
        if loop:
            self._refuse(cls, f"its {', '.join(loop)} runs a training loop of its own", rank)
            return
        closed = find_own_super(cls)
        if closed:
            self._refuse(cls, f"its {', '.join(closed)} calls super(type(self), self); write super() there", rank)
            return
        guarded_before = isinstance(trainer, GuardedTrainerMixin)
        too_late = False
        if not guarded_before or self.settings:
            own = trainer.nanguard.arguments if guarded_before else args
            try:
                attach(trainer, self._merge(own))
                if not guarded_before:
                    too_late = not is_copy and trainer.state.global_step > 0
                    type(trainer).__reduce_ex__ = reduce_as(cls)  # type: ignore[method-assign, assignment]
            except (TypeError, AttributeError) as error:
                fixed = type(trainer) is cls
                trainer.__class__ = cls
                what = "its instances cannot change their class" if fixed else "something of a Trainer is missing in it"
                self._refuse(cls, f"{what} ({error})", rank)
                return
        self.num_guarded += 1
        if rank == 0:
            if too_late:
                self.say(f"{cls.__name__} has trained in its constructor, unguarded; what follows is guarded.")
            self._tell_guarded(trainer, guarded_before)

    def _merge(self, own: Any) -> "GuardArguments":
        """Returns the script's own settings, or the defaults, with those given on top."""
        from ..hf.trainer.arguments import GuardArguments

        base = own if isinstance(own, GuardArguments) else GuardArguments()
        values = {field.name: vars(base)[field.name] for field in fields(GuardArguments)}
        try:
            return GuardArguments(**{**values, **self.settings})
        except ArgumentError as error:  # two settings, one of the script and one given, that do not go together
            if int(os.environ.get("RANK", "0")) == 0:
                self.say(str(error))
            raise SystemExit(2) from error

    # ---- what is said ----

    def _tell_guarded(self, trainer: Any, guarded_before: bool) -> None:
        from ..hf.trainer.arguments import GuardArguments

        session, name = trainer.nanguard, type(trainer).__name__
        changed = [
            f"{field.name}={vars(session.arguments)[field.name]}"
            for field in fields(GuardArguments)
            if vars(session.arguments)[field.name] != field.default
        ]
        with_settings = f" with {', '.join(changed)}" if changed else ""
        if not session.on:
            self.say(f"{name} is not guarded, for nanguard_mode is off.")
            return
        path = session.record.events.path
        if os.getpid() != self.process:
            self._begin_fork()
        self.begun_with.setdefault(path.absolute(), (path, _count_lines(path)))
        verb = "was guarded already" if guarded_before else "is guarded"
        self.say(f"{name} {verb}{with_settings}; events go to {path}")

    def _begin_fork(self) -> None:
        """Makes a forked process, which ends without a word to its parent, tell of its own trainers."""
        from multiprocessing.util import Finalize

        self.process = os.getpid()
        self.begun_with.clear()
        Finalize(None, self.tell_events, exitpriority=0)

    def _refuse(self, cls: type, why: str, rank: int) -> None:
        if rank == 0:
            self.say(f"{cls.__name__} cannot be guarded, for {why}; it trains unguarded.")


def _plain_new(trainer_class: Any) -> Callable[..., Any]:
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls)

    new.__wrapped__ = trainer_class.__init__  # type: ignore[attr-defined]
    return new


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0
