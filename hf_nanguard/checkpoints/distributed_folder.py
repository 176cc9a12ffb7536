"""Reads the shards of `torch.distributed.checkpoint` (`.distcp`, as FSDP saves them) without loading its pickled index.

The index `.metadata` says where each tensor lies in the shards. It is read by an unpickler for which every class and function
is an inert object, so nothing in it can be imported or called.
"""

import pickle
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from ..plain_text import first_line
from ..safe_files import open_to_read, read_file
from .checkpoint_files import DISTRIBUTED_METADATA
from .tensor_files import DamagedFileError, Inert, OpenedFile, open_torch_file

MAX_METADATA = 2**30


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> object:
        return type("Inert", (Inert,), {})


def read_shards(folder: Path) -> Iterator[tuple[str, OpenedFile]]:
    """Yields the name of each part of a tensor and its content; a `DamagedFileError` if the index or a shard cannot be read."""
    for name, file, offset, length in _read_index(folder / DISTRIBUTED_METADATA):
        path = folder / Path(file).name
        try:
            with open_to_read(path) as shard:
                shard.seek(offset)
                content = shard.read(min(length, path.stat().st_size))
        except (OSError, OverflowError, ValueError) as error:
            raise DamagedFileError(f"cannot be read ({first_line(error)})") from error
        if len(content) != length:
            raise DamagedFileError(f"is truncated: {path.name} ends before {name}")
        yield name, open_torch_file(BytesIO(content))


def _read_index(path: Path) -> list[tuple[str, str, int, int]]:
    """Returns name, file, offset and length of each entry of an index."""
    try:
        content = BytesIO(read_file(path, MAX_METADATA))
        entries = _InertUnpickler(content).load().state["storage_data"].items()
        found = [(str(key.state["fqn"]), place.state) for key, place in entries]
        return [(name, str(s["relative_path"]), int(s["offset"]), int(s["length"])) for name, s in found]
    except Exception as error:  # an unpickler raises anything on a damaged file
        raise DamagedFileError(f"has an index {path.name} that cannot be read ({first_line(error)})") from error
