"""Converts nested inputs and a random state to JSON values and named tensors, and back.

In the tree of the inputs, plain values are stored as they are. Anything else is an object with one key, its kind:
`{"tensor": name}`, `{"dict": {...}}`, `{"list": [...]}`, `{"tuple": [...]}`, `{"float": "nan"}`, `{"left_out": why}`.
"""

import math
import random
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ....plain_text import REDACTED
from ...event import JsonObject, JsonValue, strict
from ...rerun.nested_inputs import HOST_NAMES
from ...rng import RngState
from .tensor_file import count_bytes, why_not

MAX_DEPTH = 32
MAX_VALUES = 200_000
MAX_INT_BITS = 1024
MAX_DEVICE_STATE = 8192


@dataclass
class Packed:
    """Nested values as JSON and tensors."""

    tree: JsonValue = None  # refers to tensors by name
    tensors: dict[str, Tensor] = field(default_factory=dict)  # by reference
    left_out: dict[str, str] = field(default_factory=dict)  # what could not be converted, and why

    @property
    def num_bytes(self) -> int:
        return count_bytes(self.tensors.values())


def pack_inputs(inputs: object, text: bool = True, names: Collection[str] = HOST_NAMES) -> Packed:
    """Converts nested inputs; without `text` every string in them is replaced, and every key that is not one of the `names`, by
    its place."""
    packed = _PackedInputs(text=text, known=names)
    packed.tree = packed.pack(inputs, "inputs", 0)
    return packed


@dataclass
class _PackedInputs(Packed):
    text: bool = True
    known: Collection[str] = HOST_NAMES
    names: dict[int, str] = field(default_factory=dict)  # a tensor may occur twice
    num_values: int = 0

    def pack(self, value: object, name: str, depth: int) -> JsonValue:
        if isinstance(value, Tensor):
            return self._pack_tensor(value, name)
        if isinstance(value, (Mapping, list, tuple)):
            return self._pack_container(value, name, depth)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return value if self.text else REDACTED
        if isinstance(value, int) and value.bit_length() <= MAX_INT_BITS:
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": strict(float(value))}
        return self._leave_out(name, f"a {type(value).__name__} is neither a tensor nor a plain value")

    def _pack_tensor(self, tensor: Tensor, name: str) -> JsonValue:
        reason = why_not(tensor)
        if reason is not None:
            return self._leave_out(name, reason)
        if id(tensor) not in self.names:
            while name in self.tensors:  # a dot may be part of a key
                name += "'"
            self.names[id(tensor)] = name
            self.tensors[name] = tensor
        return {"tensor": self.names[id(tensor)]}

    def _pack_container(self, value: Mapping | list | tuple, name: str, depth: int) -> JsonValue:
        self.num_values += len(value)
        if depth >= MAX_DEPTH or self.num_values > MAX_VALUES:
            return self._leave_out(name, "it is nested too deep or has too many values")
        if isinstance(value, Mapping):
            named = {key: self._name_key(key, place) for place, key in enumerate(value)}
            for key, shown in named.items():
                if not isinstance(key, str):
                    self._leave_out(f"{name}.{_part(shown)}", "its key is not a string")
            items = ((named[key], item) for key, item in value.items() if isinstance(key, str))
            return {"dict": {key: self.pack(item, f"{name}.{_part(key)}", depth + 1) for key, item in items}}
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [self.pack(item, f"{name}.{place}", depth + 1) for place, item in enumerate(value)]}

    def _name_key(self, key: object, place: int) -> Any:
        return key if self.text or key in self.known else f"key_{place}"

    def _leave_out(self, name: str, why: str) -> dict[str, str]:
        self.left_out[name] = why
        return {"left_out": why}


def _part(key: object) -> str:
    """Returns a key as a part of a name that a file can contain."""
    return str(key).encode(errors="backslashreplace").decode()


