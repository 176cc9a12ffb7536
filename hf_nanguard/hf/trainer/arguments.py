"""The settings of the guard, as TrainingArguments extensions that HfArgumentParser, TrlParser and YAML can fill."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from difflib import get_close_matches
from typing import Any

from transformers import TrainingArguments

from ...core.settings import PREFIX, SETTINGS, Policy, check_settings, format_parameters
from ...doctor.facts.device_facts import choose_precision
from ...errors import ArgumentError

_Fields: Any = make_dataclass(
    "_Fields",
    [
        (f"{PREFIX}{name}", setting.annotation, field(default=setting.default, metadata={"help": setting.help}))
        for name, setting in SETTINGS.items()
    ],
)


@dataclass
class GuardArguments(_Fields):
    """The settings of the guard. The defaults correct bad steps and change nothing else.

    The fields are those of [`Policy`], with `nanguard_` in front of their names, and are made from them when this module
    is imported. `dataclasses.fields`, `inspect.signature` and `help` show them. A type checker accepts any keyword here,
    and a misspelled one raises a `TypeError` when the object is created.
    """

    def __post_init__(self):
        for name, setting in SETTINGS.items():
            value = getattr(self, f"{PREFIX}{name}")
            if value is False or setting.value_type is float:  # YAML reads off as False and 1e-6 as text
                setattr(self, f"{PREFIX}{name}", setting.convert(value))
        check_settings(self._settings(), PREFIX)
        if isinstance(self, TrainingArguments):
            if self.nanguard_precision == "auto":
                for name, value in choose_precision(self.use_cpu).items():
                    setattr(self, name, value)
            super().__post_init__()  # the host's, next in line

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, f"{PREFIX}{name}") for name in SETTINGS}

    def policy(self) -> Policy:
        """Returns the settings as the core knows them."""
        return Policy(**self._settings())


GuardArguments.__doc__ = f"{GuardArguments.__doc__}{format_parameters(PREFIX)}"


@dataclass
class GuardedTrainingArguments(GuardArguments, TrainingArguments):
    """[`~transformers.TrainingArguments`] with the settings of the guard; all other defaults are the host's."""


Given = GuardArguments | Mapping[str, object] | None
"""Settings as a user gives them: an object, a dictionary of its fields, or nothing."""


def read_guard_arguments(given: Given) -> GuardArguments | None:
    """Returns settings that a user has given, `None` if there are none."""
    if given is None or isinstance(given, GuardArguments):
        return given
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"guard must be GuardArguments or a dictionary of its fields, got {type(given).__name__}. Pass "
            "GuardArguments(nanguard_on_nonfinite='skip'), for example."
        )
    for name in given:
        if name not in {each.name for each in fields(GuardArguments)}:
            near = get_close_matches(str(name).removeprefix(PREFIX), SETTINGS, 1)
            raise ArgumentError(
                f"guard has no setting {name!r}" + (f", did you mean {PREFIX}{near[0]}?" if near else ".")
            )
    return GuardArguments(**given)


def find_guard_arguments(given: Given, args: TrainingArguments) -> GuardArguments:
    """Returns the settings if they are given, else those in the training arguments, else the defaults."""
    guard = read_guard_arguments(given)
    if guard is not None:
        return guard
    return args if isinstance(args, GuardArguments) else GuardArguments()
