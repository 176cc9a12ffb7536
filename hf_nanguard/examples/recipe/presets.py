"""Presets: YAML files with arguments that work for a kind of training.

They are `configs/<kind>/<name>.yaml` in a clone; a wheel has them inside the package.
"""

from pathlib import Path

from ...errors import ArgumentError
from ...plain_text import printable

PACKAGE = Path(__file__).parents[2]


def find_configs() -> Path:
    """Returns the folder of presets: inside the package if it was installed, else beside it."""
    shipped = PACKAGE / "configs"
    return shipped if shipped.is_dir() else PACKAGE.parent / "configs"


def list_presets(kind: str) -> list[str]:
    """Returns the names of the presets of a kind (`sft`, `lora`, `grpo`, `distill`)."""
    return sorted(path.stem for path in (find_configs() / kind).glob("*.yaml"))


def read_preset(kind: str, name: str | None) -> dict[str, object]:
    """Returns the arguments of a preset; none without a name."""
    if name is None:
        return {}
    known = list_presets(kind)
    if name not in known:
        raise ArgumentError(
            f"--preset must be one of {', '.join(known)}, got {name!r}. Use --config for your own file."
        )
    return read_yaml(str(find_configs() / kind / f"{name}.yaml"))


def read_yaml(path: str, source: str = "--config", example: str = "learning_rate: 1.0e-5") -> dict[str, object]:
    """Returns the names and values of a YAML file. Errors name `source`, the flag or variable that names the file."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ArgumentError(f"{source} must be a readable YAML file, got {path!r} ({reason}).") from error
    except yaml.YAMLError as error:
        raise ArgumentError(f"{source} must be a YAML file, got {path!r} ({printable(str(error))}).") from error
    if not isinstance(content, dict):
        raise ArgumentError(f"{source} must be a YAML file of names and values, got {path!r}. For example {example}.")
    return {str(name): value for name, value in content.items()}
