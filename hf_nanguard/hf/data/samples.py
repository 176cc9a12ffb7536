"""Takes single samples out of a collated batch, where its fields can be taken apart."""

from collections.abc import Collection, MutableMapping
from typing import Any

from torch import Tensor


def remove_samples(batch: MutableMapping, bad: Collection[int], num_samples: int) -> tuple[int, ...] | None:
    """Takes samples out of a batch in place, before anything has been counted in it.

    A batch can be taken apart if every tensor and list in it has one entry a sample, and all else are single values. Packed sequences and the patches of
    several images in one tensor do not.

    Args:
        batch (`MutableMapping`):
            The collated batch.
        bad (`Collection[int]`):
            Which samples.
        num_samples (`int`):
            How many the batch was made of.

    Returns:
        `tuple[int, ...] | None`: the samples that are left, `None` if the batch is as it was: it cannot be taken apart,
        or nothing would be left.
    """
    kept = tuple(sample for sample in range(num_samples) if sample not in bad)
    if not kept or not all(_has_samples(value, num_samples) for value in batch.values()):
        return None
    for name, value in list(batch.items()):
        if isinstance(value, Tensor):
            batch[name] = value[list(kept)]
        elif isinstance(value, (list, tuple)):
            batch[name] = type(value)(value[sample] for sample in kept)
    return kept


def _has_samples(value: Any, num_samples: int) -> bool:
    if isinstance(value, Tensor):
        return value.ndim > 0 and len(value) == num_samples
    if type(value) in (list, tuple):
        return len(value) == num_samples
    return value is None or isinstance(
        value, (str, bool, int, float)
    )  # of anything else nobody knows what it is made of