def unpack_inputs(tree: object, tensors: dict[str, Tensor], depth: int = 0) -> object:
    """Returns the nested inputs. What was left out is missing from a dictionary and `None` elsewhere; what `pack_inputs` did not
    make from these tensors is a `ValueError`."""
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if depth > MAX_DEPTH:
        raise ValueError(f"its inputs are nested deeper than {MAX_DEPTH} levels")
    if not isinstance(tree, dict) or len(tree) != 1:
        raise ValueError("its inputs have a part of unknown kind")
    [(kind, content)] = tree.items()
    if kind == "left_out":
        return None
    if kind == "tensor" and isinstance(content, str):
        if content not in tensors:
            raise ValueError(f"its inputs refer to the tensor {content[:80]!r}, which does not exist")
        return tensors[content]
    if kind == "float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if kind == "dict" and isinstance(content, dict):
        kept = {key: part for key, part in content.items() if not (isinstance(part, dict) and "left_out" in part)}
        return {key: unpack_inputs(part, tensors, depth + 1) for key, part in kept.items()}
    if kind in ("list", "tuple") and isinstance(content, list):
        items = [unpack_inputs(part, tensors, depth + 1) for part in content]
        return items if kind == "list" else tuple(items)
    raise ValueError(f"its inputs have an invalid part of kind {kind[:80]!r}")


def pack_rng(rng: RngState) -> Packed:
    """Converts a random state."""
    version, words, gauss = rng.python
    python = [version, list(words), gauss]
    packed = Packed()
    numpy: JsonValue = None
    packed.tensors["rng.cpu"] = rng.cpu
    if rng.device is not None:
        packed.tensors["rng.device"] = rng.device
    if isinstance(rng.numpy, tuple):
        algorithm, words, place, has_gauss, gauss = rng.numpy
        packed.tensors["rng.numpy"] = torch.from_numpy(words)
        numpy = [algorithm, int(place), int(has_gauss), float(gauss)]
    elif rng.numpy is not None:
        packed.left_out["rng.numpy"] = "NumPy's global generator was replaced by one of another kind"
    packed.tree = {"device_type": rng.device_type, "python": python, "numpy": numpy}
    return packed


def unpack_rng(tree: JsonObject, tensors: dict[str, Tensor]) -> tuple[RngState, dict[str, str]]:
    """Returns the random state, and what of it this machine cannot use; a state that the generators would not accept is a
    `ValueError`."""
    left_out: dict[str, str] = {}
    cpu = tensors.get("rng.cpu")
    if cpu is None or cpu.dtype != torch.uint8 or cpu.shape != torch.get_rng_state().shape:
        raise ValueError("its random state of the CPU has the wrong size or dtype")
    try:
        torch.Generator().set_state(cpu)
    except RuntimeError as err:
        raise ValueError("its random state of the CPU is not valid") from err
    device, device_type = tensors.get("rng.device"), tree.get("device_type")
    if not isinstance(device_type, str) or not re.fullmatch(r"[a-z]{2,20}", device_type):
        raise ValueError("the device type of its random state is not valid")
    if device is not None and (device.dtype != torch.uint8 or device.ndim != 1 or device.numel() > MAX_DEVICE_STATE):
        raise ValueError("its random state of the device has the wrong size or dtype")
    here = torch.accelerator.current_accelerator()
    if device is not None and (here is None or here.type != device_type):
        left_out["rng.device"] = f"it belongs to {device_type}, which this machine does not have"
        device = None
    numpy = _unpack_numpy(tree.get("numpy"), tensors.get("rng.numpy"), left_out)
    device_type = "cpu" if device is None else device_type
    return RngState(cpu, device, device_type, _unpack_python(tree.get("python")), numpy), left_out


def _unpack_python(tree: Any) -> tuple[object, ...]:
    try:
        version, words, gauss = tree
        state = (version, tuple(words), gauss)
        if not (gauss is None or isinstance(gauss, float)) or not all(type(word) is int for word in words):
            raise ValueError("not numbers")
        random.Random().setstate(state)
    except (TypeError, ValueError, OverflowError) as err:
        raise ValueError("its random state of Python is not valid") from err
    return state


def _unpack_numpy(tree: Any, words: Tensor | None, left_out: dict[str, str]) -> object:
    if tree is None:
        return None
    known = isinstance(tree, list) and list(map(type, tree)) == [str, int, int, float] and tree[0] == "MT19937"
    if not known or not 0 <= tree[1] <= 624 or tree[2] not in (0, 1):
        raise ValueError("its random state of NumPy is not valid")
    if words is None or words.dtype != torch.uint32 or words.shape != (624,):
        raise ValueError("its random state of NumPy has the wrong size or dtype")
    try:
        return (tree[0], words.numpy(), *tree[1:])
    except RuntimeError:  # raised if NumPy is not installed
        left_out["rng.numpy"] = "NumPy is not installed here"
        return None
