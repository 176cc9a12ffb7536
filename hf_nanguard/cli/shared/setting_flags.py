"""The guard's settings as flags, environment variables and YAML, all checked before anything runs.

Only `core/settings.py` is needed for that. A script must be free to set its environment (`HF_HOME`, `HF_HUB_OFFLINE`, ...)
before transformers is imported.
"""

import argparse
from collections.abc import Mapping

from ...command_errors import suggest
from ...core.settings import PREFIX, SETTINGS, Setting, check_settings
from ...errors import ArgumentError

VARIABLE_PREFIX = PREFIX.upper()
CONFIG_VARIABLE = f"{VARIABLE_PREFIX}CONFIG"
METAVARS = {int: "N", float: "X", bool: "BOOL", str: "NAMES"}


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Adds a flag for every setting. Only flags that are given appear in the namespace."""
    for name, setting in SETTINGS.items():
        text = f"{setting.help} (default: {setting.default})".replace("%", "%%")
        metavar = None if setting.choices else METAVARS[setting.value_type]  # argparse shows choices by itself
        flag, choices = f"--{PREFIX}{name}", setting.choices or None
        parser.add_argument(flag, default=argparse.SUPPRESS, choices=choices, metavar=metavar, help=text)


def gather(flags: Mapping[str, object], environment: Mapping[str, str], config: str | None = None) -> dict[str, object]:
    """Returns the settings that were given. A flag takes precedence over the environment, and the environment over YAML.

    `flags` is the parsed command line; other names in it are ignored. `config` is a YAML file, by default the one that
    `NANGUARD_CONFIG` names.
    """
    from ...yaml_file import read_yaml

    source = CONFIG_VARIABLE if config is None else "--config"
    config = environment.get(CONFIG_VARIABLE) if config is None else config
    found = {}
    given = {} if config is None else read_yaml(config, source, "nanguard_mode: observe")
    for name, value in given.items():
        setting = _find_setting(name, name, f"in {config}")
        found[setting.name] = setting.read(value, f"{config}: {name}")
    for name, text in environment.items():
        if name.startswith(VARIABLE_PREFIX) and name != CONFIG_VARIABLE:
            setting = _find_setting(name.lower(), name, "in the environment")
            found[setting.name] = setting.read(text, f"environment variable {name}")
    for setting in SETTINGS.values():
        name = f"{PREFIX}{setting.name}"
        if name in flags:
            found[setting.name] = setting.read(flags[name], f"--{name}")
    check_settings(found, PREFIX)
    return {f"{PREFIX}{name}": value for name, value in found.items()}


def as_environment(settings: Mapping[str, object]) -> dict[str, str]:
    """Returns settings as environment variables, which [`gather`] reads back as they are."""
    return {name.upper(): str(value) for name, value in settings.items()}


def _find_setting(name: str, spelling: str, place: str) -> Setting:
    known = {f"{PREFIX}{setting.name}": setting for setting in SETTINGS.values()}
    if name in known:
        return known[name]
    is_variable = name != spelling
    hint = suggest(spelling, map(str.upper, known)) if is_variable else suggest(spelling.lower(), known)
    hint = hint or "."
    raise ArgumentError(f"{spelling} {place} is not a setting of the guard{hint} `nanguard run --help` lists them.")
