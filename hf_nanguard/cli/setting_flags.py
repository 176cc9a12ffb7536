"""The guard's settings as flags, environment variables and YAML, each checked before anything is run.

What settings there are is read from the source of `GuardArguments`: importing it would import transformers, and a script
must be free to set its environment (`HF_HOME`, `HF_HUB_OFFLINE`, ...) before that happens.
"""

import argparse
import ast
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import ArgumentError

PREFIX = "nanguard_"
VARIABLE_PREFIX = "NANGUARD_"
CONFIG_VARIABLE = "NANGUARD_CONFIG"
SOURCE = Path(__file__).parent.parent / "hf" / "trainer" / "arguments.py"
TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True)
class Setting:
    """One field of `GuardArguments`: its name, its type as written, its default and its help."""

    name: str
    kind: str
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return self.name.upper()

    def convert(self, value: Any) -> Any:
        """Returns a value in the type of the field. What cannot be converted is returned as it is, for the check to name."""
        if value is False and self.kind == "str":
            return "off"  # how YAML reads a bare off
        if not isinstance(value, str):
            return value
        if "None" in self.kind and value.strip().lower() in ("none", "null"):
            return None
        kind = self.kind.split(" | ")[0]
        if kind == "bool":
            return TRUTHS.get(value.strip().lower(), value)
        try:
            return {"int": int, "float": float}.get(kind, str)(value)
        except ValueError:
            return value


@cache
def read_settings() -> dict[str, Setting]:
    """Returns all settings by name, in the order of the class."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GuardArguments"]
    settings = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.value.keywords}
            name, kind = node.target.id, ast.unparse(node.annotation)
            settings[name] = Setting(name, kind, given["default"], given["metadata"]["help"])
    return settings


def add_flags(parser: Any) -> None:
    """Adds a flag for every setting; only those that are given appear in the namespace."""
    for setting in read_settings().values():
        text = f"{setting.help.rstrip('.')} (default: {setting.default})".replace("%", "%%")
        parser.add_argument(setting.flag, metavar="X", default=argparse.SUPPRESS, help=text)


def gather(flags: Mapping[str, Any], environment: Mapping[str, str], config: str | None = None) -> dict[str, Any]:
    """Returns the settings that were given anywhere: a flag wins over the environment, and that over YAML.

    Args:
        flags (`Mapping[str, Any]`):
            The parsed command line; other names in it are left alone.
        environment (`Mapping[str, str]`):
            The environment variables.
        config (`str`, *optional*):
            A YAML file; `NANGUARD_CONFIG` names one otherwise.

    Raises:
        `ArgumentError`: an unknown name or a bad value.
    """
    source = "--config" if config is not None else CONFIG_VARIABLE
    config = environment.get(CONFIG_VARIABLE) if config is None else config
    of_file = {} if config is None else _check(_read_yaml(config, source), f"{config}: ")
    variables = {
        name: value
        for name, value in environment.items()
        if name.startswith(VARIABLE_PREFIX) and name != CONFIG_VARIABLE
    }
    of_environment = {_find_name(name.lower(), name): value for name, value in variables.items()}
    of_flags = {name: flags[name] for name in read_settings() if name in flags}
    found = {**of_file, **_check(of_environment, "environment variable "), **_check(of_flags, "--")}
    _check({**{setting.name: setting.default for setting in read_settings().values()}, **found}, "")
    return found


def as_environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns settings as environment variables, which [`gather`] reads back as they are."""
    return {name.upper(): str(value) for name, value in settings.items()}


def _check(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns settings in their types, or complains in the spelling of where they came from."""
    from ..core.settings import check_settings

    known = read_settings()
    converted = {name: known[name].convert(value) for name, value in settings.items()}
    try:
        check_settings({name.removeprefix(PREFIX): value for name, value in converted.items()}, PREFIX)
    except ArgumentError as error:
        sentence = str(error)
        if source.startswith("environment"):
            first, _, rest = sentence.partition(" ")
            sentence = f"{first.upper()} {rest}"
        raise ArgumentError(f"{source}{sentence}") from error
    return converted


def _find_name(name: str, spelled: str, place: str = "in the environment") -> str:
    if name in read_settings():
        return name
    near = difflib.get_close_matches(name, read_settings(), 1)
    upper = spelled.isupper()
    hint = f" Did you mean {near[0].upper() if upper else near[0]}?" if near else ""
    raise ArgumentError(f"{spelled} {place} is no setting of the guard.{hint} `nanguard run --help` lists them.")


def _read_yaml(path: str, source: str) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ArgumentError(f"{source} must be a YAML file that can be read, got {path!r} ({reason}).") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ArgumentError(f"{source} must be a YAML file, got {path!r} ({reason}).") from error
    if not isinstance(content, dict):
        raise ArgumentError(
            f"{source} must be a YAML file of names and values, got {path!r}. For example nanguard_mode: observe."
        )
    return {_find_name(str(name), str(name), f"in {path}"): value for name, value in content.items()}
