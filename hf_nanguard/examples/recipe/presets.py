"""Presets: YAML files with arguments that work for a kind of training.

They are `configs/<kind>/<name>.yaml` in a clone; a wheel has them inside the package.
"""

from pathlib import Path

from ...errors import ArgumentError
from ...yaml_file import read_yaml

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
