"""Bundles: what an autopsy leaves for a colleague, read again without trust in where it came from.

Only files of known names are opened, none of them is a pickle, and whatever is inside is checked before it is used:
sizes before reading, names and shapes before loading, structure before it is followed. Everything is loaded to the CPU.
"""

import json
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from ....errors import ArgumentError
from ...rng import RngState
from .content import MAX_FACTS, MAX_LEVELS, SCHEMA, measure_depth, show_bytes
from .packing import unpack_inputs, unpack_rng
from .tensor_file import load_tensors
from .writer import WEIGHTS, write_bundle

__all__ = ["Bundle", "read_bundle", "write_bundle"]

MAX_READ_BYTES = 64 * 2**30


@dataclass(frozen=True, eq=False)
class Bundle:
    """A bundle that was read.

    Args:
        path (`Path`):
            Its folder.
        facts (`dict`):
            The facts that were given to `write_bundle`, as JSON values.
        inputs (`Any`):
            The nested inputs as the loop held them, as dictionaries, lists and tuples; `None` if they were left out.
        rng (`RngState`):
            The random state of the forward.
        verdict (`dict`):
            What the autopsy found, as `Verdict.as_dict()` has it.
        step, micro_step (`int`):
            When it happened.
        inputs_are, weights_are (`str`):
            `"all"`, `"samples"` (the culprit ones) or `"none"`; `"all"`, `"trainable"` or `"none"`.
        versions (`dict[str, str]`):
            Of the libraries that were in use.
        left_out (`dict[str, str]`):
            What is not inside or cannot be used here, and why.
    """

    path: Path
    facts: dict[str, Any]
    inputs: Any
    rng: RngState
    verdict: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    micro_step: int = 0
    inputs_are: str = "all"
    weights_are: str = "none"
    versions: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    has_needed: bool = False
    aliases: dict[str, str] = field(default_factory=dict)
    max_bytes: int = MAX_READ_BYTES

    def read_weights(self) -> dict[str, Tensor]:
        """Returns the weights inside, tied ones under each of their names; empty if there are none.

        Raises:
            ArgumentError: The files are missing, broken or hostile.
        """
        weights: dict[str, Tensor] = {}
        try:
            if self.weights_are != "none":
                weights |= load_tensors(_find_file(self.path, "weights.safetensors", self.max_bytes))
            if self.has_needed:
                weights |= load_tensors(_find_file(self.path, "needed.safetensors", self.max_bytes))
            for alias, name in self.aliases.items():
                if name not in weights or alias in weights:
                    raise ValueError(f"it says that {alias[:80]!r} is {name[:80]!r}, which its files do not bear out")
            return weights | {alias: weights[name] for alias, name in self.aliases.items()}
        except (ValueError, OSError) as err:
            _refuse(self.path, err)


def read_bundle(path: str | Path, *, max_bytes: int = MAX_READ_BYTES) -> Bundle:
    """Reads a bundle; weights are read later, by `Bundle.read_weights`.

    Args:
        path (`str` or `Path`):
            The folder.
        max_bytes (`int`, *optional*, defaults to 64 GiB):
            How large each of its files may be.

    Returns:
        `Bundle`: what is inside.

    Raises:
        ArgumentError: It is not a bundle, or it is broken or hostile.

    Example:

    ```python
    bundle = read_bundle("autopsy/step-42")
    bundle.rng.restore()
    model(**bundle.inputs)
    ```
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ArgumentError(
            f"A bundle must be a folder that an autopsy wrote, got {str(path)!r}: there is no such folder."
        )
    try:
        document = _read_facts(_find_file(folder, "facts.json", MAX_FACTS))
        weights = _take(document, "weights", dict)
        weights_are = _take(weights, "are", str)
        inputs_are = _take(_take(document, "inputs", dict), "are", str)
        if weights_are not in WEIGHTS or inputs_are not in ("all", "samples", "none"):
            raise ValueError("facts.json says that it holds inputs or weights of an unknown kind")
        if weights_are != "none":
            _find_file(folder, "weights.safetensors", max_bytes)
        tensors = load_tensors(_find_file(folder, "inputs.safetensors", max_bytes))
        rng, unusable = unpack_rng(_take(document, "rng", dict), tensors)
        return Bundle(
            path=folder,
            facts=_take(document, "facts", dict),
            inputs=unpack_inputs(document.get("tree"), tensors),
            rng=rng,
            verdict=_take(document, "verdict", dict),
            step=_take(document, "step", int),
            micro_step=_take(document, "micro_step", int),
            inputs_are=inputs_are,
            weights_are=weights_are,
            versions=_take_texts(document, "versions"),
            left_out=_take_texts(document, "left_out") | unusable,
            has_needed=_take(weights, "needed", bool),
            aliases=_take_texts(weights, "aliases"),
            max_bytes=max_bytes,
        )
    except (ValueError, OSError) as err:
        _refuse(folder, err)


def _refuse(folder: Path, err: Exception) -> NoReturn:
    raise ArgumentError(f"The bundle {str(folder)!r} cannot be read: {err}. Have it written or sent anew.") from err


def _find_file(folder: Path, name: str, max_bytes: int) -> Path:
    """Returns the path of a plain file inside the folder that is not too large."""
    path = folder / name
    try:
        info = path.stat()
        inside = path.resolve(strict=True).is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as err:  # RuntimeError: links in a circle
        raise ValueError(f"{name} is missing") from err
    if not inside:
        raise ValueError(f"{name} is a link that leads out of the folder")
    if not stat.S_ISREG(info.st_mode):
        raise ValueError(f"{name} is not a plain file")
    if info.st_size > max_bytes:
        raise ValueError(
            f"{name} has {show_bytes(info.st_size)}, more than the {show_bytes(max_bytes)} that are allowed"
        )
    return path


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except RecursionError as err:
        raise ValueError("facts.json is nested too deep") from err
    except ValueError as err:
        raise ValueError(f"facts.json is not strict JSON ({err})") from err
    if not isinstance(document, dict):
        raise ValueError("facts.json is not an object")
    if measure_depth(document) > MAX_LEVELS:
        raise ValueError("facts.json is nested too deep")
    schema = document.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise ValueError(
            f"its schema must be {SCHEMA}, got {str(schema)[:20]!r} (another version of hf_nanguard wrote it)"
        )
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name}")


def _take(document: dict[str, Any], key: str, kind: type) -> Any:
    value = document.get(key)
    if type(value) is not kind:
        raise ValueError(f"facts.json has no valid {key!r}")
    return value


def _take_texts(document: dict[str, Any], key: str) -> dict[str, str]:
    texts = _take(document, key, dict)
    if not all(isinstance(value, str) for value in texts.values()):
        raise ValueError(f"facts.json has no valid {key!r}")
    return texts
