"""What a Trainer class does that leaves no room for the guard: a loop of its own, a `super()` that admits no subclass."""

import dis
import inspect
from typing import Any

from transformers import Trainer

# Can go when transformers tells where a training loop may be replaced.
LOOP = ("train", "_inner_training_loop", "_run_epoch")


def find_own_loop(trainer_class: type) -> list[str]:
    """Returns which of the host's loop methods a class replaces, so that the guard's seams would never be called.

    One that goes on to the method it overrides, by `super()` or by a class's name, only adds to it.
    """
    return [name for name in LOOP if _is_replaced(trainer_class, name)]


def _is_replaced(trainer_class: type, name: str) -> bool:
    for owner in trainer_class.__mro__:
        if owner is Trainer:
            return False
        method: Any = vars(owner).get(name)
        if method is None:
            continue
        code = getattr(inspect.unwrap(method), "__code__", None)  # a method that is not a function cannot be judged
        if code is not None and not _goes_on(code, name):
            return True
    return False


def _goes_on(code: Any, name: str) -> bool:
    inner = [constant for constant in code.co_consts if inspect.iscode(constant)]
    return name in code.co_names or any(_goes_on(part, name) for part in inner)


def find_own_super(trainer_class: type) -> list[str]:
    """Returns which methods of a class call `super(type(self), self)`, which calls itself for ever in any subclass."""
    owners = trainer_class.__mro__[: trainer_class.__mro__.index(Trainer)]
    methods = {name: value for owner in reversed(owners) for name, value in vars(owner).items() if name != "__init__"}
    return [name for name, value in methods.items() if inspect.isfunction(value) and _names_own_class(value.__code__)]


def _names_own_class(code: Any) -> bool:
    loads = [step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD_")]
    calls = [loads[place + 1 : place + 3] for place, name in enumerate(loads) if name == "super"]
    return any(call[:1] == ["type"] or call[1:] == ["__class__"] for call in calls)
