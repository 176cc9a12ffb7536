"""A fingerprint of a training dataset, by which a later run knows that row numbers still mean the same rows.

It is taken from the number of rows and the content of a few of them, so it is the same in every process. Reading them runs no code of the
user's: of datasets other than those of `datasets`, lists and torch's own, only class and length are compared.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset

from ..compat.prepared_dataset import is_hf_dataset, is_hf_stream

NUM_ROWS = 32


def find_fingerprint(dataset: Any, user_rows: np.ndarray | None = None) -> str | None:
    """Returns the fingerprint of a dataset with numbered rows, `None` for any other. `user_rows` are the numbers by which
    events name the rows, if they differ: the order of the rows may be another every time."""
    if isinstance(dataset, IterableDataset) or is_hf_stream(dataset) or not hasattr(dataset, "__getitem__"):
        return None
    try:
        number = len(dataset)
    except (TypeError, NotImplementedError):
        return None
    order = range(number) if user_rows is None else np.argsort(user_rows, kind="stable")
    places = (
        [int(order[place]) for place in np.unique(np.linspace(0, number - 1, NUM_ROWS).astype(int))] if number else []
    )
    found = hashlib.sha256(f"{type(dataset).__qualname__} {number}".encode())
    for place in places:
        name = place if user_rows is None else int(user_rows[place])
        found.update(f"|{name}:".encode())
        _add(found, _read(dataset, place))
    return f"{number}-{found.hexdigest()[:16]}"


def find_contents(dataset: Any, rows: Iterable[int], user_rows: np.ndarray | None = None) -> dict[int, str]:
    """Returns a digest of the content of each of these rows that can be read without running code of the user's. Rows are given
    as events name them; those that the dataset does not have are left out."""
    contents, number = {}, len(dataset)
    places = None if user_rows is None else dict(zip(user_rows.tolist(), range(number), strict=False))
    dataset = dataset.with_format("arrow") if is_hf_dataset(dataset) else dataset
    for row in rows:
        place = row if places is None else places.get(row, number)
        content = _read(dataset, place) if place < number else None
        if content is not None:
            found = hashlib.sha256()
            _add(found, content)
            contents[row] = found.hexdigest()[:16]
    return contents


def _read(dataset: Any, place: int) -> object:
    """Returns a row as it is stored."""
    if is_hf_dataset(dataset):
        plain = dataset if dataset.format["type"] == "arrow" else dataset.with_format("arrow")
        return plain[place : place + 1].to_pylist()
    if isinstance(dataset, Subset):
        return _read(dataset.dataset, int(dataset.indices[place]))
    if type(dataset) in (list, tuple, TensorDataset):
        return dataset[place]
    return None


def _add(found: Any, value: object) -> None:
    if isinstance(value, Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        if value.layout is torch.strided and not value.is_quantized and not value.is_complex() and not value.is_meta:
            plain = value.detach().cpu()
            _add(found, (plain.float() if plain.is_floating_point() else plain).numpy())
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:  # whose bytes are addresses
        _add(found, value.tolist())
    elif isinstance(value, np.ndarray):
        found.update(f"{value.dtype} {value.shape} ".encode())
        found.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, np.generic):
        found.update(f"{value.item()!r};".encode())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            found.update(f"{key}=".encode())
            _add(found, value[key])
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        found.update(f"[{len(value)}]".encode())
        for item in value:
            _add(found, item)
    elif isinstance(value, (str, bytes, int, float, bool, type(None))):
        found.update(f"{value!r};".encode())
    else:
        found.update(type(value).__qualname__.encode())  # an object's repr may hold its address
