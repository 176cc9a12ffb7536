"""Reads a bundle that anybody may have written.

Only files of known names are opened, none of them is a pickle, and everything is checked before it is used: sizes before
reading, names and shapes before loading, structure before following it. Everything is loaded to the CPU.
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

from torch import Tensor

from ....errors import ArgumentError
from ....safe_files import DRAFT, read_file
from ...event import JsonObject, parse_strict
from ...rng import RngState
from .content import MAX_FACTS, SCHEMA, format_bytes
from .packing import unpack_inputs, unpack_rng
from .tensor_file import load_tensors
from .writer import WEIGHTS

MAX_READ_BYTES = 64 * 2**30  # of one file
MAX_LEVELS = 100
MAX_LISTED = 5
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Bundle:
    """A bundle."""

    path: Path
    facts: JsonObject  # what was given to `write_bundle`
    inputs: object  # nested, as dictionaries, lists and tuples; `None` if they were left out
    rng: RngState  # before the forward
    verdict: JsonObject = field(default_factory=dict)  # as `Verdict.as_dict()` returns it
    step: int = 0
    micro_step: int = 0  # the micro-batch in the step
    inputs_are: str = "all"  # "all", "samples" (the culprit ones) or "none"
    weights_are: str = "none"  # "all", "trainable" or "none"
    versions: dict[str, str] = field(default_factory=dict)  # of the libraries in use
    left_out: dict[str, str] = field(default_factory=dict)  # what is missing or cannot be used on this machine, and why
    has_weights: bool = False  # with `weights_are="none"` the file contains only the parameter to blame
    aliases: dict[str, str] = field(default_factory=dict)  # further names of tied weights

    def read_weights(self) -> dict[str, Tensor]:
        """Returns the weights, tied ones under each of their names. A file that is missing, damaged or hostile is an
        [`ArgumentError`]."""
        weights: dict[str, Tensor] = {}
        try:
            if self.has_weights:
                weights = load_tensors(_find_file(self.path, "weights.safetensors"))
            for alias, name in self.aliases.items():
                if name not in weights or alias in weights:
                    raise ValueError(f"{alias[:80]!r} is tied to {name[:80]!r}, which contradicts weights.safetensors")
            return weights | {alias: weights[name] for alias, name in self.aliases.items()}
        except (ValueError, OSError) as err:
            _refuse(self.path, err)


def read_bundle(path: str | Path) -> Bundle:
    """Reads a bundle; weights are read later, by `Bundle.read_weights`. One that is damaged or hostile is an
    [`ArgumentError`]."""
    if not isinstance(path, (str, Path)):
        raise ArgumentError(f"A bundle must be named by the path of its folder, got {type(path).__name__}.")
    folder = Path(path)
    if not folder.is_dir():
        raise ArgumentError(f"No such bundle: {str(path)!r} must be a folder that an autopsy wrote.")
    if not os.path.lexists(folder / "facts.json") and (below := find_bundles(folder)):
        raise ArgumentError(f"{str(path)!r} is not a bundle. Choose one of those below it: {', '.join(below)}.")
    try:
        document = _read_facts(_find_file(folder, "facts.json"))
        weights = _take(document, "weights", dict)
        weights_are = _take(weights, "are", str)
        inputs_are = _take(_take(document, "inputs", dict), "are", str)
        if weights_are not in WEIGHTS or inputs_are not in ("all", "samples", "none"):
            raise ValueError("facts.json names an unknown kind of inputs or weights")
        tensors = load_tensors(_find_file(folder, "inputs.safetensors"))
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
            has_weights=_take(weights, "saved", bool),
            aliases=_take_texts(weights, "aliases"),
        )
    except (ValueError, OSError) as err:
        _refuse(folder, err)


def find_bundles(folder: Path) -> list[str]:
    """Returns the newest bundles in the folders of a run, at most three levels down."""
    every = (path for level in range(1, 4) for path in folder.glob(f"{'*/' * level}facts.json") if path.is_file())
    found = [path for path in every if not path.parent.name.endswith(DRAFT)]
    found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return [str(path.parent) for path in found[:MAX_LISTED]]


def _refuse(folder: Path, err: Exception) -> NoReturn:
    raise ArgumentError(f"The bundle {str(folder)!r} cannot be read: {err}. Write or copy it again.") from err


def _find_file(folder: Path, name: str) -> Path:
    """Returns the path of a regular file in the folder that is not too large."""
    path = folder / name
    try:
        info = path.stat()
        inside = path.resolve(strict=True).is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as err:  # RuntimeError: circular links
        raise ValueError(f"{name} is missing") from err
    if not inside:
        raise ValueError(f"{name} is a link that leads out of the folder")
    if not stat.S_ISREG(info.st_mode):
        raise ValueError(f"{name} is not a regular file")
    max_bytes = MAX_FACTS if name == "facts.json" else MAX_READ_BYTES
    if info.st_size > max_bytes:
        raise ValueError(f"{name} has {format_bytes(info.st_size)}, more than the allowed {format_bytes(max_bytes)}")
    return path


def _read_facts(path: Path) -> JsonObject:
    try:
        document = parse_strict(read_file(path, MAX_FACTS))
    except ValueError as err:
        raise ValueError(f"facts.json is not strict JSON ({err})") from err
    if not isinstance(document, dict):
        raise ValueError("facts.json is not an object")
    if measure_depth(document) > MAX_LEVELS:
        raise ValueError("facts.json is nested too deep")
    schema = document.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise ValueError(
            f"its schema must be {SCHEMA}, got {str(schema)[:20]!r}; another version of hf_nanguard wrote it"
        )
    return document


def measure_depth(value: object) -> int:
    """Returns how deep JSON values are nested, without recursion."""
    depth, level = 0, [value]
    while level and depth <= MAX_LEVELS:
        depth += 1
        parts = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [item for part in parts for item in part]
    return depth


def _take(document: JsonObject, key: str, kind: type[T]) -> T:
    value = document.get(key)
    if type(value) is not kind:
        raise ValueError(f"facts.json has no valid {key!r}")
    return value


def _take_texts(document: JsonObject, key: str) -> dict[str, str]:
    texts = _take(document, key, dict)
    if not all(isinstance(value, str) for value in texts.values()):
        raise ValueError(f"facts.json has no valid {key!r}")
    return texts
