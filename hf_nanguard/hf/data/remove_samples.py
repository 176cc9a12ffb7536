"""Removes single samples from a collated batch whose fields have one entry per sample."""

from collections.abc import Collection, MutableMapping

from torch import Tensor

Batch = MutableMapping[str, object]
"""A collated batch, on the CPU."""


def remove_samples(batch: Batch, bad: Collection[int], num_samples: int) -> tuple[int, ...] | None:
    """Removes the bad samples from a collated batch in place, before its items are counted, and returns those that are left;
    `None` if the batch was not changed because its fields cannot be split or no sample would be left.

    That needs one entry per sample in every tensor and list; anything else must be a single value. Packed sequences, and
    patches of several images in one tensor, do not have that.
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


def _has_samples(value: object, num_samples: int) -> bool:
    if isinstance(value, Tensor):
        return value.ndim > 0 and len(value) == num_samples
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and len(value) == num_samples  # not a named tuple
    return value is None or isinstance(value, (str, bool, int, float))
