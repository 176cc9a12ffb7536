"""The settings of the guard, as TrainingArguments extensions that HfArgumentParser, TrlParser and YAML can fill."""

from dataclasses import dataclass, field, make_dataclass
from typing import Any

from transformers import TrainingArguments

from ...core.settings import PREFIX, SETTINGS, Policy, check_settings, format_parameters

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


def find_guard_arguments(guard: GuardArguments | None, args: TrainingArguments) -> GuardArguments:
    """Returns `guard` if it is given, else the guard's settings in the training arguments, else the defaults."""
    if guard is not None:
        return guard
    return args if isinstance(args, GuardArguments) else GuardArguments()
