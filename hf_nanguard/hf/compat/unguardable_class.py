"""Detects Trainer classes that cannot be guarded: with a loop of their own, or a `super()` that breaks in a subclass."""

import dis
import inspect
from types import CodeType

from transformers import Trainer, TrainingArguments

# Can go when transformers has an interface for replacing the training loop.
LOOP = ("train", "_inner_training_loop", "_run_epoch")


def find_obstacle(trainer: object) -> str | None:
    """Returns why a trainer cannot be guarded, `None` if its class shows no reason.

    Can go together with what it looks for.
    """
    if not isinstance(getattr(trainer, "args", None), TrainingArguments):
        return "it was not built by the constructor of Trainer"
    if loop := find_own_loop(type(trainer)):
        return f"its {', '.join(loop)} runs a training loop of its own"
    if closed := find_own_super(type(trainer)):
        return f"its {', '.join(closed)} calls super(type(self), self); write super() there"
    return None


def find_own_loop(trainer_class: type) -> list[str]:
    """Returns which loop methods of the Trainer a class replaces, so that the methods of the guard would never be called.

    A method that calls the one it overrides, by `super()` or by the name of a class, does not replace it. Nor does one that
    looks something up in `super()` by a computed name, as a wrapper for many methods does.
    """
    return [name for name in LOOP if _is_replaced(trainer_class, name)]


def _is_replaced(trainer_class: type, name: str) -> bool:
    for owner in trainer_class.__mro__:
        if owner is Trainer:
            return False
        method = vars(owner).get(name)
        if method is None:
            continue
        code = getattr(inspect.unwrap(method), "__code__", None)  # a method that is not a function cannot be judged
        if code is not None and not _calls_overridden(code, name):
            return True
    return False


def _calls_overridden(code: CodeType, name: str) -> bool:
    inner = [constant for constant in code.co_consts if inspect.iscode(constant)]
    is_wrapper = {"super", "getattr"} <= set(code.co_names)
    return is_wrapper or name in code.co_names or any(_calls_overridden(part, name) for part in inner)


def find_own_super(trainer_class: type) -> list[str]:
    """Returns which methods of a class call `super(type(self), self)`, an infinite recursion in any subclass."""
    owners = trainer_class.__mro__[: trainer_class.__mro__.index(Trainer)]
    methods = {name: value for owner in reversed(owners) for name, value in vars(owner).items() if name != "__init__"}
    return [name for name, value in methods.items() if inspect.isfunction(value) and _names_own_class(value.__code__)]


def _names_own_class(code: CodeType) -> bool:
    loads = [step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD_")]
    calls = [loads[place + 1 : place + 3] for place, name in enumerate(loads) if name == "super"]
    return any(call[:1] == ["type"] or call[1:] == ["__class__"] for call in calls)
