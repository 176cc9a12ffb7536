"""Finds which samples of a micro-batch suffice to reproduce a fault, and which of their tokens.

The positions at the origin suggest where to look first; only a replay without the other samples proves it. The others are
replaced by copies of the samples in question, so that each of these keeps its place: it meets the same random numbers (dropout),
and layers and losses see a batch of the same size. Where the others cannot be replaced (`SuspectBatch.is_replaceable`), the
batch is cut; then a fault that takes the random numbers of its place may not be found.

The batch is bisected until single samples are left, which takes about 2 log2(batch size) passes for one bad sample. A finite
half is not searched; if both halves of a non-finite part are finite, no sample alone is to blame. At last each sample found
must fail at the place where the batch did, next to samples that are finite in the same arrangement without it: a single
sample may fail in a way of its own, for example if a loss divides by a deviation over the batch.
"""

from collections.abc import Callable, Sequence

from ....boundary import attempt
from ..trace.origin import Origin
from .suspect_batch import SuspectBatch, find_fields
from .verdict import Blame

MAX_TOKENS = 16
MAX_CHECKS = 8
SEQUENCES = ("input_ids", "decoder_input_ids", "labels", "completion_ids", "attention_mask", "inputs_embeds")


def find_blame(suspect: SuspectBatch, origin: Origin, allowed: Callable[[], bool]) -> Blame:
    """Returns which samples it takes to reproduce a fault.

    `allowed` is called before every replay; once it returns `False`, what is known by then is returned.
    """
    number = suspect.num_samples
    if number is None:
        return Blame()
    tokens = map_positions(origin, suspect)
    seen = sorted({sample for sample, _ in tokens})
    proved = suspect.others_pass or origin.phase == "input"
    if number == 1:
        return _blame(suspect, "samples" if proved else "only_sample", [0], tokens)

    def is_bad(samples: Sequence[int]) -> bool:
        if not allowed():
            raise TimeoutError
        return not suspect.run(_arrange(suspect, samples, samples)).healthy

    def search() -> tuple[list[int], bool]:
        found, together = _search(list(range(number)), seen, is_bad)
        if together:
            return found, together
        same = _keep_same(suspect, origin, found, allowed)
        return same, not same

    outcome = attempt(search, lambda error: None)
    if outcome is None:  # out of time, or the batch cannot be cut: images, packing, a loss that needs this size
        return _blame(suspect, "untried", seen if len(seen) < number else None, tokens)
    found, together = outcome
    if together:
        return _blame(suspect, "batch", found if found and len(found) < number else None, tokens)
    if len(found) == number and not proved:
        return _blame(suspect, "every_sample", found, [])
    return _blame(suspect, "samples", found, tokens)


def _blame(suspect: SuspectBatch, scope: str, samples: list[int] | None, tokens: list[tuple[int, int | None]]) -> Blame:
    chosen, rows = samples or [], suspect.rows or []
    shown = [[sample, token] for sample, token in tokens if token is not None and sample in chosen]
    rows = [rows[sample] for sample in chosen if sample < len(rows)]
    return Blame(scope, samples or None, shown[:MAX_TOKENS] or None, rows or None)


def find_raising(suspect: SuspectBatch, kind: type[Exception], allowed: Callable[[], bool]) -> list[int]:
    """Returns the samples for which the forward raises an exception of a kind, while others pass; none if that is not known."""
    number = suspect.num_samples
    if number is None or number == 1:
        return []

    def raises(samples: Sequence[int]) -> bool:
        if not allowed():
            raise TimeoutError
        return suspect.raises(_arrange(suspect, samples, samples), kind)

    def search() -> list[int]:
        if not raises(range(number)):  # it came from the backward pass, or does not come again
            return []
        found, together = _search(list(range(number)), [], raises)
        return [] if together or len(found) == number else found

    return attempt(search, lambda error: [])


def _search(everyone: list[int], seen: list[int], is_bad: Callable[[Sequence[int]], bool]) -> tuple[list[int], bool]:
    """Returns the samples to blame, and whether the fault takes several of them together."""
    together = False

    def search(samples: list[int]) -> list[int]:
        """Finds the culprits among samples that are non-finite together."""
        nonlocal together
        if len(samples) == 1:
            return samples
        middle = len(samples) // 2
        found = [s for half in (samples[:middle], samples[middle:]) if is_bad(half) for s in search(half)]
        if not found:
            together = True
            return samples
        return found

    others = [sample for sample in everyone if sample not in seen]
    if not seen or not others:
        return search(everyone), together
    found = [s for part in (seen, others) if is_bad(part) for s in search(part)]
    return (sorted(found), together) if found else (everyone, True)


def _arrange(suspect: SuspectBatch, samples: Sequence[int], fillers: Sequence[int]) -> list[int]:
    """Returns which samples to run to see what some do: these and the fillers at their places, copies of the fillers at all
    other places; if samples cannot be replaced, only these."""
    if not suspect.is_replaceable:
        return list(samples)
    kept = {*samples, *fillers}
    return [place if place in kept else fillers[place % len(fillers)] for place in range(suspect.num_samples or 0)]


def _keep_same(suspect: SuspectBatch, origin: Origin, found: list[int], allowed: Callable[[], bool]) -> list[int]:
    """Returns the samples that alone fail at the place where the batch did; after `MAX_CHECKS` the rest is assumed to."""
    rest = [sample for sample in range(suspect.num_samples or 0) if sample not in found]
    exact = suspect.is_replaceable and len(rest) > 0
    if exact and allowed() and not suspect.run(_arrange(suspect, rest, rest)).healthy:
        return []  # other samples fail in their places, too
    kept: list[int] = []
    for number, sample in enumerate(found):
        if len(kept) == number == MAX_CHECKS or not allowed():
            return kept + found[number:]
        alone = suspect.find_origin(_arrange(suspect, [sample], rest or [sample]))
        if alone is None:
            same = not exact  # what differs from a finite batch by this sample is finite: it was bad as a copy only
        else:
            same = (alone.module, alone.source, alone.leaf) == (origin.module, origin.source, origin.leaf)
        kept += [sample] if same else []
    return kept or [sample for sample in found[:MAX_CHECKS] if allowed() and _is_needed(suspect, sample)]


def _is_needed(suspect: SuspectBatch, sample: int) -> bool:
    """Whether the batch is finite without one sample."""
    rest = [other for other in range(suspect.num_samples or 0) if other != sample]
    enough = len(rest) > (0 if suspect.is_replaceable else 1)
    return enough and suspect.run(_arrange(suspect, rest, rest)).healthy


def map_positions(origin: Origin, suspect: SuspectBatch) -> list[tuple[int, int | None]]:
    """Returns sample and token of the non-finite values at the origin, as far as they follow from the shape.

    Supported shapes are `[batch, ...]`, `[batch, tokens, ...]`, `[batch * tokens, ...]`, and attention's
    `[batch, heads, tokens, ...]` and `[batch * heads, tokens, ...]`.
    """
    entries, samples = suspect.num_entries, suspect.num_samples
    if entries is None or samples is None or not origin.shape:
        return []
    if len(origin.shape) == 1 and origin.phase not in ("input", "loss"):
        return []  # a vector inside a model more likely has one entry per feature than per sample
    sequences = find_fields(suspect.fields, SEQUENCES)
    length = next((int(field.shape[1]) for field in sequences if field.ndim >= 2), None)
    found = [_map_position(position, origin.shape, entries, length) for position in origin.positions]
    if (documents := suspect.documents) is not None:
        return sorted({documents.locate(token) for entry, token in found if entry == 0 and token is not None})
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
