"""Opens the tensors of a file that anybody may have written, mapped into memory, without running anything that it contains.

A safetensors file is checked by the safetensors library, whose header has a limit here. A file of `torch.save` goes through
torch's weights-only loader; objects of other classes become inert ones that hold their state, so that the tensors of a
DeepSpeed checkpoint can be checked without DeepSpeed. Nothing that a file names is imported.
"""

import math
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ..own_fields import own_fields
from ..plain_text import first_line, printable
from ..safe_files import open_to_read

SAFETENSORS = (".safetensors",)
TORCH_FILES = (".bin", ".pt", ".pth", ".ckpt")
MAX_HEADER = 100_000_000  # as in the safetensors library
MAX_OBJECTS = 10_000_000  # of one file of torch.save
ZIP_START = b"PK\x03\x04"
POINTER = b"version https://git-lfs"  # a repository that was cloned without its large files


class DamagedFileError(Exception):
    """A file whose tensors cannot be read; the message is the rest of a sentence that begins with the file."""


@dataclass
class OpenedFile:
    """The tensors of a file, and what else it contains."""

    tensors: dict[str, Tensor]
    nan_numbers: list[str] = field(default_factory=list)  # plain numbers that are NaN, e.g. a learning rate
    foreign: list[str] = field(default_factory=list)  # classes that torch's weights-only loader does not know
    unreadable: list[str] = field(default_factory=list)  # tensors of a dtype that torch does not have


def open_tensors(path: Path) -> OpenedFile:
    """Opens a file of tensors as views of it: nothing is read yet. One that is truncated, of another format, or names something
    that must not be loaded, is a `DamagedFileError`."""
    try:
        start = _read_start(path)
        if not start:
            raise DamagedFileError("is empty")
        if start.startswith(POINTER):
            raise DamagedFileError("is a pointer of git LFS: the file itself was not downloaded")
        return _open_safetensors(path) if path.suffix in SAFETENSORS else open_torch_file(path)
    except OSError as error:
        raise DamagedFileError(f"cannot be read ({first_line(error)})") from error


def _open_safetensors(path: Path) -> OpenedFile:
    with open_to_read(path) as file:
        if int.from_bytes(file.read(8), "little") > MAX_HEADER:
            raise DamagedFileError("is damaged or not a safetensors file: its header would have more than 100 MB")
    opened = OpenedFile({})
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                try:
                    opened.tensors[name] = file.get_tensor(name)
                except (AttributeError, KeyError, TypeError, ValueError, SafetensorError):  # a dtype that torch lacks
                    opened.unreadable.append(name)
    except (SafetensorError, RuntimeError, OverflowError) as error:
        raise DamagedFileError(_explain_damage(error)) from error
    return opened


class Inert:
    """Stands for an object of a class that must not be imported: takes any arguments, keeps its state, does nothing."""

    def __new__(cls, *arguments: object, **options: object) -> "Inert":
        made = object.__new__(cls)
        made.__dict__["arguments"] = arguments
        return made

    def __init__(self, *arguments: object, **options: object):
        pass

    def __setstate__(self, state: object) -> None:
        self.__dict__["state"] = state


def open_torch_file(source: Path | BytesIO) -> OpenedFile:
    """Opens a file of `torch.save`, or the bytes of one."""
    is_zip = _read_start(source).startswith(ZIP_START)  # else of a torch before 1.6, which cannot be mapped
    try:
        foreign = _list_foreign(source) if is_zip else []
        if isinstance(source, BytesIO):
            source.seek(0)
        inert: list[Any] = [(type("Inert", (Inert,), {}), name) for name in foreign]
        with safe_globals(inert), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of unusual pickles
            mmap = is_zip and isinstance(source, Path)
            content = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except DamagedFileError:
        raise
    except pickle.UnpicklingError as error:
        raise DamagedFileError(_explain_refusal(error)) from error
    except Exception as error:  # torch's loader raises anything on a damaged file, also struct.error
        raise DamagedFileError(
            _explain_damage(error) if is_zip else "is not a file of torch.save, or damaged"
        ) from error
    opened = OpenedFile({}, foreign=foreign)
    for name, value in walk(content):
        if isinstance(value, Tensor):
            opened.tensors[name] = value
        elif math.isnan(value):
            opened.nan_numbers.append(name)
    return opened


def _read_start(source: Path | BytesIO) -> bytes:
    if isinstance(source, BytesIO):
        return source.getvalue()[: len(POINTER)]
    with open_to_read(source) as file:
        return file.read(len(POINTER))


def _list_foreign(source: Path | BytesIO) -> list[str]:
    """Returns the classes that a file names and the weights-only loader does not know. A file with compressed parts is refused:
    `torch.save` does not compress, and a few bytes could fill the memory."""
    with zipfile.ZipFile(source) as archive:
        packed = [part for part in archive.infolist() if part.compress_type != zipfile.ZIP_STORED]
        if any("/code/" not in part.filename for part in packed):  # a script has some, and torch names it as one
            raise DamagedFileError("has compressed parts, which torch.save does not write; it was not loaded")
    if isinstance(source, BytesIO):
        source.seek(0)
    return sorted(get_unsafe_globals_in_checkpoint(source))


def _explain_damage(error: Exception) -> str:
    return f"is truncated or damaged ({first_line(error).split('. ')[0]})"


def _explain_refusal(error: pickle.UnpicklingError) -> str:
    """Returns what torch's loader refused: its message begins with advice to load the file anyway."""
    lines = str(error).splitlines()
    named = next((line.strip() for line in lines if "GLOBAL" in line or "REDUCE" in line or "BUILD" in line), "")
    detail = f" ({printable(named, 200)})" if named else ""
    return f"is not a checkpoint, or contains code that loading it would run; it was not loaded{detail}"


def walk(content: object) -> Iterator[tuple[str, Tensor | float]]:
    """Yields tensors and floats of nested containers by name, without recursion, each container once."""
    stack: list[tuple[str, object]] = [("", content)]
    seen: set[int] = set()
    for _ in range(MAX_OBJECTS):
        if not stack:
            return
        name, value = stack.pop()
        if isinstance(value, (Tensor, float)):
            yield name, value
            continue
        children = _list_children(value)
        if not children or id(value) in seen:
            continue
        seen.add(id(value))
        stack.extend((f"{name}.{key}" if name else str(key), child) for key, child in reversed(children))


def _list_children(value: object) -> list[tuple[object, object]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return list(own_fields(value).items()) if isinstance(value, Inert) else []
