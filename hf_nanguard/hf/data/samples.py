"""Removes single samples from a collated batch whose fields have one entry per sample."""

from collections.abc import Collection, MutableMapping
from typing import Any

from torch import Tensor


def remove_samples(batch: MutableMapping, bad: Collection[int], num_samples: int) -> tuple[int, ...] | None:
    """Removes samples from a batch in place, before its items are counted.

    That needs one entry per sample in every tensor and list; anything else must be a single value. Packed sequences, and
    patches of several images in one tensor, do not have that.

    Args:
        batch (`MutableMapping`):
            The collated batch.
        bad (`Collection[int]`):
            Which samples.
        num_samples (`int`):
            How many samples the batch has.

    Returns:
        `tuple[int, ...] | None`: the samples that are left, `None` if the batch was not changed because its fields cannot
        be split or no sample would be left.
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
    return value is None or isinstance(value, (str, bool, int, float))
