"""Whose data it was: which samples of a micro-batch suffice to reproduce a fault, and which of their tokens.

Where the bad number was born says where to look first; only a replay without the other samples proves it. Halves are
run until single samples are left, which costs about as many passes as the batch has bits. A half that is healthy is not
looked at again; if both halves of something bad are healthy, no sample alone is to blame. A sample alone may be bad in
its own way, as where a loss divides by a deviation over the batch; so it must be bad at the same place.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from ..trace.origin import Origin
from .suspect_batch import SuspectBatch, find_fields
from .verdict import Blame

MAX_TOKENS = 16
MAX_CHECKS = 8
SEQUENCES = ("input_ids", "decoder_input_ids", "labels", "completion_ids", "attention_mask", "inputs_embeds")


def find_blame(suspect: SuspectBatch, origin: Origin, allowed: Callable[[], bool]) -> Blame:
    """Returns whose data a fault needs.

    Args:
        specimen (`SuspectBatch`):
            The bad micro-batch.
        origin (`Origin`):
            Where its bad number was born.
        allowed (`Callable`):
            Asked before every replay; once it says no, what is known by then is returned.
    """
    number = suspect.num_samples
    if number is None:
        return Blame()
    tokens = map_positions(origin, suspect)
    seen = sorted({sample for sample, _ in tokens})
    if number == 1:
        return _blame(suspect, "samples", [0], tokens)
    try:
        found, together = _search(suspect, seen, allowed)
        if not together:
            found = _keep_same(suspect, origin, found, allowed)
            together = not found
    except _OutOfTimeError:
        return _blame(suspect, "untried", seen, tokens)
    except Exception:  # this batch cannot be cut: images, packing, a loss that insists on its size by any means
        return _blame(suspect, "untried", seen, tokens)
    if together:
        return _blame(suspect, "batch", found if found and len(found) < number else None, tokens)
    if len(found) == number:
        return _blame(suspect, "every_sample", found, [])
    return _blame(suspect, "samples", found, tokens)


def _blame(suspect: SuspectBatch, scope: str, samples: list[int] | None, tokens: list[tuple[int, int | None]]) -> Blame:
    rows = suspect.rows
    chosen = [s for s in (samples or []) if rows is not None and s < len(rows)]
    shown = [[sample, token] for sample, token in tokens if token is not None and sample in (samples or [])]
    return Blame(
        scope=scope,
        samples=samples or None,
        tokens=shown[:MAX_TOKENS] or None,
        rows=[rows[s] for s in chosen] if rows is not None and chosen else None,
    )


class _OutOfTimeError(Exception):
    pass


def _search(suspect: SuspectBatch, seen: list[int], allowed: Callable[[], bool]) -> tuple[list[int], bool]:
    """Returns the samples to blame, and whether it takes several of them together."""
    together = False

    def is_bad(samples: Sequence[int]) -> bool:
        if not allowed():
            raise _OutOfTimeError
        return not suspect.run(samples).healthy

    def search(samples: list[int]) -> list[int]:
        """Finds the culprits among samples that are bad together."""
        nonlocal together
        if len(samples) == 1:
            return samples
        middle = len(samples) // 2
        found = [s for half in (samples[:middle], samples[middle:]) if is_bad(half) for s in search(half)]
        if not found:
            together = True
            return samples
        return found

    number = suspect.num_samples
    assert number is not None
    others = [sample for sample in range(number) if sample not in seen]
    if not seen or not others:
        return search(list(range(number))), together
    found = [s for part in (seen, others) if is_bad(part) for s in search(part)]
    if not found:
        return list(range(number)), True
    return sorted(found), together


def _keep_same(suspect: SuspectBatch, origin: Origin, found: list[int], allowed: Callable[[], bool]) -> list[int]:
    """Returns the samples that alone are bad where the batch was; after some that are, the others are taken for it."""
    kept: list[int] = []
    for number, sample in enumerate(found):
        if len(kept) == number == MAX_CHECKS or not allowed():
            return kept + found[number:]
        alone = suspect.find_origin([sample])
        if alone is None or (alone.module, alone.source, alone.leaf) == (origin.module, origin.source, origin.leaf):
            kept.append(sample)
    return kept or [sample for sample in found[:MAX_CHECKS] if allowed() and _is_needed(suspect, sample)]


def _is_needed(suspect: SuspectBatch, sample: int) -> bool:
    """Whether the batch is healthy without one sample."""
    rest = [other for other in range(suspect.num_samples or 0) if other != sample]
    return len(rest) > 1 and suspect.run(rest).healthy


def map_positions(origin: Origin, suspect: SuspectBatch) -> list[tuple[int, int | None]]:
    """Returns sample and token of the bad values at the origin, as far as the shape tells them.

    Understood are `[batch, ...]`, `[batch, tokens, ...]`, `[batch * tokens, ...]`, and attention's
    `[batch, heads, tokens, ...]` and `[batch * heads, tokens, ...]`.
    """
    entries, samples = suspect.num_entries, suspect.num_samples
    if entries is None or samples is None or not origin.shape:
        return []
    if len(origin.shape) == 1 and origin.phase not in ("input", "loss"):
        return []  # a vector inside a model is rather one of its features than of its samples
    length = _sequence_length(suspect.fields)
    found = [_map_position(position, origin.shape, entries, length) for position in origin.positions]
    return sorted({(entry % samples, token) for entry, token in found if entry is not None}, key=str)


def _map_position(
    position: tuple[int, ...], shape: tuple[int, ...], entries: int, length: int | None
) -> tuple[int | None, int | None]:
    lengths = () if length is None else (length, length - 1)
    first = shape[0]
    if first == entries:
        for axis in (1, 2):  # tokens come right after the batch, or after the heads
            if axis < len(position) and shape[axis] in lengths:
                return position[0], position[axis]
        return position[0], None
    for tokens in lengths:
        if tokens and first == entries * tokens:
            return position[0] // tokens, position[0] % tokens
    if first % entries == 0 and len(shape) > 2 and shape[1] in lengths:
        return position[0] // (first // entries), position[1]
    return None, None


def _sequence_length(fields: dict[str, Tensor]) -> int | None:
    return next((int(field.shape[1]) for field in find_fields(fields, SEQUENCES) if field.ndim >= 2), None)
